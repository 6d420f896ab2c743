/* What the parts of the sandbox helper share: the messages on its sockets and the functions of each file.
 *
 * Two kinds of process run this code. The zygote is started once per pool, keeps its privileges and makes sandboxes.
 * The agent is forked from it, never executed, and is process 1 of one sandbox. Messages are fixed structs in native
 * byte order over SOCK_SEQPACKET; strop/sandboxes/wire.py holds the same layouts.
 */
#ifndef STROP_HELPER_H
#define STROP_HELPER_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define WIRE_VERSION 1
#define MAX_LAYERS 64      /* snapshot layers under one sandbox */
#define MAX_BINDS 64       /* host folders bound into one image */
#define MAX_LOWERS 128     /* layers of one image */
#define MAX_FDS 8          /* descriptors handed to one command */
#define MAX_GROUPS 32      /* supplementary groups of one command */
#define MAX_MESSAGE 65536  /* longer payloads travel in a memory file */
#define MAX_PAYLOAD (8u << 20)
#define ID_RANGE 65536u    /* user and group ids that exist inside, if the host has that many to give */

/* host -> zygote */
enum { CONTROL_CREATE = 1, CONTROL_DESTROY, CONTROL_FREEZE, CONTROL_SNAPSHOT, CONTROL_RELEASE };
/* zygote -> host */
enum { EVENT_STARTED = 1, EVENT_FAILED, EVENT_DEAD, EVENT_DONE, EVENT_UNMAPPED };
/* host -> agent */
enum { AGENT_EXEC = 1, AGENT_KILL, AGENT_FILES };
/* agent -> host */
enum { REPLY_READY = 1, REPLY_EXIT };

enum { NETWORK_POOLED = 0, NETWORK_FRESH = 1 };
enum { EXEC_NULL_STDIN = 1, EXEC_TTY = 2, EXEC_MEMORY_FILE = 4, EXEC_KILL_LEFTOVERS = 8 };
enum { KILL_MAIN = 0, KILL_TREE = 1, KILL_BELOW = 2, KILL_LEFTOVERS = 3, KILL_ALL = 4 };
enum { FILES_READ = 1, FILES_WRITE, FILES_LIST, FILES_PACK, FILES_UNPACK, FILES_CHANGES };
enum { SNAPSHOT_COPY = 0, SNAPSHOT_FLATTEN = 1, SNAPSHOT_COPY_STOPPED = 2 };
enum { CONTROL_FD = 3, OOM_FD, UPPER }; /* descriptors of zygote and agent */

struct control {
    uint32_t kind, id;
    uint32_t network, pids;
    uint64_t memory, disk, inodes;
    uint32_t cpu_percent; /* of one core; 0: no limit */
    uint32_t open_files;
    uint32_t argument; /* freeze: 0 or 1; snapshot: see the enum above */
    uint32_t layer;    /* snapshot, release: number of the layer; freeze: a number to answer with */
    uint32_t layer_count;
    uint32_t layers[MAX_LAYERS]; /* lowest first */
};

struct event {
    uint32_t kind, id;
    int32_t error, status;
    uint64_t oom_kills;
    char stage[40];
};

struct request { /* followed by the payload: working directory, arguments, environment, each ended by NUL */
    uint32_t kind, id, flags;
    uint32_t uid, gid, group_count;
    uint32_t groups[MAX_GROUPS];
    uint32_t argument_count, environment_count;
    uint32_t operation, mode; /* kill: scope and signal; files: operation and permission bits */
    uint64_t limit;           /* files: most bytes to read, or exact number of bytes to write */
    int64_t mtime;            /* files: seconds, or -1 */
    uint64_t payload_length;
};

struct reply {
    uint32_t kind, id;
    int32_t status; /* as waitpid gives it */
    int32_t error;  /* errno of the stage that failed, else 0 */
    uint64_t cpu_us, peak_rss_kib, oom_kills;
    char stage[40];
};

/* One entry of a packed tree; followed by the path, then (file, link) `size` bytes. Types: 'f'ile, 'd'irectory, 'l'ink,
 * in listings 'i' (a file without its contents) and 's'pecial, in changes 'w'hiteout and 'o'paque, and 'e' at the end. */
struct entry {
    uint32_t type, mode, uid, gid, path_length, reserved;
    int64_t mtime;
    uint64_t size;
};

/* setup.c: what a sandbox is born with */
struct image {
    uint32_t lower_count, bind_count;
    char bind_targets[MAX_BINDS][256];
};
struct birth {
    const struct image *image;
    uint64_t disk, inodes;
    uint32_t network, open_files, layer_count, ids;
    uint64_t processes, memory; /* 0: a control group has that limit */
    const uint32_t *layers;
};
int set_up_sandbox(const struct birth *birth, const char **stage);
int bring_loopback_up(void);

/* world.c: the zygote's own mount namespace */
int build_world(char *specification, const int *fds, int fd_count, struct image *image, uint32_t base, bool rootless,
                const char **stage);
int mount_layer(const char *path, uint64_t disk, uint64_t inodes, uint32_t base);

/* seccomp.c */
void assemble_filter(void); /* once, before the first sandbox */
int install_filter(void);
int write_filter(int fd);

/* agent.c */
_Noreturn void agent_main(int socket, int oom_fd);
uint64_t read_oom_kills(int oom_fd);

/* processes.c: who descends from whom, seen through /proc */
void kill_processes(int proc_fd, int scope, pid_t main, const pid_t *spared, int spared_count, int signal_number);

/* files.c: runs in a child of the agent, returns an errno value. For FILES_CHANGES, LAYER_FD is the writable layer. */
enum { LAYER_FD = 3 };
int run_file_operation(const struct request *request, const char *path);

/* layers.c */
int apply_layer(int source_fd, int target_fd);

/* cgroups.c */
struct limits {
    uint64_t memory;
    uint32_t pids, cpu_percent;
};
struct slot { /* a pooled set of cgroups and a network namespace; index < 0 marks an unused record */
    int index, network_fd, oom_fd, group_fd;
    int attach_fds[3];
    struct limits limits;
    bool broken, pooled;
};
int add_cgroup_root(const char *controller, int fd);
int make_cgroup_owner(const char *name);
void remove_cgroup_owner(const char *name);
bool groups_limit_memory(void);
bool groups_limit_processes(void);
int open_slot(struct slot *slot, int index, bool pooled);
int limit_slot(struct slot *slot, const struct limits *limits);
int attach_to_slot(const struct slot *slot, pid_t pid);
int freeze_slot(const struct slot *slot, bool frozen);
uint64_t slot_oom_kills(const struct slot *slot);
void slim_slot(struct slot *slot);
void close_slot(struct slot *slot);

/* small shared tools */
int write_text(int directory, const char *path, const char *text);
void close_from(unsigned fd);
_Noreturn void die(const char *what);

#endif
