/* The zygote: one small process per pool that makes sandboxes, reaps them and cleans up after them.
 *
 * It is started by the host over descriptor 3, reads one specification, then serves control messages. When the host
 * goes, whatever way, it kills every sandbox, removes its control groups and ends. It has no secrets: it starts with
 * an empty environment, and agents are copies of it.
 */
#include "helper.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_POOLED = 512, MAX_SANDBOXES = 1 << 20 };

struct sandbox {
    pid_t pid; /* 0: unused */
    uint64_t oom_kills_before;
    struct slot slot;
    int link, upper; /* rootless: where the descriptor of the writable layer comes from, and it; else -1 */
};
struct worker { /* a copy of layers in progress */
    pid_t pid;
    uint32_t sandbox, layer;
    bool frozen;
};

static struct sandbox *sandboxes;        /* by id */
static uint32_t id_of_pid[1 << 22];       /* the kernel's PID_MAX_LIMIT; only touched pages cost memory */
static uint32_t sandbox_capacity;
static struct slot free_slots[MAX_POOLED];
static int free_count, pooled_count, next_index;
static struct worker workers[64];
static struct image image;
static uint32_t base, ids = ID_RANGE;
static bool rootless;
static char owner[128];

void close_from(unsigned fd) { syscall(436 /* close_range */, fd, ~0u, 0); }

static void send_event(uint32_t kind, uint32_t id, int error, const char *stage, int status, uint64_t oom_kills) {
    struct event event = {.kind = kind, .id = id, .error = error, .status = status, .oom_kills = oom_kills};
    snprintf(event.stage, sizeof event.stage, "%s", stage);
    (void)!send(CONTROL_FD, &event, sizeof event, MSG_NOSIGNAL); /* a host that is gone is seen by poll */
}

_Noreturn void die(const char *what) {
    send_event(EVENT_FAILED, 0, errno, what, 0, 0);
    _exit(1);
}

/* ---- network namespaces ---- */

/* Enters a new network namespace with loopback up, owned by the outer user namespace: inside nobody administers it. */
static int make_network(void) {
    if (unshare(CLONE_NEWNET) < 0 || bring_loopback_up() < 0)
        return -1;
    write_text(AT_FDCWD, "/proc/sys/net/ipv4/ip_unprivileged_port_start", "0");
    write_text(AT_FDCWD, "/proc/sys/net/ipv4/ping_group_range", "0 2147483647");
    return open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
}

/* Whether the namespace just entered holds nothing of its last tenant: no socket, no connection in TIME_WAIT. */
static bool network_is_clean(void) {
    char text[1024];
    int fd = open("/proc/net/sockstat", O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    text[size > 0 ? size : 0] = 0;
    char *tcp = strstr(text, "TCP: inuse 0 "), *udp = strstr(text, "UDP: inuse 0 ");
    return tcp && udp && strstr(text, " tw 0 ");
}

static int enter_network(struct slot *slot) {
    if (slot->network_fd >= 0 && setns(slot->network_fd, CLONE_NEWNET) == 0 && network_is_clean())
        return 0;
    if (slot->network_fd >= 0)
        close(slot->network_fd);
    slot->network_fd = make_network();
    return slot->network_fd < 0 ? -1 : 0;
}

/* ---- slots ---- */

static int take_slot(struct slot *slot) {
    if (free_count) {
        *slot = free_slots[--free_count];
        return 0;
    }
    bool pooled = pooled_count < MAX_POOLED;
    pooled_count += pooled;
    return open_slot(slot, next_index++, pooled);
}

static void give_slot_back(struct slot *slot) {
    if (slot->pooled && !slot->broken) {
        free_slots[free_count++] = *slot;
        return;
    }
    pooled_count -= slot->pooled;
    close_slot(slot);
}

/* ---- birth ---- */

/* Without root the zygote can't look into an agent's /proc, as nobody can: each agent sends it the descriptor of its
 * writable layer, which is taken from the socket when a snapshot first needs it. */
enum { LINK = UPPER + 1 };

static void send_descriptor(int link, int fd) {
    union {
        char space[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } buffer = {0};
    struct iovec part = {"", 1};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &buffer, .msg_controllen = sizeof buffer};
    struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(rights), &fd, sizeof fd);
    (void)!sendmsg(link, &header, MSG_NOSIGNAL);
}

static int take_descriptor(int link) {
    union {
        char space[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } buffer;
    char byte;
    int fd = -1;
    struct iovec part = {&byte, 1};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &buffer, .msg_controllen = sizeof buffer};
    if (recvmsg(link, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) == 1 && CMSG_FIRSTHDR(&header))
        memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&header)), sizeof fd);
    return fd;
}

static void close_descriptor(int *fd) {
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static pid_t clone_into(const struct slot *slot, uint64_t flags) {
    struct {
        uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup;
    } arguments = {.flags = flags, .exit_signal = SIGCHLD};
    if (slot->group_fd >= 0) {
        arguments.flags |= 0x200000000ull; /* CLONE_INTO_CGROUP */
        arguments.cgroup = (uint64_t)slot->group_fd;
    }
    return (pid_t)syscall(435 /* clone3 */, &arguments, sizeof arguments);
}

static _Noreturn void become_sandbox(const struct control *control, int agent, int oom_fd, int go) {
    const char *stage = "wait for the id map";
    char byte;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (read(go, &byte, 1) != 1)
        _exit(1);
    dup3(agent, CONTROL_FD, O_CLOEXEC);
    if (oom_fd >= 0)
        dup3(oom_fd, OOM_FD, O_CLOEXEC);
    if (rootless)
        dup3(go, LINK, O_CLOEXEC);
    close_from(rootless ? LINK + 1 : OOM_FD + 1);
    if (rootless)
        close(UPPER);
    struct birth birth = {.image = &image, .disk = control->disk, .inodes = control->inodes, .network = control->network,
                          .open_files = control->open_files, .ids = ids,
                          .processes = groups_limit_processes() ? 0 : control->pids,
                          .memory = groups_limit_memory() ? 0 : control->memory, .layer_count = control->layer_count, .layers = control->layers};
    if (set_up_sandbox(&birth, &stage) < 0) {
        struct reply reply = {.kind = REPLY_READY, .id = WIRE_VERSION, .error = errno};
        snprintf(reply.stage, sizeof reply.stage, "%s", stage);
        (void)!send(CONTROL_FD, &reply, sizeof reply, MSG_NOSIGNAL);
        _exit(1);
    }
    if (rootless) {
        send_descriptor(LINK, UPPER);
        close(LINK);
    }
    agent_main(CONTROL_FD, oom_fd >= 0 ? OOM_FD : -1);
}

static int map_ids(pid_t pid) {
    char path[64], map[64];
    if (rootless && ids > 1) /* a range may not span two of the outer map's, and the first id is one of its own */
        snprintf(map, sizeof map, "0 0 1\n1 1 %u", ids - 1);
    else
        snprintf(map, sizeof map, "0 %u %u", base, ids);
    snprintf(path, sizeof path, "/proc/%d/uid_map", pid);
    if (write_text(AT_FDCWD, path, map) < 0)
        return -1;
    snprintf(path, sizeof path, "/proc/%d/gid_map", pid);
    return write_text(AT_FDCWD, path, map);
}

/* Clones the process and completes what only the outside can do; the child waits on the pipe meanwhile. */
static int give_birth(struct sandbox *sandbox, const struct control *control, int agent, const char **stage) {
    int go[2];
    uint64_t flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP |
                     (control->network == NETWORK_FRESH ? CLONE_NEWNET : 0);
    *stage = "pipe";
    if (rootless ? socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, go) < 0 : pipe2(go, O_CLOEXEC) < 0)
        return -1;
    *stage = "clone into new namespaces";
    pid_t pid = clone_into(&sandbox->slot, flags);
    if (pid == 0) {
        close(go[1]);
        become_sandbox(control, agent, sandbox->slot.oom_fd, go[0]);
    }
    int failed = pid < 0;
    if (!failed) {
        *stage = "map user ids";
        failed = map_ids(pid) < 0;
    }
    if (!failed) {
        *stage = "attach to control groups";
        failed = attach_to_slot(&sandbox->slot, pid) < 0 || write(go[1], "", 1) != 1;
    }
    int kept = errno;
    close(go[0]);
    if (rootless && !failed)
        sandbox->link = go[1];
    else
        close(go[1]);
    if (failed && pid > 0) {
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
    }
    sandbox->pid = failed ? 0 : pid;
    errno = kept;
    return failed ? -1 : 0;
}

static int prepare(struct sandbox *sandbox, const struct control *control, const char **stage) {
    struct limits limits = {control->memory, control->pids, control->cpu_percent};
    *stage = "make control groups";
    if (take_slot(&sandbox->slot) < 0)
        return -1;
    *stage = "set limits";
    if (limit_slot(&sandbox->slot, &limits) < 0)
        return -1;
    *stage = "make a network namespace";
    if (control->network == NETWORK_POOLED && enter_network(&sandbox->slot) < 0)
        return -1;
    sandbox->oom_kills_before = slot_oom_kills(&sandbox->slot);
    return 0;
}

static struct sandbox *record(uint32_t id) {
    if (id >= MAX_SANDBOXES)
        return NULL;
    if (id >= sandbox_capacity) {
        uint32_t capacity = id * 2 + 64;
        struct sandbox *larger = realloc(sandboxes, capacity * sizeof *sandboxes);
        if (!larger)
            return NULL;
        memset(larger + sandbox_capacity, 0, (capacity - sandbox_capacity) * sizeof *larger);
        sandboxes = larger;
        sandbox_capacity = capacity;
    }
    return &sandboxes[id];
}

static void handle_create(const struct control *control, int agent) {
    const char *stage = "record";
    struct sandbox *sandbox = record(control->id);
    if (!sandbox || sandbox->pid || agent < 0 || control->layer_count > MAX_LAYERS) {
        send_event(EVENT_FAILED, control->id, EINVAL, stage, 0, 0);
        return;
    }
    *sandbox = (struct sandbox){.slot.index = -1, .link = -1, .upper = -1};
    if (prepare(sandbox, control, &stage) < 0 || give_birth(sandbox, control, agent, &stage) < 0) {
        int error = errno;
        if (sandbox->slot.index >= 0) {
            sandbox->slot.broken = true; /* it may be what failed */
            give_slot_back(&sandbox->slot);
        }
        send_event(EVENT_FAILED, control->id, error, stage, 0, 0);
        return;
    }
    id_of_pid[sandbox->pid] = control->id;
    if (!sandbox->slot.pooled)
        slim_slot(&sandbox->slot);
}

/* ---- layers ---- */

static void layer_path(char *path, size_t size, uint32_t layer) { snprintf(path, size, "/s/%u", layer); }

static int drop_layer(uint32_t layer) {
    char path[32];
    layer_path(path, sizeof path, layer);
    return umount2(path, MNT_DETACH) < 0 || rmdir(path) < 0 ? -1 : 0;
}

static int open_upper(const char *path) {
    return open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

static int open_writable_layer(const struct sandbox *sandbox) {
    char path[64];
    if (sandbox->upper >= 0)
        return openat(sandbox->upper, "upper", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    snprintf(path, sizeof path, "/proc/%d/fd/%d/upper", sandbox->pid, UPPER);
    return open_upper(path);
}

static int copy_layers(const struct control *control, const struct sandbox *sandbox, const char *target_path) {
    char path[64];
    snprintf(path, sizeof path, "%s/upper", target_path);
    int target = open_upper(path), error = target < 0 ? errno : 0;
    if (control->argument != SNAPSHOT_FLATTEN) {
        int source = open_writable_layer(sandbox);
        return error ? error : source < 0 ? errno : apply_layer(source, target);
    }
    for (uint32_t i = 0; !error && i < control->layer_count; i++) {
        snprintf(path, sizeof path, "/s/%u/upper", control->layers[i]);
        int source = open_upper(path);
        error = source < 0 ? errno : apply_layer(source, target);
    }
    return error;
}

/* Copies in a process of its own: a large copy must not stop the making of sandboxes. */
static int start_copy(const struct control *control, struct sandbox *sandbox, const char **stage) {
    struct worker *worker = NULL;
    for (size_t i = 0; i < sizeof workers / sizeof workers[0] && !worker; i++)
        worker = workers[i].pid ? NULL : &workers[i];
    char path[32];
    layer_path(path, sizeof path, control->layer);
    *stage = "mount the layer";
    errno = EAGAIN;
    if (!worker || mkdir(path, 0700) < 0)
        return -1;
    if (mount_layer(path, control->disk, control->inodes, base) < 0) {
        rmdir(path);
        return -1;
    }
    *stage = "freeze";
    bool freeze = sandbox && control->argument == SNAPSHOT_COPY;
    if (freeze && freeze_slot(&sandbox->slot, true) < 0) {
        int kept = errno;
        freeze_slot(&sandbox->slot, false);
        drop_layer(control->layer);
        errno = kept;
        return -1;
    }
    if (sandbox && sandbox->link >= 0 && sandbox->upper < 0)
        sandbox->upper = take_descriptor(sandbox->link);
    pid_t pid = fork();
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        _exit(copy_layers(control, sandbox, path));
    }
    *worker = (struct worker){pid, control->id, control->layer, freeze};
    return pid < 0 ? -1 : 0;
}

static void finish_copy(struct worker *worker, int status) {
    int error = WIFEXITED(status) ? WEXITSTATUS(status) : EIO;
    if (worker->frozen && sandboxes[worker->sandbox].pid)
        freeze_slot(&sandboxes[worker->sandbox].slot, false);
    if (error)
        drop_layer(worker->layer);
    send_event(EVENT_DONE, worker->layer, error, "copy the layer", CONTROL_SNAPSHOT, 0);
    worker->pid = 0;
}

/* ---- death ---- */

static void bury(uint32_t id, int status) {
    struct sandbox *sandbox = &sandboxes[id];
    uint64_t kills = slot_oom_kills(&sandbox->slot);
    sandbox->pid = 0;
    close_descriptor(&sandbox->link);
    close_descriptor(&sandbox->upper);
    send_event(EVENT_DEAD, id, 0, "", status,
               kills > sandbox->oom_kills_before ? kills - sandbox->oom_kills_before : 0);
    give_slot_back(&sandbox->slot);
}

static void reap(void) {
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
        for (size_t i = 0; i < sizeof workers / sizeof workers[0]; i++)
            if (workers[i].pid == pid)
                finish_copy(&workers[i], status);
        if (id_of_pid[pid] < sandbox_capacity && sandboxes[id_of_pid[pid]].pid == pid)
            bury(id_of_pid[pid], status);
    }
}

static _Noreturn void shut_down(void) {
    for (uint32_t id = 0; id < sandbox_capacity; id++)
        if (sandboxes[id].pid)
            kill(sandboxes[id].pid, SIGKILL);
    while (waitpid(-1, NULL, 0) > 0 || errno == EINTR) {
    }
    for (uint32_t id = 0; id < sandbox_capacity; id++)
        if (sandboxes[id].pid)
            close_slot(&sandboxes[id].slot);
    while (free_count)
        close_slot(&free_slots[--free_count]);
    remove_cgroup_owner(owner);
    _exit(0);
}

/* ---- messages ---- */

static void handle_control(const struct control *control, int fd) {
    struct sandbox *sandbox = control->id < sandbox_capacity && sandboxes[control->id].pid ? &sandboxes[control->id] : NULL;
    const char *stage = "no such sandbox";
    int error = 0;
    switch (control->kind) {
    case CONTROL_CREATE:
        handle_create(control, fd);
        return;
    case CONTROL_DESTROY:
        if (!sandbox)
            return; /* died by itself; its event is on the way */
        kill(sandbox->pid, SIGKILL);
        return;
    case CONTROL_FREEZE:
        stage = "freeze";
        error = !sandbox ? ESRCH : freeze_slot(&sandbox->slot, control->argument != 0) < 0 ? errno : 0;
        send_event(EVENT_DONE, control->layer, error, stage, CONTROL_FREEZE, 0);
        return;
    case CONTROL_SNAPSHOT:
        error = control->argument != SNAPSHOT_FLATTEN && !sandbox  ? ESRCH
                : start_copy(control, sandbox, &stage) < 0 ? errno
                                                                   : 0;
        if (error)
            send_event(EVENT_DONE, control->layer, error, stage, CONTROL_SNAPSHOT, 0);
        return;
    case CONTROL_RELEASE:
        error = drop_layer(control->layer) < 0 ? errno : 0;
        send_event(EVENT_DONE, control->layer, error, "release the layer", CONTROL_RELEASE, 0);
        return;
    default:
        send_event(EVENT_FAILED, control->id, EBADMSG, "unknown control message", 0, 0);
    }
}

/* Receives one message and its descriptors; returns its size, 0 at the end. */
static ssize_t receive(void *data, size_t size, int *fds, int max_fds, int *fd_count) {
    static union {
        char space[CMSG_SPACE(sizeof(int) * 250)];
        struct cmsghdr align;
    } buffer;
    struct iovec part = {data, size};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &buffer, .msg_controllen = sizeof buffer};
    ssize_t received = recvmsg(CONTROL_FD, &header, MSG_CMSG_CLOEXEC);
    *fd_count = 0;
    struct cmsghdr *rights = received > 0 ? CMSG_FIRSTHDR(&header) : NULL;
    if (rights && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS) {
        *fd_count = (int)((rights->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        if (*fd_count > max_fds)
            die("too many descriptors");
        memcpy(fds, CMSG_DATA(rights), (size_t)*fd_count * sizeof(int));
    }
    return received;
}

/* Without root, the zygote enters a user namespace in which it is root; the host has its ids mapped, and says when.
 * It stays dumpable: what is not belongs to the real root, and then it could not map its sandboxes' ids either. */
static void enter_user_namespace(void) {
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) < 0)
        die("make a user namespace");
    if (prctl(PR_SET_DUMPABLE, 1) < 0)
        die("be mapped");
    send_event(EVENT_UNMAPPED, WIRE_VERSION, 0, "", 0, 0);
    char byte;
    if (recv(CONTROL_FD, &byte, 1, 0) != 1)
        _exit(1);
    if ((syscall(SYS_setgroups, (size_t)0, NULL) < 0 && errno != EPERM) || syscall(SYS_setresgid, 0, 0, 0) < 0 ||
        syscall(SYS_setresuid, 0, 0, 0) < 0 || prctl(PR_SET_DUMPABLE, 1) < 0)
        die("become root of a user namespace");
}

static void read_specification(void) {
    static char text[MAX_MESSAGE], copy[MAX_MESSAGE];
    int fds[250], count;
    const char *stage = "read the specification";
    ssize_t size = receive(text, sizeof text - 1, fds, 250, &count);
    if (size <= 0)
        _exit(1);
    memcpy(copy, text, sizeof text);
    char *rest = copy;
    int used = 0; /* the descriptors of control groups come first */
    for (char *line; (line = strtok_r(rest, "\n", &rest));) {
        char name[32];
        if (sscanf(line, "cgroup %31s", name) == 1 && used < count)
            add_cgroup_root(name, fcntl(fds[used++], F_DUPFD_CLOEXEC, OOM_FD + 1));
        else if (sscanf(line, "owner %127s", owner) != 1)
            rootless |= sscanf(line, "base %u", &base) != 1 && sscanf(line, "rootless %u", &ids) == 1;
    }
    if (rootless)
        enter_user_namespace();
    if (make_cgroup_owner(owner) < 0)
        die("make control groups");
    if (build_world(text, fds + used, count - used, &image, base, rootless, &stage) < 0)
        die(stage);
    for (int i = 0; i < count; i++)
        close(fds[i]);
}

static void on_child(int number) { (void)number; }

static int open_parent(void) {
    int fd = (int)syscall(434 /* pidfd_open */, getppid(), 0);
    return fd < 0 ? -1 : fcntl(fd, F_SETFD, FD_CLOEXEC) < 0 ? -1 : fd;
}

static void reset_signals(void) {
    static const uint64_t by_default[4]; /* the kernel's struct: the C library hides signals 32 and 33 */
    for (int number = 1; number < NSIG; number++) /* what the host ignores must not be ignored by commands */
        syscall(SYS_rt_sigaction, number, by_default, NULL, sizeof(uint64_t));
    sigset_t blocked;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGCHLD);
    sigprocmask(SIG_SETMASK, &blocked, NULL);
    sigaction(SIGCHLD, &(struct sigaction){.sa_handler = on_child}, NULL);
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "filter")) {
        assemble_filter();
        return write_filter(1) < 0;
    }
    close_from(OOM_FD);
    if (open("/dev/null", O_RDWR | O_CLOEXEC) != OOM_FD)
        return 1; /* holds the number, so that later descriptors lie above those an agent gets */
    int parent = open_parent();
    setsid();
    reset_signals();
    prctl(PR_SET_DUMPABLE, 0);
    umask(0);
    read_specification();
    assemble_filter();
    send_event(EVENT_STARTED, WIRE_VERSION, 0, "", 0, 0);
    sigset_t waiting;
    sigemptyset(&waiting);
    for (;;) {
        struct pollfd ready[2] = {{.fd = CONTROL_FD, .events = POLLIN}, {.fd = parent, .events = POLLIN}};
        if (ppoll(ready, 2, NULL, &waiting) > 0) {
            struct control control;
            int fd = -1, count = 0;
            if (ready[1].revents)
                shut_down();
            ssize_t size = receive(&control, sizeof control, &fd, 1, &count);
            if (size == 0 || (size < 0 && errno != EINTR))
                shut_down();
            if (size == sizeof control)
                handle_control(&control, count ? fd : -1);
            else if (size > 0)
                send_event(EVENT_FAILED, 0, EBADMSG, "control message of the wrong size", 0, 0);
            if (count)
                close(fd);
        }
        reap();
    }
}
