/* The agent: process 1 of a sandbox. Starts commands and file operations, reaps, and reports over one socket.
 *
 * It is forked from the zygote and never executes anything itself, so that its memory belongs to the outer user
 * namespace and not even the sandbox's root may look into /proc/1. It ends when the host closes the socket.
 */
#include "helper.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

struct command {
    uint32_t id, flags;
    pid_t pid;
};

static struct command *commands; /* those whose main process lives */
static int command_count, command_capacity;
static int host, proc_fd, null_fd, oom_counter;
static char message[MAX_MESSAGE];

uint64_t read_oom_kills(int fd) {
    char text[512];
    ssize_t size = fd < 0 ? 0 : pread(fd, text, sizeof text - 1, 0);
    text[size > 0 ? size : 0] = 0;
    char *found = strstr(text, "oom_kill "); /* memory.oom_control (v1) and memory.events (v2) both have this line */
    return found ? strtoull(found + 9, NULL, 10) : 0;
}

static void send_reply(const struct reply *reply) {
    if (send(host, reply, sizeof *reply, MSG_NOSIGNAL) < 0)
        _exit(0); /* the host is gone */
}

static void report_start_failure(const struct request *request, int error, const char *stage) {
    struct reply reply = {.kind = REPLY_EXIT, .id = request->id, .error = error, .oom_kills = read_oom_kills(oom_counter)};
    snprintf(reply.stage, sizeof reply.stage, "%s", stage);
    send_reply(&reply);
}

static bool remember(uint32_t id, uint32_t flags, pid_t pid) {
    if (command_count == command_capacity) {
        int capacity = command_capacity ? 2 * command_capacity : 16;
        struct command *larger = realloc(commands, (size_t)capacity * sizeof *commands);
        if (!larger)
            return false;
        commands = larger;
        command_capacity = capacity;
    }
    commands[command_count++] = (struct command){id, flags, pid};
    return true;
}

/* ---- starting ---- */

struct start { /* what the child needs, unpacked before the fork */
    const struct request *request;
    const char *directory;
    char **arguments, **environment;
    int fds[MAX_FDS], fd_count;
    int tty;
};

/* The child's failure, written by it: a vfork shares memory until the command executes. */
static volatile int child_error;
static const char *volatile child_stage;

static int become_user(const struct request *request) {
    if (syscall(SYS_setgroups, (size_t)request->group_count, request->groups) < 0 &&
        (errno != EPERM || request->group_count)) /* a map of one id has no groups to set or leave */
        return errno;
    if (syscall(SYS_setresgid, request->gid, request->gid, request->gid) < 0 ||
        syscall(SYS_setresuid, request->uid, request->uid, request->uid) < 0)
        return errno;
    return 0;
}

static int place_descriptors(const struct start *start) {
    int base = start->request->flags & EXEC_NULL_STDIN ? 1 : 0;
    if (base && dup2(null_fd, 0) < 0)
        return errno;
    for (int i = 0; i < start->fd_count; i++) /* received descriptors are numbered above 2 * MAX_FDS */
        if (dup2(start->fds[i], base + i) < 0)
            return errno;
    return 0;
}

static void execute_through_path(char *const *arguments, char *const *environment) {
    const char *path = NULL, *name = arguments[0];
    for (char *const *variable = environment; *variable; variable++)
        if (!strncmp(*variable, "PATH=", 5))
            path = *variable + 5;
    if (strchr(name, '/') || !path) {
        execve(name, arguments, environment);
        return;
    }
    int kept = ENOENT;
    char full[4096];
    while (*path) {
        size_t size = strcspn(path, ":");
        if (size && snprintf(full, sizeof full, "%.*s/%s", (int)size, path, name) < (int)sizeof full) {
            execve(full, arguments, environment);
            if (errno == EACCES)
                kept = EACCES;
            else if (errno != ENOENT && errno != ENOTDIR)
                return;
        }
        path += size + (path[size] == ':');
    }
    errno = kept;
}

static _Noreturn void fail_child(const char *stage) {
    child_error = errno ? errno : EINVAL;
    child_stage = stage;
    _exit(127);
}

static _Noreturn void child_main(const struct start *start) {
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    setsid();
    if (place_descriptors(start))
        fail_child("descriptors");
    /* Before any path is looked up: none may lead to a descriptor of ours. */
    close_from((unsigned)start->fd_count + (start->request->flags & EXEC_NULL_STDIN ? 1 : 0));
    if (start->tty && ioctl(0, TIOCSCTTY, 0) < 0)
        fail_child("terminal");
    prctl(PR_SET_CHILD_SUBREAPER, 1); /* kept over execve: see processes.c */
    if (become_user(start->request))
        fail_child("user");
    if (chdir(start->directory) < 0)
        fail_child("working directory");
    execute_through_path(start->arguments, start->environment);
    fail_child("execute");
}

static void start_command(const struct start *start) {
    child_error = 0;
    pid_t pid = vfork();
    if (pid == 0)
        child_main(start);
    if (pid > 0 && child_error) {
        waitpid(pid, NULL, 0);
        report_start_failure(start->request, child_error, child_stage);
    } else if (pid < 0 || !remember(start->request->id, start->request->flags, pid)) {
        report_start_failure(start->request, errno, "fork");
        if (pid > 0)
            kill(pid, SIGKILL);
    }
}

static void start_file_operation(const struct start *start) {
    pid_t pid = fork();
    if (pid == 0) {
        int upper = openat(UPPER, "upper", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        int error = place_descriptors(start);
        if (!error && dup2(upper, LAYER_FD) < 0)
            error = errno;
        close_from(start->request->operation == FILES_CHANGES ? LAYER_FD + 1 : LAYER_FD);
        if (!error)
            error = become_user(start->request);
        _exit(error ? error : run_file_operation(start->request, start->arguments[0]));
    }
    if (pid < 0 || !remember(start->request->id, 0, pid))
        report_start_failure(start->request, errno, "fork");
}

/* ---- messages ---- */

/* Splits `size` bytes of NUL-ended strings into `count` pointers and a final NULL; false if they don't fit exactly. */
static bool split(char **cursor, char *end, uint32_t count, char **into) {
    for (uint32_t i = 0; i < count; i++) {
        char *stop = *cursor < end ? memchr(*cursor, 0, (size_t)(end - *cursor)) : NULL;
        if (!stop)
            return false;
        into[i] = *cursor;
        *cursor = stop + 1;
    }
    into[count] = NULL;
    return true;
}

static int start_from(const struct request *request, char *payload, int *fds, int fd_count) {
    char *cursor = payload, *end = payload + request->payload_length;
    uint64_t pointers = (uint64_t)request->argument_count + request->environment_count + 2;
    if (!request->argument_count || pointers > request->payload_length + 3 || request->group_count > MAX_GROUPS)
        return EBADMSG;
    char **strings = malloc((size_t)pointers * sizeof *strings), *directory[2];
    if (!strings)
        return ENOMEM;
    struct start start = {.request = request, .arguments = strings, .fd_count = fd_count,
                          .environment = strings + request->argument_count + 1, .tty = request->flags & EXEC_TTY};
    memcpy(start.fds, fds, sizeof start.fds);
    int error = 0;
    if (!split(&cursor, end, 1, directory) || !split(&cursor, end, request->argument_count, start.arguments) ||
        !split(&cursor, end, request->environment_count, start.environment) || cursor != end) {
        error = EBADMSG;
    } else {
        start.directory = directory[0];
        if (request->kind == AGENT_EXEC)
            start_command(&start);
        else
            start_file_operation(&start);
    }
    free(strings);
    return error;
}

static int start_with_memory_file(const struct request *request, int *fds, int fd_count) {
    struct stat status;
    int file = fd_count ? fds[fd_count - 1] : -1;
    if (request->payload_length > MAX_PAYLOAD || fstat(file, &status) < 0 ||
        (uint64_t)status.st_size < request->payload_length)
        return EBADMSG;
    char *payload = mmap(NULL, request->payload_length, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    if (payload == MAP_FAILED)
        return errno;
    int error = start_from(request, payload, fds, fd_count - 1);
    munmap(payload, request->payload_length);
    return error;
}

static void kill_command(const struct request *request) {
    pid_t main = 0, *spared = malloc((size_t)(command_count + 1) * sizeof *spared);
    int spared_count = 0;
    for (int i = 0; spared && i < command_count; i++) {
        if (commands[i].id == request->id)
            main = commands[i].pid;
        else
            spared[spared_count++] = commands[i].pid;
    }
    if (main || (spared && (request->operation == KILL_LEFTOVERS || request->operation == KILL_ALL)))
        kill_processes(proc_fd, (int)request->operation, main, spared, spared_count, (int)request->mode);
    free(spared);
}

/* Takes the descriptors of a message; those above MAX_FDS are closed. Returns how many are kept. */
static int take_descriptors(struct msghdr *header, int *fds) {
    int count = 0;
    for (struct cmsghdr *part = CMSG_FIRSTHDR(header); part; part = CMSG_NXTHDR(header, part)) {
        if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS)
            continue;
        size_t received = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < received; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(part) + i * sizeof fd, sizeof fd);
            if (count < MAX_FDS) { /* moved up, so that dup2 onto 0..8 never overwrites one still needed */
                fds[count++] = fcntl(fd, F_DUPFD_CLOEXEC, 32);
            }
            close(fd);
        }
    }
    return count;
}

static void handle_message(void) {
    union {
        char space[CMSG_SPACE(sizeof(int) * 16)];
        struct cmsghdr align;
    } control;
    struct iovec part = {message, sizeof message};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t size = recvmsg(host, &header, MSG_CMSG_CLOEXEC);
    if (size < 0 && errno == EINTR)
        return;
    if (size <= 0)
        _exit(0); /* closed: the kernel kills what is left in this pid namespace */
    int fds[MAX_FDS], fd_count = take_descriptors(&header, fds);
    struct request *request = (struct request *)message;
    int error = 0;
    if ((size_t)size < sizeof *request || header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) {
        _exit(71); /* can't even be answered: the host speaks another language */
    } else if (request->kind == AGENT_KILL) {
        kill_command(request);
    } else if (request->kind != AGENT_EXEC && request->kind != AGENT_FILES) {
        error = EBADMSG;
    } else if (request->flags & EXEC_MEMORY_FILE) {
        error = start_with_memory_file(request, fds, fd_count);
    } else {
        error = request->payload_length == (size_t)size - sizeof *request
                    ? start_from(request, message + sizeof *request, fds, fd_count)
                    : EBADMSG;
    }
    if (error)
        report_start_failure(request, error, "message");
    for (int i = 0; i < fd_count; i++)
        close(fds[i]);
}

/* ---- reaping ---- */

static uint64_t microseconds(struct timeval time) { return (uint64_t)time.tv_sec * 1000000u + (uint64_t)time.tv_usec; }

static void report_exit(int index, int status, const struct rusage *usage) {
    struct command ended = commands[index];
    commands[index] = commands[--command_count];
    if (ended.flags & EXEC_KILL_LEFTOVERS)
        kill_command(&(struct request){.id = ended.id, .operation = KILL_LEFTOVERS, .mode = SIGKILL});
    struct reply reply = {.kind = REPLY_EXIT,
                          .id = ended.id,
                          .status = status,
                          .cpu_us = microseconds(usage->ru_utime) + microseconds(usage->ru_stime),
                          .peak_rss_kib = (uint64_t)usage->ru_maxrss,
                          .oom_kills = read_oom_kills(oom_counter)};
    send_reply(&reply);
}

static void reap(void) {
    int status;
    struct rusage usage;
    for (pid_t pid; (pid = wait4(-1, &status, WNOHANG, &usage)) > 0;)
        for (int i = 0; i < command_count; i++)
            if (commands[i].pid == pid) {
                report_exit(i, status, &usage);
                break;
            }
}

static void on_child(int number) { (void)number; }

_Noreturn void agent_main(int socket, int oom_fd) {
    host = socket;
    oom_counter = oom_fd;
    proc_fd = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    sigset_t blocked, waiting;
    sigemptyset(&waiting);
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGCHLD);
    sigprocmask(SIG_BLOCK, &blocked, NULL);
    sigaction(SIGCHLD, &(struct sigaction){.sa_handler = on_child}, NULL);
    umask(022);
    send_reply(&(struct reply){.kind = REPLY_READY, .id = WIRE_VERSION});
    for (;;) {
        struct pollfd ready = {.fd = host, .events = POLLIN};
        if (ppoll(&ready, 1, NULL, &waiting) > 0)
            handle_message();
        reap();
    }
}
