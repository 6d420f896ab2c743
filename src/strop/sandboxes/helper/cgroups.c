/* Control groups: v1 controllers (memory, pids, cpu), the v2 hierarchy, or both side by side, and pooled slots.
 *
 * A slot is one group in every hierarchy. Groups are reused: making and attaching to them costs more than clearing
 * them. In the v2 hierarchy a sandbox is born inside its group (CLONE_INTO_CGROUP); v1 needs attaching.
 */
#include "helper.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MEMORY, PIDS, CPU, V1_COUNT };
static const char *const v1_names[V1_COUNT] = {"memory", "pids", "cpu"};
static int v1_root[V1_COUNT] = {-1, -1, -1}, v1_owner[V1_COUNT] = {-1, -1, -1};
static int v2_root = -1, v2_owner = -1;
static bool v2_limits; /* whether the v2 hierarchy carries the controllers */

int write_text(int directory, const char *path, const char *text) {
    int fd = openat(directory, path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t done = write(fd, text, strlen(text));
    int kept = errno;
    close(fd);
    errno = kept;
    return done < 0 ? -1 : 0;
}

/* `controller` is memory, pids or cpu (v1), unified (v2 for freezing and killing) or unified-limits (v2 for all). */
int add_cgroup_root(const char *controller, int fd) {
    for (int i = 0; i < V1_COUNT; i++)
        if (!strcmp(controller, v1_names[i])) {
            v1_root[i] = fd;
            return 0;
        }
    v2_root = fd;
    v2_limits = !strcmp(controller, "unified-limits");
    return strncmp(controller, "unified", 7) ? -1 : 0;
}

static int make_group(int parent, const char *name) {
    if (mkdirat(parent, name, 0755) < 0 && errno != EEXIST)
        return -1;
    return openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

int make_cgroup_owner(const char *name) {
    for (int i = 0; i < V1_COUNT; i++)
        if (v1_root[i] >= 0 && (v1_owner[i] = make_group(v1_root[i], name)) < 0)
            return -1;
    if (v2_root >= 0 && (v2_owner = make_group(v2_root, name)) < 0)
        return -1;
    return v2_limits ? write_text(v2_owner, "cgroup.subtree_control", "+memory +pids +cpu") : 0;
}

static void remove_group(int parent, const char *name) {
    for (int tries = 0; unlinkat(parent, name, AT_REMOVEDIR) < 0 && errno == EBUSY && tries < 200; tries++)
        usleep(1000);
}

void remove_cgroup_owner(const char *name) {
    for (int i = 0; i < V1_COUNT; i++)
        if (v1_root[i] >= 0)
            remove_group(v1_root[i], name);
    if (v2_root >= 0)
        remove_group(v2_root, name);
}

/* ---- slots ---- */

static int open_in_group(int owner, int index, const char *file, int flags) {
    char path[64];
    snprintf(path, sizeof path, "%d/%s", index, file);
    return openat(owner, path, flags | O_CLOEXEC);
}

bool groups_limit_memory(void) { return v2_limits || v1_owner[MEMORY] >= 0; }
bool groups_limit_processes(void) { return v2_limits || v1_owner[PIDS] >= 0; }

static int open_oom_counter(int index) {
    if (v2_limits)
        return open_in_group(v2_owner, index, "memory.events", O_RDONLY);
    return v1_owner[MEMORY] < 0 ? -1 : open_in_group(v1_owner[MEMORY], index, "memory.oom_control", O_RDONLY);
}

int open_slot(struct slot *slot, int index, bool pooled) {
    *slot = (struct slot){.index = index, .network_fd = -1, .oom_fd = -1, .group_fd = -1,
                          .attach_fds = {-1, -1, -1}, .pooled = pooled};
    char name[16];
    snprintf(name, sizeof name, "%d", index);
    for (int i = 0; i < V1_COUNT; i++)
        if (v1_owner[i] >= 0 && ((mkdirat(v1_owner[i], name, 0755) < 0 && errno != EEXIST) ||
                                 (slot->attach_fds[i] = open_in_group(v1_owner[i], index, "cgroup.procs", O_WRONLY)) < 0))
            return -1;
    if (v2_owner >= 0 && (slot->group_fd = make_group(v2_owner, name)) < 0)
        return -1;
    slot->oom_fd = open_oom_counter(index);
    return 0;
}

static int write_number(const struct slot *slot, int controller, const char *file, long long value) {
    char path[64], text[32];
    snprintf(path, sizeof path, "%d/%s", slot->index, file);
    snprintf(text, sizeof text, "%lld", value);
    return v1_owner[controller] < 0 ? 0 : write_text(v1_owner[controller], path, text);
}

static int limit_v2(const struct slot *slot, const struct limits *limits) {
    char memory[32], pids[32], cpu[48] = "max 100000";
    snprintf(memory, sizeof memory, "%llu", (unsigned long long)limits->memory);
    snprintf(pids, sizeof pids, "%u", limits->pids);
    if (limits->cpu_percent)
        snprintf(cpu, sizeof cpu, "%u 100000", limits->cpu_percent * 1000);
    if (write_text(slot->group_fd, "memory.max", memory) < 0 || write_text(slot->group_fd, "pids.max", pids) < 0)
        return -1;
    write_text(slot->group_fd, "memory.swap.max", "0"); /* absent on kernels without swap accounting */
    return write_text(slot->group_fd, "cpu.max", cpu);
}

int limit_slot(struct slot *slot, const struct limits *limits) {
    if (!memcmp(&slot->limits, limits, sizeof *limits))
        return 0;
    int failed = v2_limits ? limit_v2(slot, limits) < 0
                           : write_number(slot, MEMORY, "memory.limit_in_bytes", (long long)limits->memory) < 0 ||
                                 write_number(slot, PIDS, "pids.max", limits->pids) < 0 ||
                                 write_number(slot, CPU, "cpu.cfs_quota_us",
                                              limits->cpu_percent ? (long long)limits->cpu_percent * 1000 : -1) < 0;
    if (failed)
        return -1;
    slot->limits = *limits;
    return 0;
}

int attach_to_slot(const struct slot *slot, pid_t pid) {
    char text[16];
    int size = snprintf(text, sizeof text, "%d", pid);
    for (int i = 0; i < V1_COUNT; i++)
        if (slot->attach_fds[i] >= 0 && write(slot->attach_fds[i], text, (size_t)size) < 0)
            return -1;
    return 0;
}

static bool is_frozen(const struct slot *slot) {
    char text[256] = "";
    int fd = open_in_group(v2_owner, slot->index, "cgroup.events", O_RDONLY);
    ssize_t size = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    return size > 0 && strstr(text, "frozen 1");
}

int freeze_slot(const struct slot *slot, bool frozen) {
    char path[64];
    snprintf(path, sizeof path, "%d/cgroup.freeze", slot->index);
    if (v2_owner < 0) {
        errno = EOPNOTSUPP;
        return -1;
    }
    if (write_text(v2_owner, path, frozen ? "1" : "0") < 0)
        return -1;
    for (int tries = 0; frozen && !is_frozen(slot); tries++) { /* freezing is asynchronous */
        if (tries == 2000) {
            errno = ETIMEDOUT;
            return -1;
        }
        usleep(500);
    }
    return 0;
}

uint64_t slot_oom_kills(const struct slot *slot) {
    int fd = slot->oom_fd >= 0 ? slot->oom_fd : open_oom_counter(slot->index);
    uint64_t kills = read_oom_kills(fd);
    if (slot->oom_fd < 0 && fd >= 0)
        close(fd);
    return kills;
}

/* Beyond the pool a slot keeps no descriptors: ten thousand sandboxes must fit into one process's table. */
void slim_slot(struct slot *slot) {
    int *fds[] = {&slot->network_fd,    &slot->oom_fd,        &slot->group_fd,
                  &slot->attach_fds[0], &slot->attach_fds[1], &slot->attach_fds[2]};
    for (size_t i = 0; i < sizeof fds / sizeof fds[0]; i++) {
        if (*fds[i] >= 0)
            close(*fds[i]);
        *fds[i] = -1;
    }
}

void close_slot(struct slot *slot) {
    char name[16];
    snprintf(name, sizeof name, "%d", slot->index);
    slim_slot(slot);
    for (int i = 0; i < V1_COUNT; i++)
        if (v1_owner[i] >= 0)
            remove_group(v1_owner[i], name);
    if (v2_owner >= 0)
        remove_group(v2_owner, name);
    slot->index = -1;
}
