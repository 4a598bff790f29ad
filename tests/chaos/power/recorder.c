/* Records what processes do to the files under one folder: creations, writes with their bytes, truncations, renames,
 * links, removals and flushes, in one order over all processes.
 *
 * It is preloaded (LD_PRELOAD), so it sees every call of the C library: Python's, C++'s and Rust's alike.
 *   YCORE_RECORD_ROOT  the folder, without symbolic links in its path
 *   YCORE_RECORD_LOG   the file to append to; every record is a header (struct record), two paths and the bytes
 * safetensors renames its temporary file by a raw system call: files that this process created under a name with a dot
 * are looked at before each of its next operations, and such a rename is recorded then. What else it does not see (other
 * raw calls, stdio's own buffers) shows as a difference between the replayed and the real folder, which the reader
 * checks; a shared mapping for writing is recorded as unsupported.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

struct record {
    uint32_t magic;
    uint32_t kind;
    int32_t pid;
    uint32_t first_length, second_length;
    uint32_t padding;
    int64_t offset;
    uint64_t num_bytes;
};

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static const char *root(void) { return getenv("YCORE_RECORD_ROOT"); }

static int is_below(const char *path)
{
    const char *base = root();
    if (base == NULL || getenv("YCORE_RECORD_LOG") == NULL) return 0;
    size_t length = strlen(base);
    return strncmp(path, base, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static void put(int log, const void *data, size_t length)
{
    const char *from = data;
    while (length > 0) {
        long done = syscall(SYS_write, log, from, length);
        if (done <= 0) abort();
        from += done;
        length -= (size_t)done;
    }
}

static void note(int log, char kind, const char *first, const char *second, int64_t offset, const void *data, size_t length)
{
    int kept = errno;
    struct record one = {.magic = 0x79636f72, .kind = (uint32_t)kind, .pid = getpid(), .offset = offset, .num_bytes = length};
    one.first_length = (uint32_t)strlen(first);
    one.second_length = second == NULL ? 0 : (uint32_t)strlen(second);
    put(log, &one, sizeof one);
    put(log, first, one.first_length);
    if (second != NULL) put(log, second, one.second_length);
    put(log, data, length);
    errno = kept;
}

#define MOST_WATCHED 64

static struct watched {
    char path[PATH_MAX];
    ino_t inode;
} watched[MOST_WATCHED];

/* Called in turn, as all that follows here. */
static void watch(const char *path)
{
    struct stat status;
    const char *name = strrchr(path, '/') + 1;
    if (*name != '.' || lstat(path, &status) != 0) return;
    for (int place = 0; place < MOST_WATCHED; place++) {
        if (watched[place].inode != 0) continue;
        snprintf(watched[place].path, PATH_MAX, "%s", path);
        watched[place].inode = status.st_ino;
        return;
    }
}

static void forget(const char *path)
{
    for (int place = 0; place < MOST_WATCHED; place++)
        if (watched[place].inode != 0 && strcmp(watched[place].path, path) == 0) watched[place].inode = 0;
}

static void note_moved(int log, const char *path, ino_t inode)
{
    char folder[PATH_MAX], now[PATH_MAX];
    snprintf(folder, sizeof folder, "%s", path);
    *strrchr(folder, '/') = 0;
    DIR *entries = opendir(folder);
    struct dirent *entry;
    while (entries != NULL && (entry = readdir(entries)) != NULL)
        if (entry->d_ino == inode && snprintf(now, sizeof now, "%s/%s", folder, entry->d_name) < PATH_MAX)
            note(log, 'R', path, now, 0, NULL, 0);
    if (entries != NULL) closedir(entries);
}

static void look_for_moves(int log)
{
    for (int place = 0; place < MOST_WATCHED; place++) {
        struct stat status;
        if (watched[place].inode == 0) continue;
        if (lstat(watched[place].path, &status) == 0 && status.st_ino == watched[place].inode) continue;
        note_moved(log, watched[place].path, watched[place].inode);
        watched[place].inode = 0;
    }
}

/* One record at a time over all processes and threads: each call opens the log anew, and the lock belongs to the open. */
static int take_turn(void)
{
    int log = (int)syscall(SYS_openat, AT_FDCWD, getenv("YCORE_RECORD_LOG"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    int kept = errno;
    if (log >= 0) syscall(SYS_fcntl, log, F_OFD_SETLKW, &lock);
    if (log >= 0) look_for_moves(log);
    errno = kept;
    return log;
}

static void end_turn(int log)
{
    int kept = errno;
    if (log >= 0) syscall(SYS_close, log);
    errno = kept;
}

/* The path behind an open file; 0 where it is not below the root, or no longer has a name. */
static int path_of(int fd, char *path)
{
    char link[64];
    struct stat status;
    int kept = errno, is_ours = 0;
    if (root() != NULL && fd >= 0 && fstat(fd, &status) == 0 && (S_ISREG(status.st_mode) || S_ISDIR(status.st_mode))) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(link, path, PATH_MAX - 1);
        if (length > 0) {
            path[length] = 0;
            is_ours = is_below(path) && status.st_nlink > 0;
        }
    }
    errno = kept;
    return is_ours;
}

/* An absolute path with its folder's links resolved; 0 where it is not below the root. */
static int path_at(int folder, const char *given, char *path)
{
    char joined[PATH_MAX], parent[PATH_MAX], base[PATH_MAX];
    int kept = errno, is_ours = 0;
    if (root() == NULL || given == NULL || *given == 0) return 0;
    if (*given == '/') {
        snprintf(joined, sizeof joined, "%s", given);
    } else if (folder == AT_FDCWD) {
        if (getcwd(base, sizeof base) == NULL || snprintf(joined, sizeof joined, "%s/%s", base, given) >= PATH_MAX) goto end;
    } else {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, base, sizeof base - 1);
        if (length <= 0) goto end;
        base[length] = 0;
        if (snprintf(joined, sizeof joined, "%s/%s", base, given) >= PATH_MAX) goto end;
    }
    while (strlen(joined) > 1 && joined[strlen(joined) - 1] == '/') joined[strlen(joined) - 1] = 0;
    char *slash = strrchr(joined, '/');
    if (slash == NULL) goto end;
    snprintf(base, sizeof base, "%s", slash + 1);
    *(slash == joined ? slash + 1 : slash) = 0;
    if (realpath(joined, parent) == NULL || snprintf(path, PATH_MAX, "%s/%s", parent, base) >= PATH_MAX) goto end;
    is_ours = is_below(path);
end:
    errno = kept;
    return is_ours;
}

static int is_there(const char *path)
{
    struct stat status;
    int kept = errno, found = lstat(path, &status) == 0;
    errno = kept;
    return found;
}

static void note_open(int log, const char *path, int was_there, int truncates)
{
    if (!was_there) {
        note(log, 'C', path, NULL, 0, NULL, 0);
        watch(path);
    } else if (truncates) note(log, 'T', path, NULL, 0, NULL, 0);
}

static int record_open(int folder, const char *given, int flags, mode_t mode, int (*real)(int, const char *, int, ...))
{
    char path[PATH_MAX];
    if (!(flags & (O_CREAT | O_TRUNC)) || !path_at(folder, given, path)) return real(folder, given, flags, mode);
    int log = take_turn(), was_there = is_there(path);
    int fd = real(folder, given, flags, mode);
    if (fd >= 0) note_open(log, path, was_there, flags & O_TRUNC);
    end_turn(log);
    return fd;
}

#define MODE_OF(flags)                                          \
    mode_t mode = 0;                                            \
    if ((flags) & (O_CREAT | (O_TMPFILE & ~O_DIRECTORY))) {     \
        va_list more;                                           \
        va_start(more, flags);                                  \
        mode = va_arg(more, mode_t);                            \
        va_end(more);                                           \
    }

int open(const char *path, int flags, ...) { MODE_OF(flags) return record_open(AT_FDCWD, path, flags, mode, REAL(openat)); }
int open64(const char *path, int flags, ...) { MODE_OF(flags) return record_open(AT_FDCWD, path, flags, mode, REAL(openat64)); }
int openat(int folder, const char *path, int flags, ...) { MODE_OF(flags) return record_open(folder, path, flags, mode, REAL(openat)); }
int openat64(int folder, const char *path, int flags, ...) { MODE_OF(flags) return record_open(folder, path, flags, mode, REAL(openat64)); }
int creat(const char *path, mode_t mode) { return record_open(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode, REAL(openat)); }

static FILE *record_fopen(const char *given, const char *how, FILE *(*real)(const char *, const char *))
{
    char path[PATH_MAX];
    if (*how == 'r' || !path_at(AT_FDCWD, given, path)) return real(given, how);
    int log = take_turn(), was_there = is_there(path);
    FILE *file = real(given, how);
    if (file != NULL) note_open(log, path, was_there, *how == 'w');
    end_turn(log);
    return file;
}

FILE *fopen(const char *path, const char *how) { return record_fopen(path, how, REAL(fopen)); }
FILE *fopen64(const char *path, const char *how) { return record_fopen(path, how, REAL(fopen64)); }

/* What a write put into the file, read back: it serves for every way of writing. */
static void note_range(int log, const char *path, int64_t offset, int64_t length)
{
    int kept = errno, fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
    char *data = malloc((size_t)length + 1);
    int64_t done = 0;
    while (fd >= 0 && data != NULL && done < length) {
        long some = syscall(SYS_pread64, fd, data + done, (size_t)(length - done), offset + done);
        if (some <= 0) break;
        done += some;
    }
    if (done == length) note(log, 'W', path, NULL, offset, data, (size_t)length);
    else note(log, 'X', path, "a write that cannot be read back", 0, NULL, 0);
    free(data);
    if (fd >= 0) syscall(SYS_close, fd);
    errno = kept;
}

static int64_t position(int fd)
{
    struct stat status;
    int kept = errno, flags = (int)syscall(SYS_fcntl, fd, F_GETFL, 0);
    int64_t at = -1;
    if (flags >= 0 && (flags & O_APPEND) && fstat(fd, &status) == 0) at = status.st_size;
    else at = syscall(SYS_lseek, fd, 0, SEEK_CUR);
    errno = kept;
    return at;
}

#define RECORD_WRITE(fd, where, call)                                   \
    char path[PATH_MAX];                                                \
    if (!path_of(fd, path)) return (call);                              \
    int log = take_turn();                                              \
    int64_t offset = (where);                                           \
    __typeof__(call) done = (call);                                     \
    if (done > 0) note_range(log, path, offset, done);                  \
    end_turn(log);                                                      \
    return done;

ssize_t write(int fd, const void *data, size_t length) { RECORD_WRITE(fd, position(fd), REAL(write)(fd, data, length)) }
ssize_t writev(int fd, const struct iovec *parts, int count) { RECORD_WRITE(fd, position(fd), REAL(writev)(fd, parts, count)) }
ssize_t pwrite(int fd, const void *data, size_t length, off_t at) { RECORD_WRITE(fd, at, REAL(pwrite)(fd, data, length, at)) }
ssize_t pwrite64(int fd, const void *data, size_t length, off64_t at) { RECORD_WRITE(fd, at, REAL(pwrite64)(fd, data, length, at)) }
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) { RECORD_WRITE(fd, at, REAL(pwritev)(fd, parts, count, at)) }
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at) { RECORD_WRITE(fd, at, REAL(pwritev64)(fd, parts, count, at)) }
ssize_t sendfile(int fd, int from, off_t *at, size_t length) { RECORD_WRITE(fd, position(fd), REAL(sendfile)(fd, from, at, length)) }
ssize_t sendfile64(int fd, int from, off64_t *at, size_t length) { RECORD_WRITE(fd, position(fd), REAL(sendfile64)(fd, from, at, length)) }
ssize_t copy_file_range(int from, off64_t *at, int fd, off64_t *to, size_t length, unsigned flags)
{
    RECORD_WRITE(fd, to == NULL ? position(fd) : *to, REAL(copy_file_range)(from, at, fd, to, length, flags))
}

#define RECORD_SIZE(fd, size, call)                                     \
    char path[PATH_MAX];                                                \
    if (!path_of(fd, path)) return (call);                              \
    int log = take_turn(), done = (call);                               \
    if (done == 0) note(log, 'T', path, NULL, size, NULL, 0);           \
    end_turn(log);                                                      \
    return done;

int ftruncate(int fd, off_t size) { RECORD_SIZE(fd, size, REAL(ftruncate)(fd, size)) }
int ftruncate64(int fd, off64_t size) { RECORD_SIZE(fd, size, REAL(ftruncate64)(fd, size)) }

static int record_truncate(const char *given, int64_t size, int (*real)(const char *, off64_t))
{
    char path[PATH_MAX];
    if (!path_at(AT_FDCWD, given, path)) return real(given, size);
    int log = take_turn(), done = real(given, size);
    if (done == 0) note(log, 'T', path, NULL, size, NULL, 0);
    end_turn(log);
    return done;
}

int truncate(const char *path, off_t size) { return record_truncate(path, size, REAL(truncate64)); }
int truncate64(const char *path, off64_t size) { return record_truncate(path, size, REAL(truncate64)); }

static int refuse(int fd, const char *what)
{
    char path[PATH_MAX];
    if (!path_of(fd, path)) return 0;
    int log = take_turn();
    note(log, 'X', path, what, 0, NULL, 0);
    end_turn(log);
    return 1;
}

int fallocate(int fd, int mode, off_t at, off_t length) { refuse(fd, "fallocate"); return REAL(fallocate)(fd, mode, at, length); }
int fallocate64(int fd, int mode, off64_t at, off64_t length) { refuse(fd, "fallocate"); return REAL(fallocate64)(fd, mode, at, length); }
int posix_fallocate(int fd, off_t at, off_t length) { refuse(fd, "fallocate"); return REAL(posix_fallocate)(fd, at, length); }

void *mmap(void *place, size_t length, int protection, int flags, int fd, off_t at)
{
    if (fd >= 0 && (flags & MAP_SHARED) && (protection & PROT_WRITE)) refuse(fd, "a shared mapping for writing");
    return (void *)syscall(SYS_mmap, place, length, protection, flags, fd, at);
}

void *mmap64(void *place, size_t length, int protection, int flags, int fd, off64_t at)
{
    return mmap(place, length, protection, flags, fd, at);
}

/* A flush counts from its end; the size lets the reader check that no write went unseen. */
#define RECORD_FLUSH(fd, call)                                                          \
    char path[PATH_MAX];                                                                \
    if (!path_of(fd, path)) return (call);                                              \
    int log = take_turn(), done = (call);                                               \
    struct stat status;                                                                 \
    if (done == 0 && fstat(fd, &status) == 0)                                           \
        note(log, 'S', path, NULL, S_ISDIR(status.st_mode) ? -1 : status.st_size, NULL, 0); \
    end_turn(log);                                                                      \
    return done;

int fsync(int fd) { RECORD_FLUSH(fd, REAL(fsync)(fd)) }
int fdatasync(int fd) { RECORD_FLUSH(fd, REAL(fdatasync)(fd)) }

#define RECORD_ONE(folder, given, kind, call)                           \
    char path[PATH_MAX];                                                \
    if (!path_at(folder, given, path)) return (call);                   \
    int log = take_turn(), done = (call);                               \
    if (done == 0) note(log, kind, path, NULL, 0, NULL, 0);             \
    if (done == 0) forget(path);                                        \
    end_turn(log);                                                      \
    return done;

int mkdir(const char *given, mode_t mode) { RECORD_ONE(AT_FDCWD, given, 'M', REAL(mkdir)(given, mode)) }
int mkdirat(int folder, const char *given, mode_t mode) { RECORD_ONE(folder, given, 'M', REAL(mkdirat)(folder, given, mode)) }
int rmdir(const char *given) { RECORD_ONE(AT_FDCWD, given, 'D', REAL(rmdir)(given)) }
int unlink(const char *given) { RECORD_ONE(AT_FDCWD, given, 'U', REAL(unlink)(given)) }
int unlinkat(int folder, const char *given, int flags)
{
    RECORD_ONE(folder, given, flags & AT_REMOVEDIR ? 'D' : 'U', REAL(unlinkat)(folder, given, flags))
}

static int record_two(int from, const char *old, int to, const char *new, char kind, int (*real)(int, const char *, int, const char *))
{
    char first[PATH_MAX], second[PATH_MAX];
    int is_from = path_at(from, old, first), is_to = path_at(to, new, second);
    if (!is_from && !is_to) return real(from, old, to, new);
    int log = take_turn(), done = real(from, old, to, new);
    if (done == 0) {
        if (is_from && is_to) note(log, kind, first, second, 0, NULL, 0);
        else note(log, 'X', is_from ? first : second, "a move over the folder's border", 0, NULL, 0);
        if (is_from && kind == 'R') forget(first);
    }
    end_turn(log);
    return done;
}

static int plain_linkat(int from, const char *old, int to, const char *new) { return (int)syscall(SYS_linkat, from, old, to, new, 0); }
int rename(const char *old, const char *new) { return record_two(AT_FDCWD, old, AT_FDCWD, new, 'R', REAL(renameat)); }
int renameat(int from, const char *old, int to, const char *new) { return record_two(from, old, to, new, 'R', REAL(renameat)); }
int renameat2(int from, const char *old, int to, const char *new, unsigned flags)
{
    if (flags == 0) return record_two(from, old, to, new, 'R', REAL(renameat));
    refuse(from, "renameat2 with flags");
    return REAL(renameat2)(from, old, to, new, flags);
}
int link(const char *old, const char *new) { return record_two(AT_FDCWD, old, AT_FDCWD, new, 'L', plain_linkat); }
int linkat(int from, const char *old, int to, const char *new, int flags)
{
    return flags == 0 ? record_two(from, old, to, new, 'L', plain_linkat) : REAL(linkat)(from, old, to, new, flags);
}
