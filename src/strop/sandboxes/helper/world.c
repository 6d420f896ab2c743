/* The zygote's own mount namespace: nothing of the host but what a sandbox may have, ready to be copied.
 *
 * Image layers and bound folders are idmapped, so that what root owns outside appears as root's inside although the
 * sandbox's root is an ordinary user of the host. Without root (`rootless`) the zygote is in a user namespace of its own
 * by then, in which nothing can be idmapped: the user's own files are root's inside, root's are nobody's. All of it is read-only before any sandbox exists.
 */
#include "helper.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

/* Linux's mount API by number and value: the C library's headers differ too much in what they name. */
enum { NR_open_tree = 428, NR_move_mount = 429, NR_mount_setattr = 442 };
enum { TREE_CLONE = 1, MOVE_FROM_DESCRIPTOR = 4, EMPTY_PATH = 0x1000, RECURSIVE = 0x8000 };
enum { ATTR_RDONLY = 1, ATTR_NOSUID = 2, ATTR_NODEV = 4, ATTR_NOEXEC = 8, ATTR_IDMAP = 0x100000 };
struct attributes {
    uint64_t set, clear, propagation, userns_fd;
};

static int attach_mount(int fd, const char *path) {
    return (int)syscall(NR_move_mount, fd, "", AT_FDCWD, path, MOVE_FROM_DESCRIPTOR);
}

static int restrict_mount(int fd, uint64_t set, int userns_fd, int recursive) {
    struct attributes attributes = {.set = set, .userns_fd = userns_fd < 0 ? 0 : (uint64_t)userns_fd};
    return (int)syscall(NR_mount_setattr, fd, "", EMPTY_PATH | recursive, &attributes, sizeof attributes);
}

/* A tmpfs for a snapshot's layer, laid out like a sandbox's own. */
int mount_layer(const char *path, uint64_t disk, uint64_t inodes, uint32_t base) {
    char options[128], below[64];
    snprintf(options, sizeof options, "mode=755,uid=%u,gid=%u,size=%llu,nr_inodes=%llu", base, base,
             (unsigned long long)disk, (unsigned long long)inodes);
    if (mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, options) < 0)
        return -1;
    snprintf(below, sizeof below, "%s/upper", path);
    if (mkdir(below, 0755) < 0 || chown(below, base, base) < 0)
        return -1;
    return 0;
}

/* A user namespace that maps 0..65535 to base..: only its descriptor is needed, its process ends at once. */
static int open_mapping(uint32_t base) {
    int hold[2];
    if (pipe2(hold, O_CLOEXEC) < 0)
        return -1;
    pid_t pid = (pid_t)syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0);
    if (pid < 0)
        return -1;
    if (pid == 0) {
        char byte;
        close(hold[1]);
        (void)!read(hold[0], &byte, 1);
        _exit(0);
    }
    char path[64], map[64];
    snprintf(map, sizeof map, "0 %u %u", base, ID_RANGE);
    snprintf(path, sizeof path, "/proc/%d/uid_map", pid);
    int failed = write_text(AT_FDCWD, path, map) < 0;
    snprintf(path, sizeof path, "/proc/%d/gid_map", pid);
    failed |= write_text(AT_FDCWD, path, map) < 0;
    snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
    int fd = failed ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    close(hold[0]);
    close(hold[1]);
    waitpid(pid, NULL, 0);
    return fd;
}

/* Who is no administrator of the host can't make device nodes, but can show its own ones. */
static int make_device(const char *path, unsigned major, unsigned minor, uint32_t base, bool rootless) {
    if (!rootless)
        return mknod(path, S_IFCHR | 0666, makedev(major, minor)) < 0 || chmod(path, 0666) < 0 ? -1 : chown(path, base, base);
    char source[32];
    snprintf(source, sizeof source, "/dev/%s", strchr(path, '/') + 1);
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    return fd < 0 || close(fd) < 0 ? -1 : mount(source, path, NULL, MS_BIND, NULL);
}

static int make_devices(uint32_t base, bool rootless) {
    static const struct {
        const char *name;
        unsigned minor, major;
    } devices[] = {{"d/null", 3, 1}, {"d/zero", 5, 1}, {"d/full", 7, 1}, {"d/random", 8, 1}, {"d/urandom", 9, 1},
                   {"d/tty", 0, 5}};
    static const char *const links[][2] = {{"/proc/self/fd", "d/fd"}, {"/proc/self/fd/0", "d/stdin"},
                                           {"/proc/self/fd/1", "d/stdout"}, {"/proc/self/fd/2", "d/stderr"},
                                           {"pts/ptmx", "d/ptmx"}};
    if (mount("tmpfs", "d", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=755,size=64k") < 0)
        return -1;
    for (size_t i = 0; i < sizeof devices / sizeof devices[0]; i++)
        if (make_device(devices[i].name, devices[i].major, devices[i].minor, base, rootless) < 0)
            return -1;
    for (size_t i = 0; i < sizeof links / sizeof links[0]; i++)
        if (symlink(links[i][0], links[i][1]) < 0)
            return -1;
    if (mkdir("d/pts", 0755) < 0 || mkdir("d/shm", 01777) < 0)
        return -1;
    return mount(NULL, "d", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NOEXEC, NULL);
}

static int make_mount_point(int source, const char *path) {
    struct stat status;
    if (fstat(source, &status) < 0)
        return -1;
    if (S_ISDIR(status.st_mode))
        return mkdir(path, 0755);
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    return fd < 0 ? -1 : close(fd);
}

/* Clones the one mount behind each descriptor, without what is mounted below it, into a mount of our own. Must happen
 * in the mount namespace that the descriptors are of. */
static int clone_sources(const int *fds, int count, int mapping, int *clones) {
    for (int i = 0; i < count; i++) {
        clones[i] = (int)syscall(NR_open_tree, fds[i], "", TREE_CLONE | O_CLOEXEC | EMPTY_PATH);
        if (clones[i] < 0 || restrict_mount(clones[i], ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV | ATTR_IDMAP, mapping, 0) < 0)
            return -1;
    }
    return 0;
}

/* The same for who is no administrator of the host: the descriptors are of a mount namespace that is not ours, so their
 * paths are opened again; what is mounted below comes along, since the kernel lets nobody look under it. */
static int clone_paths(const int *fds, int count, int *clones) {
    for (int i = 0; i < count; i++) {
        char link[32], path[4096];
        snprintf(link, sizeof link, "/proc/self/fd/%d", fds[i]);
        ssize_t size = readlink(link, path, sizeof path - 1);
        if (size < 0)
            return -1;
        path[size] = 0;
        clones[i] = (int)syscall(NR_open_tree, AT_FDCWD, path, TREE_CLONE | O_CLOEXEC | RECURSIVE);
        if (clones[i] < 0 || restrict_mount(clones[i], ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, -1, RECURSIVE) < 0)
            return -1;
    }
    return 0;
}

static int place(int clone, const char *path) {
    int failed = make_mount_point(clone, path) < 0 || attach_mount(clone, path) < 0;
    close(clone);
    return failed ? -1 : 0;
}

/* The lines "lower" (topmost first) and "bind TARGET" of the specification stand in the order of their descriptors. */
static int place_all(char *specification, const int *clones, int count, struct image *image) {
    char *rest = specification;
    int index = 0;
    for (char *line; (line = strtok_r(rest, "\n", &rest));) {
        char path[32], target[256];
        if (!strcmp(line, "lower") && image->lower_count < MAX_LOWERS) {
            snprintf(path, sizeof path, "i/%u", image->lower_count++);
        } else if (sscanf(line, "bind %255[^\n]", target) == 1 && image->bind_count < MAX_BINDS) {
            snprintf(path, sizeof path, "b/%u", image->bind_count);
            snprintf(image->bind_targets[image->bind_count++], sizeof target, "%s", target);
        } else {
            continue; /* a line for another part of the zygote */
        }
        errno = EBADMSG;
        if (index == count || place(clones[index++], path) < 0)
            return -1;
    }
    return 0;
}

int build_world(char *specification, const int *fds, int fd_count, struct image *image, uint32_t base, bool rootless,
                const char **stage) {
    *stage = "make a user namespace of 65536 ids";
    int mapping = rootless ? -1 : open_mapping(base);
    if (mapping < 0 && !rootless)
        return -1;
    int clones[MAX_LOWERS + MAX_BINDS];
    *stage = rootless ? "open the image" : "map the image's owners (does its file system support idmapped mounts?)";
    if (fd_count > MAX_LOWERS + MAX_BINDS ||
        (rootless ? clone_paths(fds, fd_count, clones) : clone_sources(fds, fd_count, mapping, clones)) < 0)
        return -1;
    if (mapping >= 0)
        close(mapping);
    *stage = "make a mount namespace";
    if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
        mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m") < 0 || chdir("/tmp") < 0)
        return -1;
    static const char *const folders[] = {"i", "s", "b", "d", "t", "n", "proc"};
    for (size_t i = 0; i < sizeof folders / sizeof folders[0]; i++)
        if (mkdir(folders[i], 0755) < 0)
            return -1;
    int empty = open("e", O_WRONLY | O_CREAT | O_CLOEXEC, 0444);
    if (empty < 0)
        return -1;
    close(empty);
    if (mount("e", "e", NULL, MS_BIND, NULL) < 0 || mount(NULL, "e", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY, NULL) < 0)
        return -1;
    *stage = "place the image";
    if (place_all(specification, clones, fd_count, image) < 0)
        return -1;
    *stage = "make the devices";
    if (make_devices(base, rootless) < 0)
        return -1;
    *stage = "mount proc";
    if (rootless ? mount("/proc", "proc", NULL, MS_BIND | MS_REC, NULL) < 0
                 : mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0)
        return -1;
    *stage = "enter the zygote's root";
    if (syscall(SYS_pivot_root, ".", ".") < 0 || umount2(".", MNT_DETACH) < 0)
        return -1;
    return chdir("/");
}
