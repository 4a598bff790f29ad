/* Lets one file operation fail: it is preloaded (LD_PRELOAD) into a run's processes, which share one count.
 *
 *   YCORE_FAULT_ROOT   only operations on files below this folder count; without symbolic links in its path
 *   YCORE_FAULT_STATE  a file of at least sizeof(struct state) zeros, mapped by all processes
 *   YCORE_FAULT        OPERATION:ERRNO:NUMBER:LAST, such as write:28:17:17; operations of that kind from NUMBER to LAST
 *                      (from 0, in the order of the calls of all processes) fail; without it they are only counted
 * open counts only where it may write or make a file.
 */
#define _GNU_SOURCE
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

enum { OPEN, WRITE, FSYNC, RENAME, UNLINK, MKDIR, NUM_KINDS };
static const char *NAMES[NUM_KINDS] = {"open", "write", "fsync", "rename", "unlink", "mkdir"};

struct state {
    uint64_t counts[NUM_KINDS];
    uint64_t num_failed;
    int32_t pid; /* of the first that failed */
    char path[PATH_MAX];
};

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static struct state *state;
static const char *root;
static int kind_to_fail = -1, error_number;
static uint64_t first_to_fail, last_to_fail;

__attribute__((constructor)) void ycore_fault_begin(void) /* again after a fork, by ctypes */
{
    const char *file = getenv("YCORE_FAULT_STATE"), *fault = getenv("YCORE_FAULT");
    root = getenv("YCORE_FAULT_ROOT");
    if (file == NULL || root == NULL) return;
    long descriptor = syscall(SYS_openat, AT_FDCWD, file, O_RDWR | O_CLOEXEC);
    if (descriptor < 0) return; /* a confined process, which has no such file */
    void *place = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, (int)descriptor, 0);
    syscall(SYS_close, descriptor);
    if (place == MAP_FAILED) return;
    char name[16];
    unsigned long first, last;
    if (fault != NULL && sscanf(fault, "%15[a-z]:%d:%lu:%lu", name, &error_number, &first, &last) == 4)
        for (int kind = 0; kind < NUM_KINDS; kind++)
            if (strcmp(name, NAMES[kind]) == 0) {
                kind_to_fail = kind;
                first_to_fail = first;
                last_to_fail = last;
            }
    state = place;
}

static int is_below(const char *path)
{
    size_t length = strlen(root);
    return strncmp(path, root, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static int fails(int kind, const char *path)
{
    if (!is_below(path)) return 0;
    uint64_t number = __atomic_fetch_add(&state->counts[kind], 1, __ATOMIC_SEQ_CST);
    if (kind != kind_to_fail || number < first_to_fail || number > last_to_fail) return 0;
    if (__atomic_fetch_add(&state->num_failed, 1, __ATOMIC_SEQ_CST) == 0) {
        state->pid = getpid();
        strncpy(state->path, path, PATH_MAX - 1);
    }
    errno = error_number;
    return 1;
}

static int fails_at(int kind, int folder, const char *name)
{
    char path[PATH_MAX], base[PATH_MAX], link[64];
    if (state == NULL) return 0;
    if (name[0] == '/') return fails(kind, name);
    snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, base, sizeof base - 1);
    if (length < 0) return 0;
    base[length] = 0;
    if (snprintf(path, sizeof path, "%s/%s", base, name) >= (int)sizeof path) return 0;
    return fails(kind, path);
}

static int fails_of(int kind, int descriptor)
{
    char path[PATH_MAX], link[64];
    if (state == NULL) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return fails(kind, path);
}

#define MODE_OF(flags)                              \
    mode_t mode = 0;                                \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {        \
        va_list rest;                               \
        va_start(rest, flags);                      \
        mode = va_arg(rest, mode_t);                \
        va_end(rest);                               \
    }
#define WRITES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT))

int open(const char *path, int flags, ...)
{
    MODE_OF(flags)
    return WRITES(flags) && fails_at(OPEN, AT_FDCWD, path) ? -1 : REAL(open)(path, flags, mode);
}
int open64(const char *path, int flags, ...)
{
    MODE_OF(flags)
    return WRITES(flags) && fails_at(OPEN, AT_FDCWD, path) ? -1 : REAL(open64)(path, flags, mode);
}
int openat(int folder, const char *path, int flags, ...)
{
    MODE_OF(flags)
    return WRITES(flags) && fails_at(OPEN, folder, path) ? -1 : REAL(openat)(folder, path, flags, mode);
}
int openat64(int folder, const char *path, int flags, ...)
{
    MODE_OF(flags)
    return WRITES(flags) && fails_at(OPEN, folder, path) ? -1 : REAL(openat64)(folder, path, flags, mode);
}
#define STREAM(name)                                                                                        \
    FILE *name(const char *path, const char *mode)                                                          \
    {                                                                                                       \
        return strpbrk(mode, "wa+") && fails_at(OPEN, AT_FDCWD, path) ? NULL : REAL(name)(path, mode);      \
    }
STREAM(fopen)
STREAM(fopen64)
ssize_t write(int descriptor, const void *data, size_t length)
{
    return fails_of(WRITE, descriptor) ? -1 : REAL(write)(descriptor, data, length);
}
ssize_t pwrite(int descriptor, const void *data, size_t length, off_t at)
{
    return fails_of(WRITE, descriptor) ? -1 : REAL(pwrite)(descriptor, data, length, at);
}
ssize_t pwrite64(int descriptor, const void *data, size_t length, off64_t at)
{
    return fails_of(WRITE, descriptor) ? -1 : REAL(pwrite64)(descriptor, data, length, at);
}
ssize_t writev(int descriptor, const struct iovec *parts, int count)
{
    return fails_of(WRITE, descriptor) ? -1 : REAL(writev)(descriptor, parts, count);
}
int fsync(int descriptor) { return fails_of(FSYNC, descriptor) ? -1 : REAL(fsync)(descriptor); }
int fdatasync(int descriptor) { return fails_of(FSYNC, descriptor) ? -1 : REAL(fdatasync)(descriptor); }
int rename(const char *from, const char *to)
{
    return fails_at(RENAME, AT_FDCWD, to) ? -1 : REAL(rename)(from, to);
}
int renameat(int from_folder, const char *from, int to_folder, const char *to)
{
    return fails_at(RENAME, to_folder, to) ? -1 : REAL(renameat)(from_folder, from, to_folder, to);
}
int unlink(const char *path) { return fails_at(UNLINK, AT_FDCWD, path) ? -1 : REAL(unlink)(path); }
int unlinkat(int folder, const char *path, int flags)
{
    return fails_at(UNLINK, folder, path) ? -1 : REAL(unlinkat)(folder, path, flags);
}
int rmdir(const char *path) { return fails_at(UNLINK, AT_FDCWD, path) ? -1 : REAL(rmdir)(path); }
int mkdir(const char *path, mode_t mode) { return fails_at(MKDIR, AT_FDCWD, path) ? -1 : REAL(mkdir)(path, mode); }
int mkdirat(int folder, const char *path, mode_t mode)
{
    return fails_at(MKDIR, folder, path) ? -1 : REAL(mkdirat)(folder, path, mode);
}
