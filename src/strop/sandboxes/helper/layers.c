/* Applies one overlay layer onto another: the copy behind a live snapshot, and the merge behind a flattened chain.
 *
 * Understands what overlayfs writes in a user namespace: whiteouts (character device 0:0) and the opaque mark
 * user.overlay.opaque. The source tree was written by a sandbox: symlinks are never followed, devices never opened.
 */
#include "helper.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

struct linked { /* files with several names, so that they keep them */
    ino_t source;
    char path[256];
};
static struct linked *links;
static size_t link_count;

static int remove_tree(int directory, const char *name) {
    if (unlinkat(directory, name, 0) == 0 || errno == ENOENT)
        return 0;
    if (errno != EISDIR)
        return errno;
    int fd = openat(directory, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *stream = fd < 0 ? NULL : fdopendir(fd);
    int error = stream ? 0 : errno;
    for (struct dirent *found; !error && (found = readdir(stream));)
        if (strcmp(found->d_name, ".") && strcmp(found->d_name, ".."))
            error = remove_tree(fd, found->d_name);
    if (stream)
        closedir(stream);
    return error ? error : unlinkat(directory, name, AT_REMOVEDIR) < 0 ? errno : 0;
}

/* Extended attributes of the user's own namespace, all but overlayfs's pointers into layers of this one mount. */
static int copy_attributes(int source, int target) {
    char names[4096], value[4096];
    ssize_t size = flistxattr(source, names, sizeof names);
    for (char *name = names; size > 0 && name < names + size; name += strlen(name) + 1) {
        if (strncmp(name, "user.", 5) || !strcmp(name, "user.overlay.origin") || !strcmp(name, "user.overlay.impure"))
            continue;
        ssize_t length = fgetxattr(source, name, value, sizeof value);
        if (length >= 0 && fsetxattr(target, name, value, (size_t)length, 0) < 0)
            return errno;
    }
    return 0;
}

static int copy_status(int directory, const char *name, const struct stat *status) {
    const struct timespec times[2] = {status->st_atim, status->st_mtim};
    if (fchownat(directory, name, status->st_uid, status->st_gid, AT_SYMLINK_NOFOLLOW) < 0)
        return errno;
    if (!S_ISLNK(status->st_mode) && fchmodat(directory, name, status->st_mode & 07777, 0) < 0)
        return errno;
    return utimensat(directory, name, times, AT_SYMLINK_NOFOLLOW) < 0 ? errno : 0;
}

static int copy_regular(int source, int target, const char *name) {
    int from = openat(source, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (from < 0)
        return errno;
    int to = openat(target, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600), error = to < 0 ? errno : 0;
    struct stat status;
    off_t at = 0;
    if (!error && fstat(from, &status) < 0)
        error = errno;
    while (!error && at < status.st_size) { /* hole by hole: a sparse terabyte stays sparse */
        off_t data = lseek(from, at, SEEK_DATA);
        if (data < 0)
            break;
        off_t hole = lseek(from, data, SEEK_HOLE);
        lseek(to, data, SEEK_SET);
        for (at = data; !error && at < hole;)
            if (sendfile(to, from, &at, (size_t)(hole - at)) <= 0)
                error = errno ? errno : EIO;
    }
    if (!error && ftruncate(to, status.st_size) < 0)
        error = errno;
    if (!error)
        error = copy_attributes(from, to);
    close(from);
    if (to >= 0)
        close(to);
    return error;
}

static int copy_special(int source, int target, const char *name, const struct stat *status) {
    char destination[PATH_MAX];
    if (!S_ISLNK(status->st_mode)) {
        bool whiteout = S_ISCHR(status->st_mode) && status->st_rdev == makedev(0, 0);
        if (!whiteout && !S_ISFIFO(status->st_mode) && !S_ISSOCK(status->st_mode))
            return 0;
        return mknodat(target, name, status->st_mode, status->st_rdev) < 0 ? errno : 0;
    }
    ssize_t size = readlinkat(source, name, destination, sizeof destination - 1);
    if (size < 0)
        return errno;
    destination[size] = 0;
    return symlinkat(destination, target, name) < 0 ? errno : 0;
}

static int apply_directory(int source, int target, int root, const char *path, int depth);

static int apply_subdirectory(int source, int target, int root, const char *path, const char *name, int depth) {
    int from = openat(source, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (from < 0)
        return errno;
    char mark = 0;
    struct stat existing;
    bool opaque = fgetxattr(from, "user.overlay.opaque", &mark, 1) == 1 && mark == 'y';
    bool merges = !opaque && fstatat(target, name, &existing, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(existing.st_mode);
    int error = merges ? 0 : remove_tree(target, name);
    if (!error && !merges && mkdirat(target, name, 0700) < 0)
        error = errno;
    int to = error ? -1 : openat(target, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (!error)
        error = to < 0 ? errno : copy_attributes(from, to);
    if (!error)
        error = apply_directory(from, to, root, path, depth + 1);
    close(from);
    if (to >= 0)
        close(to);
    return error;
}

/* A file with several names is copied once and linked to after that. */
static int apply_file(int source, int target, int root, const char *path, const char *name, const struct stat *status) {
    if (status->st_nlink > 1) {
        for (size_t i = 0; i < link_count; i++)
            if (links[i].source == status->st_ino)
                return linkat(root, links[i].path, target, name, 0) < 0 ? errno : 0;
        struct linked *larger = realloc(links, (link_count + 1) * sizeof *links);
        if (larger && strlen(path) < sizeof larger->path) {
            links = larger;
            links[link_count].source = status->st_ino;
            strcpy(links[link_count++].path, path);
        }
    }
    return copy_regular(source, target, name);
}

static int apply_entry(int source, int target, int root, const char *path, const char *name, int depth) {
    struct stat status;
    if (fstatat(source, name, &status, AT_SYMLINK_NOFOLLOW) < 0)
        return errno;
    int error;
    if (S_ISDIR(status.st_mode)) {
        error = apply_subdirectory(source, target, root, path, name, depth);
    } else {
        error = remove_tree(target, name);
        if (!error)
            error = S_ISREG(status.st_mode) ? apply_file(source, target, root, path, name, &status)
                                            : copy_special(source, target, name, &status);
    }
    if (error)
        return error;
    error = copy_status(target, name, &status);
    return error == ENOENT ? 0 : error; /* a device that was left out */
}

static int apply_directory(int source, int target, int root, const char *path, int depth) {
    if (depth > 256)
        return ELOOP;
    int own = openat(source, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *stream = own < 0 ? NULL : fdopendir(own);
    int error = stream ? 0 : errno;
    for (struct dirent *found; !error && (found = readdir(stream));) {
        char below[PATH_MAX];
        if (!strcmp(found->d_name, ".") || !strcmp(found->d_name, ".."))
            continue;
        if (snprintf(below, sizeof below, "%s%s%s", path, *path ? "/" : "", found->d_name) >= (int)sizeof below)
            error = ENAMETOOLONG;
        else
            error = apply_entry(source, target, root, below, found->d_name, depth);
    }
    if (stream)
        closedir(stream);
    return error;
}

/* Applies the layer under `source_fd` onto the one under `target_fd`; returns an errno value. */
int apply_layer(int source_fd, int target_fd) {
    free(links);
    links = NULL;
    link_count = 0;
    return apply_directory(source_fd, target_fd, target_fd, "", 0);
}
