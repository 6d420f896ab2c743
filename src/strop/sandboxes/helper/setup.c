/* What happens between the birth of a sandbox's first process and its readiness: mounts, limits, loss of privileges.
 *
 * Runs in the new namespaces, in a mount namespace copied from the zygote's, which holds nothing of the host but
 * /i/N (image layers, read-only), /s/N (snapshot layers), /b/N (bound host folders), /d (devices), /p (proc), /e (an
 * empty file) and the mount points /t and /n.
 */
#include "helper.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <net/if.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Docker's default set, less MKNOD, NET_RAW, SYS_CHROOT and AUDIT_WRITE, which nothing here needs. */
#define KEPT_CAPABILITIES                                                                                        \
    (1u << CAP_CHOWN | 1u << CAP_DAC_OVERRIDE | 1u << CAP_FSETID | 1u << CAP_FOWNER | 1u << CAP_SETGID |         \
     1u << CAP_SETUID | 1u << CAP_SETPCAP | 1u << CAP_NET_BIND_SERVICE | 1u << CAP_KILL)

enum { TTY_GROUP = 5 };

/* The writable layer: upper and work for overlayfs, shm beside them so that one quota covers all. Its descriptor stays
 * open as UPPER, which is where the zygote finds the files for a snapshot. */
static int mount_upper(uint64_t disk, uint64_t inodes) {
    char options[96];
    snprintf(options, sizeof options, "mode=755,size=%llu,nr_inodes=%llu", (unsigned long long)disk,
             (unsigned long long)inodes);
    if (mount("tmpfs", "/t", "tmpfs", MS_NOSUID | MS_NODEV, options) < 0 || mkdir("/t/upper", 0755) < 0 ||
        mkdir("/t/work", 0755) < 0 || mkdir("/t/shm", 0700) < 0 || chmod("/t/shm", 01777) < 0)
        return -1;
    int fd = open("/t", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0 && fd != UPPER) {
        dup3(fd, UPPER, O_CLOEXEC);
        close(fd);
    }
    return fd;
}

/* Layers are short names, so that MAX_LAYERS of them stay far below the 4 KiB that mount(2) takes. */
static int mount_root(const struct birth *birth) {
    char options[3072] = "userxattr,upperdir=/t/upper,workdir=/t/work,lowerdir=";
    size_t length = strlen(options);
    for (uint32_t i = birth->layer_count; i-- > 0;)
        length += (size_t)snprintf(options + length, sizeof options - length, "/s/%u/upper:", birth->layers[i]);
    for (uint32_t i = 0; i < birth->image->lower_count && length < sizeof options; i++)
        length += (size_t)snprintf(options + length, sizeof options - length, "%s/i/%u", i ? ":" : "", i);
    if (length >= sizeof options) {
        errno = E2BIG;
        return -1;
    }
    return mount("overlay", "/n", "overlay", MS_NOSUID | MS_NODEV, options);
}

static int mount_binds(const struct birth *birth) {
    for (uint32_t i = 0; i < birth->image->bind_count; i++) {
        char source[32], target[300];
        snprintf(source, sizeof source, "/b/%u", i);
        snprintf(target, sizeof target, "/n%s", birth->image->bind_targets[i]);
        if (mount(source, target, NULL, MS_BIND | MS_REC, NULL) < 0)
            return -1;
    }
    return 0;
}

static int mount_system(uint32_t ids, const char **stage) {
    *stage = "mount /dev (the image needs empty folders dev and proc)";
    if (mount("/d", "/n/dev", NULL, MS_BIND | MS_REC, NULL) < 0 || mount("/t/shm", "/n/dev/shm", NULL, MS_BIND, NULL) < 0)
        return -1;
    *stage = "mount /dev/pts";
    if (mount("devpts", "/n/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC,
              ids > TTY_GROUP ? "newinstance,max=64,ptmxmode=0666,mode=0620,gid=5" : "newinstance,max=64,ptmxmode=0666,mode=0620") < 0)
        return -1;
    *stage = "mount /proc (is the outer /proc masked?)";
    if (mount("proc", "/n/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0)
        return -1;
    *stage = "mask /proc/cmdline";
    return mount("/e", "/n/proc/cmdline", NULL, MS_BIND, NULL);
}

static int enter_root(void) {
    if (chdir("/n") < 0 || syscall(SYS_pivot_root, ".", ".") < 0 || umount2(".", MNT_DETACH) < 0)
        return -1;
    return chdir("/");
}

/* Of what the kernel counts for a user of the host, and so for all sandboxes together, one may take a part only. */
static int limit_shared_counts(void) {
    if (write_text(AT_FDCWD, "/proc/sys/user/max_inotify_instances", "32") < 0 && errno != ENOENT)
        return -1;
    return 0;
}

int bring_loopback_up(void) {
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int result = fd < 0 ? -1 : ioctl(fd, SIOCSIFFLAGS, &request);
    if (fd >= 0)
        close(fd);
    return result;
}

static int limit_resources(const struct birth *birth) {
    /* A core limit of 1 byte, not 0: a core_pattern that is a pipe is skipped only then, see core(5). */
    const struct rlimit core = {1, 1}, files = {birth->open_files < 1024 ? birth->open_files : 1024, birth->open_files};
    const struct rlimit processes = {birth->processes, birth->processes}, memory = {birth->memory, birth->memory};
    if (setrlimit(RLIMIT_CORE, &core) < 0 || (birth->processes && setrlimit(RLIMIT_NPROC, &processes) < 0) ||
        (birth->memory && setrlimit(RLIMIT_DATA, &memory) < 0))
        return -1;
    return setrlimit(RLIMIT_NOFILE, &files);
}

static int drop_capabilities(void) {
    for (unsigned capability = 0; capability <= CAP_LAST_CAP; capability++)
        if ((capability > 31 || !(KEPT_CAPABILITIES >> capability & 1)) &&
            prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0 && errno != EINVAL)
            return -1;
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{KEPT_CAPABILITIES, KEPT_CAPABILITIES, 0}, {0, 0, 0}};
    return (int)syscall(SYS_capset, &header, data);
}

/* The group list needs no clearing in a rootless sandbox, where it can't be; EPERM means just that. */
static int become_root(void) {
    if (syscall(SYS_setgroups, (size_t)0, NULL) < 0 && errno != EPERM)
        return -1;
    if (syscall(SYS_setresgid, 0, 0, 0) < 0)
        return -1;
    return (int)syscall(SYS_setresuid, 0, 0, 0);
}

static int give_up_privileges(const char **stage) {
    *stage = "drop capabilities";
    if (drop_capabilities() < 0)
        return -1;
    *stage = "no new privileges";
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0 ||
        prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) < 0)
        return -1;
    *stage = "seccomp filter";
    return install_filter();
}

int set_up_sandbox(const struct birth *birth, const char **stage) {
    *stage = "become root inside";
    if (become_root() < 0)
        return -1;
    *stage = "mount the writable layer";
    umask(022);
    if (mount_upper(birth->disk, birth->inodes) < 0)
        return -1;
    *stage = "mount the overlay";
    if (mount_root(birth) < 0)
        return -1;
    *stage = "bind a host folder (is its target in the image?)";
    if (mount_binds(birth) < 0 || mount_system(birth->ids, stage) < 0)
        return -1;
    *stage = "enter the root";
    if (enter_root() < 0)
        return -1;
    *stage = "loopback";
    if (birth->network == NETWORK_FRESH && bring_loopback_up() < 0)
        return -1;
    *stage = "host name";
    if (sethostname("sandbox", 7) < 0)
        return -1;
    *stage = "limits of what is shared";
    if (limit_shared_counts() < 0)
        return -1;
    *stage = "resource limits";
    if (limit_resources(birth) < 0)
        return -1;
    return give_up_privileges(stage);
}
