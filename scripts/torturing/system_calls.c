// Stands before libc's calls that touch files (LD_PRELOAD) and disturbs the n-th one in chosen folders.
//
// Does nothing until a process arms it, so a server that preloads it can fork processes with a fault each.
// io_uring goes past libc: its enter call is counted as one that writes, and its set-up can be refused, as a
// sandbox does, so that the engine of threads is used, whose calls are all seen here.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITES = 1, SYNCS = 2, NAMES = 4, ROOM = 8, READS = 16 };
enum { COUNT = 0, SIGNAL = 1, FAIL = 2, SHORT = 3, POWER_CUT = 4 };
#define SHUTDOWN _IOR('X', 125, unsigned)  // of ext4 and xfs

struct told {  // shared with the process that forked this one
    atomic_long num_calls;
    atomic_long num_done;
    char call[32];
    char path[400];
};

static struct {
    char folders[PATH_MAX];  // with a newline after each
    long nth;
    int classes, action, number, is_lasting, is_uring_refused;
    int disks[2];
    struct told *told;
} armed;

void torture_arm(const char *folders, long nth, int classes, int action, int number, int is_lasting,
                 int is_uring_refused, int disk0, int disk1, void *told) {
    snprintf(armed.folders, sizeof armed.folders, "%s", folders);
    armed.nth = nth, armed.classes = classes, armed.action = action, armed.number = number;
    armed.is_lasting = is_lasting, armed.is_uring_refused = is_uring_refused;
    armed.disks[0] = disk0, armed.disks[1] = disk1;
    armed.told = told;
}

static int is_watched(const char *path) {
    const char *at = armed.folders;
    while (*at) {
        const char *end = strchr(at, '\n');
        const size_t length = (size_t)(end - at);
        if (strncmp(path, at, length) == 0 && (path[length] == '/' || path[length] == 0)) return 1;
        at = end + 1;
    }
    return 0;
}

// 0: go on; FAIL: errno is set; SHORT: do a part of it.
static int meet(int class, const char *call, const char *path) {
    if (!armed.told || !(class & armed.classes) || !is_watched(path)) return 0;
    const long n = atomic_fetch_add(&armed.told->num_calls, 1) + 1;
    if (armed.action == COUNT || n < armed.nth || (n > armed.nth && !armed.is_lasting)) return 0;
    if (atomic_fetch_add(&armed.told->num_done, 1) == 0) {
        snprintf(armed.told->call, sizeof armed.told->call, "%s", call);
        snprintf(armed.told->path, sizeof armed.told->path, "%s", path);
    }
    if (armed.action == POWER_CUT) {
        unsigned how = 2;  // nothing more is written, not even the journal
        for (int i = 0; i < 2; i++)
            if (armed.disks[i] >= 0) ioctl(armed.disks[i], SHUTDOWN, &how);
        kill(getpid(), SIGKILL);
    }
    if (armed.action == SIGNAL) kill(getpid(), armed.number);
    if (armed.action == FAIL) errno = armed.number;
    return armed.action == FAIL || (armed.action == SHORT && class == WRITES) ? armed.action : 0;
}

static int meet_file(int class, const char *call, int descriptor) {
    if (!armed.told || !(class & armed.classes)) return 0;
    const int kept = errno;
    char link[40], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    const ssize_t length = readlink(link, path, sizeof path - 1);
    errno = kept;
    if (length < 0) return 0;
    path[length] = 0;
    return meet(class, call, path);
}

static int meet_entry(const char *call, int folder, const char *path) {
    if (path[0] == '/' || folder == AT_FDCWD) return meet(NAMES, call, path);
    return meet_file(NAMES, call, folder);
}

#define REAL(name) ({ static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name); real; })
#define PART(n) ((n) > 1 ? (n) / 2 : (n))

ssize_t write(int fd, const void *from, size_t n) {
    const int met = meet_file(WRITES, "write", fd);
    return met == FAIL ? -1 : REAL(write)(fd, from, met == SHORT ? PART(n) : n);
}
#define PWRITE(name) \
    ssize_t name(int fd, const void *from, size_t n, off_t at) { \
        const int met = meet_file(WRITES, "pwrite", fd); \
        return met == FAIL ? -1 : REAL(name)(fd, from, met == SHORT ? PART(n) : n, at); \
    }
PWRITE(pwrite)
PWRITE(pwrite64)
#define PWRITEV(name) \
    ssize_t name(int fd, const struct iovec *parts, int count, off_t at) { \
        const int met = meet_file(WRITES, "pwritev", fd); \
        if (met == FAIL) return -1; \
        struct iovec first = parts[0]; \
        if (met == SHORT && count == 1 && first.iov_len > 4096) { \
            first.iov_len = first.iov_len / 8192 * 4096; \
            return REAL(name)(fd, &first, 1, at); \
        } \
        return REAL(name)(fd, parts, count, at); \
    }
PWRITEV(pwritev)
PWRITEV(pwritev64)
ssize_t read(int fd, void *to, size_t n) {
    return meet_file(READS, "read", fd) == FAIL ? -1 : REAL(read)(fd, to, n);
}
#define PREADV(name) \
    ssize_t name(int fd, const struct iovec *parts, int count, off_t at) { \
        return meet_file(READS, "preadv", fd) == FAIL ? -1 : REAL(name)(fd, parts, count, at); \
    }
PREADV(preadv)
PREADV(preadv64)
int fsync(int fd) { return meet_file(SYNCS, "fsync", fd) == FAIL ? -1 : REAL(fsync)(fd); }
int fdatasync(int fd) { return meet_file(SYNCS, "fdatasync", fd) == FAIL ? -1 : REAL(fdatasync)(fd); }
#define FALLOCATE(name) \
    int name(int fd, int mode, off_t from, off_t n) { \
        return meet_file(ROOM, "fallocate", fd) == FAIL ? -1 : REAL(name)(fd, mode, from, n); \
    }
FALLOCATE(fallocate)
FALLOCATE(fallocate64)
#define POSIX_FALLOCATE(name) \
    int name(int fd, off_t from, off_t n) { \
        return meet_file(ROOM, "posix_fallocate", fd) == FAIL ? armed.number : REAL(name)(fd, from, n); \
    }
POSIX_FALLOCATE(posix_fallocate)
POSIX_FALLOCATE(posix_fallocate64)
#define FTRUNCATE(name) \
    int name(int fd, off_t n) { return meet_file(ROOM, "ftruncate", fd) == FAIL ? -1 : REAL(name)(fd, n); }
FTRUNCATE(ftruncate)
FTRUNCATE(ftruncate64)
int rename(const char *from, const char *to) {
    return meet(NAMES, "rename", to) == FAIL ? -1 : REAL(rename)(from, to);
}
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
    return meet_entry("renameat2", b, to) == FAIL ? -1 : REAL(renameat2)(a, from, b, to, flags);
}
int mkdir(const char *path, mode_t mode) {
    return meet(NAMES, "mkdir", path) == FAIL ? -1 : REAL(mkdir)(path, mode);
}
int unlink(const char *path) { return meet(NAMES, "unlink", path) == FAIL ? -1 : REAL(unlink)(path); }
int rmdir(const char *path) { return meet(NAMES, "rmdir", path) == FAIL ? -1 : REAL(rmdir)(path); }
int unlinkat(int folder, const char *path, int flags) {
    return meet_entry("unlinkat", folder, path) == FAIL ? -1 : REAL(unlinkat)(folder, path, flags);
}
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list more; \
        va_start(more, flags); \
        const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more); \
        if (flags & O_CREAT && meet(NAMES, "open", path) == FAIL) return -1; \
        return REAL(name)(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

long syscall(long number, ...) {
    va_list more;
    va_start(more, number);
    long a[6];
    for (int i = 0; i < 6; i++) a[i] = va_arg(more, long);
    va_end(more);
    if (armed.told && number == SYS_io_uring_setup && armed.is_uring_refused) {
        errno = EPERM;
        return -1;
    }
    if (armed.told && number == SYS_io_uring_enter && (armed.action == SIGNAL || armed.action == POWER_CUT || armed.action == COUNT)) {
        char folder[PATH_MAX];
        snprintf(folder, sizeof folder, "%.*s", (int)strcspn(armed.folders, "\n"), armed.folders);
        meet(WRITES, "io_uring_enter", folder);
    }
    return REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
