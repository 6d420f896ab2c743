/* The system calls that a sandbox may not make, as a seccomp filter assembled here.
 *
 * A deny list in the spirit of Docker's default profile, plus an allow list of socket families: network namespaces do
 * not cover AF_VSOCK before Linux 7.0. The numbers are laid out as a binary search, because the kernel runs the
 * filter once per system call number when it is installed (its action cache) and then on those that read arguments.
 */
#include "helper.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define ARCHITECTURE AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCHITECTURE AUDIT_ARCH_AARCH64
#else
#error "no seccomp architecture known for this machine"
#endif

/* Numbers that the C library's headers may be too old to name; the same on every architecture since 5.1. */
enum { NR_open_tree = 428, NR_move_mount, NR_fsopen, NR_fsconfig, NR_fsmount, NR_fspick, NR_pidfd_open, NR_clone3,
       NR_pidfd_getfd = 438, NR_mount_setattr = 442, NR_quotactl_fd = 443, NR_memfd_secret = 447,
       NR_statmount = 457, NR_listmount = 458, NR_last_known = 462 };

/* Commands of fcntl that make whoever opens a file of the image wait: an ordinary user may not, but the image's root may. */
enum { SET_LEASE = 1024, SET_DELEGATION = 1040 };

enum rule_kind { DENY, CHECK_SOCKET, CHECK_SOCKETPAIR, CHECK_CLONE, CHECK_IOCTL, CHECK_PERSONALITY, CHECK_PRCTL, CHECK_FCNTL };
struct rule {
    uint32_t number;
    enum rule_kind kind;
    uint32_t error;
};

static struct rule rules[] = {
    /* mounts and namespaces */
    {SYS_mount, DENY, EPERM}, {SYS_umount2, DENY, EPERM}, {SYS_pivot_root, DENY, EPERM}, {SYS_chroot, DENY, EPERM},
    {NR_open_tree, DENY, EPERM}, {NR_move_mount, DENY, EPERM}, {NR_fsopen, DENY, EPERM}, {NR_fsconfig, DENY, EPERM},
    {NR_fsmount, DENY, EPERM}, {NR_fspick, DENY, EPERM}, {NR_mount_setattr, DENY, EPERM},
    {NR_statmount, DENY, ENOSYS}, {NR_listmount, DENY, ENOSYS}, {SYS_unshare, DENY, EPERM}, {SYS_setns, DENY, EPERM},
    {SYS_clone, CHECK_CLONE, EPERM}, {NR_clone3, DENY, ENOSYS}, /* flags behind a pointer: C libraries fall back */
    /* kernel keys, programs, rings and other wide doors */
    {SYS_keyctl, DENY, EPERM}, {SYS_add_key, DENY, EPERM}, {SYS_request_key, DENY, EPERM}, {SYS_bpf, DENY, EPERM},
    {SYS_perf_event_open, DENY, EPERM}, {SYS_userfaultfd, DENY, EPERM}, {SYS_io_uring_setup, DENY, ENOSYS},
    {SYS_io_uring_enter, DENY, ENOSYS}, {SYS_io_uring_register, DENY, ENOSYS}, {SYS_fanotify_init, DENY, EPERM},
    {SYS_name_to_handle_at, DENY, EPERM}, {SYS_open_by_handle_at, DENY, EPERM}, {NR_pidfd_getfd, DENY, EPERM},
    {SYS_kcmp, DENY, EPERM}, {NR_memfd_secret, DENY, ENOSYS}, {SYS_lookup_dcookie, DENY, EPERM},
    /* the machine itself */
    {SYS_syslog, DENY, EPERM}, {SYS_kexec_load, DENY, EPERM}, {SYS_kexec_file_load, DENY, EPERM},
    {SYS_init_module, DENY, EPERM}, {SYS_finit_module, DENY, EPERM}, {SYS_delete_module, DENY, EPERM},
    {SYS_reboot, DENY, EPERM}, {SYS_swapon, DENY, EPERM}, {SYS_swapoff, DENY, EPERM}, {SYS_acct, DENY, EPERM},
    {SYS_quotactl, DENY, EPERM}, {NR_quotactl_fd, DENY, EPERM}, {SYS_settimeofday, DENY, EPERM},
    {SYS_clock_settime, DENY, EPERM}, {SYS_clock_adjtime, DENY, EPERM}, {SYS_adjtimex, DENY, EPERM},
    {SYS_vhangup, DENY, EPERM}, {SYS_move_pages, DENY, EPERM}, {SYS_migrate_pages, DENY, EPERM},
#if defined(__x86_64__)
    {SYS_iopl, DENY, EPERM}, {SYS_ioperm, DENY, EPERM}, {SYS_modify_ldt, DENY, EPERM}, {SYS_uselib, DENY, ENOSYS},
    {SYS_ustat, DENY, ENOSYS}, {SYS_sysfs, DENY, ENOSYS}, {SYS__sysctl, DENY, ENOSYS},
#endif
    /* allowed for some arguments */
    {SYS_socket, CHECK_SOCKET, EAFNOSUPPORT}, {SYS_socketpair, CHECK_SOCKETPAIR, EAFNOSUPPORT},
    {SYS_ioctl, CHECK_IOCTL, EPERM}, {SYS_personality, CHECK_PERSONALITY, EPERM}, {SYS_prctl, CHECK_PRCTL, EPERM},
    {SYS_fcntl, CHECK_FCNTL, EPERM},
};

static struct sock_filter program[1024];
static unsigned length;

static void emit(uint16_t code, uint32_t value, uint8_t if_true, uint8_t if_false) {
    if (length == sizeof program / sizeof program[0])
        die("seccomp filter too long");
    program[length++] = (struct sock_filter){code, if_true, if_false, value};
}
static void give(uint32_t action) { emit(BPF_RET | BPF_K, action, 0, 0); }
static void deny(uint32_t error) { give(SECCOMP_RET_ERRNO | error); }
static void allow(void) { give(SECCOMP_RET_ALLOW); }
static void load(uint32_t offset) { emit(BPF_LD | BPF_W | BPF_ABS, offset, 0, 0); }
static void load_argument(int index) { load(offsetof(struct seccomp_data, args) + 8u * (unsigned)index); }
static void allow_if_equal(uint32_t value) {
    emit(BPF_JMP | BPF_JEQ | BPF_K, value, 0, 1);
    allow();
}
static void deny_if_equal(uint32_t value, uint32_t error) {
    emit(BPF_JMP | BPF_JEQ | BPF_K, value, 0, 1);
    deny(error);
}

/* What happens once the number is known to be the rule's. The kernel itself reads these arguments as 32 bits. */
static void emit_verdict(const struct rule *rule) {
    switch (rule->kind) {
    case DENY:
        break;
    case CHECK_SOCKET:
        load_argument(0);
        allow_if_equal(AF_UNIX);
        allow_if_equal(AF_INET);
        allow_if_equal(AF_INET6);
        emit(BPF_JMP | BPF_JEQ | BPF_K, AF_NETLINK, 1, 0);
        deny(rule->error);
        load_argument(2);
        allow_if_equal(0); /* NETLINK_ROUTE */
        break;
    case CHECK_SOCKETPAIR:
        load_argument(0);
        allow_if_equal(AF_UNIX);
        break;
    case CHECK_CLONE:
        load_argument(0);
        emit(BPF_JMP | BPF_JSET | BPF_K,
             CLONE_NEWNS | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP,
             1, 0);
        allow();
        break;
    case CHECK_IOCTL:
        load_argument(1);
        deny_if_equal(TIOCSTI, EPERM);
        deny_if_equal(TIOCLINUX, EPERM);
        deny_if_equal(TIOCCONS, EPERM);
        allow();
        return;
    case CHECK_PERSONALITY:
        load_argument(0);
        allow_if_equal(0);
        allow_if_equal(0x0008);     /* PER_LINUX32 */
        allow_if_equal(0x0040000);  /* ADDR_NO_RANDOMIZE: debuggers */
        allow_if_equal(0xffffffff); /* query */
        break;
    case CHECK_PRCTL: /* a command that were no subreaper any more could leave its tree: see processes.c */
        load_argument(0);
        emit(BPF_JMP | BPF_JEQ | BPF_K, PR_SET_CHILD_SUBREAPER, 1, 0);
        allow();
        load_argument(1);
        deny_if_equal(0, EPERM);
        allow();
        return;
    case CHECK_FCNTL:
        load_argument(1);
        deny_if_equal(SET_LEASE, EPERM);
        deny_if_equal(SET_DELEGATION, EPERM);
        allow();
        return;
    }
    deny(rule->error);
}

static int by_number(const void *a, const void *b) {
    uint32_t x = ((const struct rule *)a)->number, y = ((const struct rule *)b)->number;
    return (x > y) - (x < y);
}

static void emit_search(const struct rule *first, unsigned count) {
    if (count == 1) {
        emit(BPF_JMP | BPF_JEQ | BPF_K, first->number, 1, 0);
        allow();
        emit_verdict(first);
        return;
    }
    unsigned half = count / 2, jump = length;
    emit(BPF_JMP | BPF_JA, 0, 0, 0); /* becomes: number >= middle ? right : left */
    emit(BPF_JMP | BPF_JA, 0, 0, 0);
    emit_search(first, half);
    program[jump] = (struct sock_filter){BPF_JMP | BPF_JGE | BPF_K, 0, 1, first[half].number};
    program[jump + 1] = (struct sock_filter){BPF_JMP | BPF_JA, 0, 0, length - jump - 2};
    emit_search(first + half, count - half);
}

void assemble_filter(void) {
    unsigned count = sizeof rules / sizeof rules[0];
    qsort(rules, count, sizeof rules[0], by_number);
    load(offsetof(struct seccomp_data, arch));
    emit(BPF_JMP | BPF_JEQ | BPF_K, ARCHITECTURE, 1, 0);
    deny(ENOSYS); /* 32-bit calls on a 64-bit kernel */
    load(offsetof(struct seccomp_data, nr));
    emit(BPF_JMP | BPF_JGT | BPF_K, NR_last_known, 0, 1);
    deny(ENOSYS); /* newer than this list, and the x32 calls, whose numbers have bit 30 set */
    emit_search(rules, count);
}

/* For agents in Python, which have no assembler: the file filters/ARCHITECTURE.bpf is this. */
int write_filter(int fd) {
    size_t size = length * sizeof program[0];
    return write(fd, program, size) == (ssize_t)size ? 0 : -1;
}

int install_filter(void) {
    struct sock_fprog filter = {(unsigned short)length, program};
    return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter);
}
