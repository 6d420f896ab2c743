/* File operations inside a sandbox, run in a short-lived child of the agent as the user that was asked for.
 *
 * The host never resolves a path of a sandbox: whatever a path leads to here, it is something of the sandbox. Contents
 * travel over descriptors 0 and 1; the outcome is an errno value. Sizes, depths and entry counts are bounded.
 */
#include "helper.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

enum { MAX_DEPTH = 128, MAX_ENTRIES = 200000 };

static char buffer[65536];
static uint64_t budget;
static uint32_t entries;
static bool as_layer; /* send overlayfs's own marks too */

static int write_all(int fd, const void *data, size_t size) {
    for (const char *at = data; size;) {
        ssize_t done = write(fd, at, size);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return errno ? errno : EIO;
        at += done;
        size -= (size_t)done;
    }
    return 0;
}

static int read_all(int fd, void *data, size_t size) {
    for (char *at = data; size;) {
        ssize_t done = read(fd, at, size);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return done < 0 ? errno : EPIPE;
        at += done;
        size -= (size_t)done;
    }
    return 0;
}

/* ---- single files ---- */

static int open_regular(int directory, const char *path, int extra_flags, struct stat *status) {
    int fd = openat(directory, path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC | extra_flags);
    if (fd < 0)
        return -errno;
    if (fstat(fd, status) < 0 || !S_ISREG(status->st_mode)) {
        int error = S_ISDIR(status->st_mode) ? EISDIR : ENODEV;
        close(fd);
        return -error;
    }
    return fd;
}

static int read_file(const char *path, uint64_t limit) {
    struct stat status;
    int fd = open_regular(AT_FDCWD, path, 0, &status);
    if (fd < 0)
        return -fd;
    if ((uint64_t)status.st_size > limit)
        return EFBIG;
    for (uint64_t total = 0;;) { /* to the end of file: files of /proc claim to be empty */
        ssize_t size = read(fd, buffer, sizeof buffer);
        if (size < 0)
            return errno;
        if (!size)
            return 0;
        if ((total += (uint64_t)size) > limit)
            return EFBIG;
        int error = write_all(1, buffer, (size_t)size);
        if (error)
            return error;
    }
}

static int make_parents(char *path) {
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        int failed = mkdir(path, 0755) < 0 && errno != EEXIST;
        *slash = '/';
        if (failed)
            return errno;
    }
    return 0;
}

static int set_times(int fd, int64_t mtime) {
    struct timespec times[2] = {{.tv_nsec = UTIME_NOW}, {.tv_sec = mtime}};
    return futimens(fd, times) < 0 ? errno : 0;
}

static int fill_file(int fd, uint64_t size) {
    while (size) {
        size_t piece = size < sizeof buffer ? (size_t)size : sizeof buffer;
        int error = read_all(0, buffer, piece);
        if (!error)
            error = write_all(fd, buffer, piece);
        if (error)
            return error;
        size -= piece;
    }
    return 0;
}

/* Writes beside and renames into place: readers see the old file or the new one, and a symlink is replaced. */
static int write_file(const char *path, const struct request *request) {
    char own[PATH_MAX], temporary[PATH_MAX + 32];
    if ((size_t)snprintf(own, sizeof own, "%s", path) >= sizeof own)
        return ENAMETOOLONG;
    int error = make_parents(own);
    if (error)
        return error;
    snprintf(temporary, sizeof temporary, "%s.%d.part", path, (int)getpid());
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return errno;
    error = fill_file(fd, request->limit);
    if (!error && fchmod(fd, request->mode & 07777) < 0)
        error = errno;
    if (!error && request->mtime >= 0)
        error = set_times(fd, request->mtime);
    if (!error && rename(temporary, path) < 0)
        error = errno;
    if (error)
        unlink(temporary);
    return error;
}

/* ---- trees out ---- */

static int send_entry(char type, const struct stat *status, const char *path, uint64_t size) {
    if (++entries > MAX_ENTRIES)
        return EOVERFLOW;
    struct entry entry = {.type = (uint32_t)type, .mode = status->st_mode & 07777, .uid = status->st_uid,
                          .gid = status->st_gid, .mtime = status->st_mtime, .size = size,
                          .path_length = (uint32_t)strlen(path)};
    int error = write_all(1, &entry, sizeof entry);
    return error ? error : write_all(1, path, entry.path_length);
}

static int send_contents(int directory, const char *name, const char *path, const struct stat *seen) {
    struct stat status;
    int fd = open_regular(directory, name, O_NOFOLLOW, &status);
    if (fd < 0)
        return -fd == EACCES ? 0 : -fd;
    uint64_t left = (uint64_t)status.st_size;
    int error = left > budget ? EFBIG : send_entry('f', seen, path, left);
    budget -= error ? 0 : left;
    while (!error && left) {
        size_t piece = left < sizeof buffer ? (size_t)left : sizeof buffer;
        ssize_t size = read(fd, buffer, piece);
        if (size <= 0) { /* shrank while it was read: keep the announced size */
            memset(buffer, 0, piece);
            size = (ssize_t)piece;
        }
        error = write_all(1, buffer, (size_t)size);
        left -= (uint64_t)size;
    }
    close(fd);
    return error;
}

static int send_link(int directory, const char *name, const char *path, const struct stat *status) {
    char target[PATH_MAX];
    ssize_t size = readlinkat(directory, name, target, sizeof target);
    if (size < 0)
        return errno;
    int error = send_entry('l', status, path, (uint64_t)size);
    return error ? error : write_all(1, target, (size_t)size);
}

static int send_tree(int directory, char *path, size_t length, int depth, bool contents);

static int send_one(int directory, const char *name, char *path, size_t length, int depth, bool contents) {
    struct stat status;
    if (fstatat(directory, name, &status, AT_SYMLINK_NOFOLLOW) < 0)
        return errno == ENOENT ? 0 : errno;
    if (S_ISLNK(status.st_mode))
        return send_link(directory, name, path, &status);
    if (S_ISREG(status.st_mode))
        return contents ? send_contents(directory, name, path, &status)
                        : send_entry('i', &status, path, (uint64_t)status.st_size);
    if (as_layer && S_ISCHR(status.st_mode) && status.st_rdev == 0)
        return send_entry('w', &status, path, 0);
    if (!S_ISDIR(status.st_mode))
        return contents ? 0 : send_entry('s', &status, path, 0); /* special files have no contents to pack */
    int error = send_entry('d', &status, path, 0);
    if (error || !contents)
        return error;
    int below = openat(directory, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (below < 0)
        return errno == EACCES || errno == ENOENT ? 0 : errno;
    char mark = 0;
    if (as_layer && fgetxattr(below, "user.overlay.opaque", &mark, 1) == 1 && mark == 'y')
        error = send_entry('o', &status, path, 0);
    return error ? error : send_tree(below, path, length, depth + 1, contents);
}

static int send_tree(int directory, char *path, size_t length, int depth, bool contents) {
    DIR *stream = fdopendir(directory);
    int error = !stream ? errno : depth > MAX_DEPTH ? ELOOP : 0;
    for (struct dirent *found; !error && (found = readdir(stream));) {
        if (!strcmp(found->d_name, ".") || !strcmp(found->d_name, ".."))
            continue;
        size_t added = (size_t)snprintf(path + length, PATH_MAX - length, "%s%s", length ? "/" : "", found->d_name);
        error = length + added >= PATH_MAX ? ENAMETOOLONG
                                           : send_one(directory, found->d_name, path, length + added, depth, contents);
        path[length] = 0;
    }
    if (stream)
        closedir(stream);
    return error;
}

static int send_directory(int directory, uint64_t limit, bool contents) {
    static char path[PATH_MAX];
    if (directory < 0)
        return errno;
    budget = limit;
    int error = send_tree(directory, path, 0, 0, contents);
    return error ? error : send_entry('e', &(struct stat){0}, "", 0);
}

/* ---- trees in ---- */

static int unpack_one(const struct entry *entry, char *path) {
    int error = make_parents(path);
    if (error)
        return error;
    if (entry->type == 'd')
        return mkdir(path, entry->mode & 07777) < 0 && errno != EEXIST ? errno : 0;
    if (entry->type == 'l') {
        char target[PATH_MAX];
        if (entry->size >= sizeof target)
            return ENAMETOOLONG;
        if ((error = read_all(0, target, (size_t)entry->size)))
            return error;
        target[entry->size] = 0;
        unlink(path);
        return symlink(target, path) < 0 ? errno : 0;
    }
    if (entry->type != 'f')
        return EBADMSG;
    struct request file = {.mode = entry->mode, .mtime = entry->mtime, .limit = entry->size};
    return write_file(path, &file);
}

static int unpack_tree(const char *root) {
    char path[PATH_MAX];
    for (;;) {
        struct entry entry;
        int error = read_all(0, &entry, sizeof entry);
        if (error || entry.type == 'e')
            return error;
        size_t start = (size_t)snprintf(path, sizeof path, "%s/", root);
        if (entry.path_length >= sizeof path - start || start >= sizeof path)
            return ENAMETOOLONG;
        if ((error = read_all(0, path + start, entry.path_length)))
            return error;
        path[start + entry.path_length] = 0;
        if ((error = unpack_one(&entry, path)))
            return error;
    }
}

int run_file_operation(const struct request *request, const char *path) {
    if (chdir("/") < 0)
        return errno;
    switch (request->operation) {
    case FILES_READ:
        return read_file(path, request->limit);
    case FILES_WRITE:
        return write_file(path, request);
    case FILES_LIST:
    case FILES_PACK:
        return send_directory(open(path, O_RDONLY | O_DIRECTORY | O_NONBLOCK | O_CLOEXEC), request->limit,
                              request->operation == FILES_PACK);
    case FILES_CHANGES:
        as_layer = true;
        return send_directory(LAYER_FD, request->limit, true);
    case FILES_UNPACK:
        return unpack_tree(path);
    default:
        return EBADMSG;
    }
}
