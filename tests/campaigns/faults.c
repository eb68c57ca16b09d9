/* Kills a process, or fails one of its system calls, at the n-th call on files below a directory.
 *
 * Preloaded (LD_PRELOAD) into a process and those that it starts. It does nothing until the environment names a
 * directory and `faults_begin` is called; processes started later begin by themselves. All processes count their
 * calls in one shared file, so that the n-th call is that of the whole command.
 *
 *   FAULTS_ROOT    the directory
 *   FAULTS_STATE   the file of `struct state`, 64 bytes
 *   FAULTS_LOG     where the name of each call is appended; may be absent
 *   FAULTS_AT      the number of the call that fails, from 1; 0: none
 *   FAULTS_ERRNO   what it fails with; 0: SIGKILL to the whole process group instead
 *   FAULTS_LASTS   1: that call and every later one of the same name fail
 *   FAULTS_CLOCK   by how many seconds the clock of programs is wrong; that of the kernel, which dates files, is not
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/types.h>
#include <time.h>
#include <sys/uio.h>
#include <unistd.h>

struct state {
    atomic_long calls;
    char failing[16]; /* the name of the call that failed first */
    atomic_long clock_jumped; /* seconds that a test adds to FAULTS_CLOCK while processes run */
};

static struct state *shared;
static char root[PATH_MAX];
static size_t root_length;
static long fails_at;
static int fails_with, lasts, log_file = -1;
static long clock_ahead;

#define REAL(result, name, ...)                        \
    static result (*real)(__VA_ARGS__);                \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, name)

/* The system calls themselves, so that the shim does not count its own. */
static int plain_open(const char *path, int flags) {
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC, 0600);
}

void faults_begin(void) {
    const char *directory = getenv("FAULTS_ROOT"), *state = getenv("FAULTS_STATE"), *text;
    if (!directory || !state || shared) return;
    int file = plain_open(state, O_RDWR);
    if (file < 0) return;
    void *mapped = (void *)syscall(SYS_mmap, 0, sizeof(struct state), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    syscall(SYS_close, file);
    if (mapped == MAP_FAILED) return;
    snprintf(root, sizeof root, "%s", directory);
    root_length = strlen(root);
    fails_at = (text = getenv("FAULTS_AT")) ? atol(text) : 0;
    fails_with = (text = getenv("FAULTS_ERRNO")) ? atoi(text) : 0;
    clock_ahead = (text = getenv("FAULTS_CLOCK")) ? atol(text) : 0;
    lasts = (text = getenv("FAULTS_LASTS")) && *text == '1';
    if ((text = getenv("FAULTS_LOG"))) log_file = plain_open(text, O_WRONLY | O_APPEND | O_CREAT);
    shared = mapped;
}

__attribute__((constructor)) static void begin_in_child(void) { faults_begin(); }

static int below(const char *path) {
    return !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static int file_below(int file) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = syscall(SYS_readlink, link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return below(path);
}

static int path_below(int directory, const char *path) {
    char from[PATH_MAX], whole[2 * PATH_MAX];
    if (!path) return 0;
    if (*path == '/') return below(path);
    if (directory == AT_FDCWD) {
        if (syscall(SYS_getcwd, from, sizeof from) < 0) return 0;
    } else {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
        ssize_t length = syscall(SYS_readlink, link, from, sizeof from - 1);
        if (length < 0) return 0;
        from[length] = 0;
    }
    snprintf(whole, sizeof whole, "%s/%s", from, path);
    return below(whole);
}

/* Counts a call. Returns whether it has to fail; errno says how. */
static int fails(const char *name) {
    long number = atomic_fetch_add(&shared->calls, 1) + 1;
    if (log_file >= 0) {
        char line[32];
        int length = snprintf(line, sizeof line, "%s\n", name);
        syscall(SYS_write, log_file, line, length);
    }
    if (!fails_at || number < fails_at) return 0;
    if (number == fails_at) {
        if (!fails_with) syscall(SYS_kill, 0, SIGKILL);
        snprintf(shared->failing, sizeof shared->failing, "%s", name);
    } else if (!lasts || strcmp(name, shared->failing)) {
        return 0;
    }
    errno = fails_with;
    return 1;
}

#define FAILS_FILE(name, file) (shared && file_below(file) && fails(name))
#define FAILS_PATH(name, directory, path) (shared && path_below(directory, path) && fails(name))

static mode_t mode_of(int flags, va_list rest) {
    return flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0;
}

#define OPEN(function)                                        \
    int function(const char *path, int flags, ...) {          \
        REAL(int, #function, const char *, int, ...);         \
        va_list rest;                                         \
        va_start(rest, flags);                                \
        mode_t mode = mode_of(flags, rest);                   \
        va_end(rest);                                         \
        if (FAILS_PATH("open", AT_FDCWD, path)) return -1;    \
        return real(path, flags, mode);                       \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(function)                                              \
    int function(int directory, const char *path, int flags, ...) {   \
        REAL(int, #function, int, const char *, int, ...);            \
        va_list rest;                                                 \
        va_start(rest, flags);                                        \
        mode_t mode = mode_of(flags, rest);                           \
        va_end(rest);                                                 \
        if (FAILS_PATH("open", directory, path)) return -1;           \
        return real(directory, path, flags, mode);                    \
    }
OPENAT(openat)
OPENAT(openat64)

#define ON_FILE(result, function, named, parameters, arguments, failed, types...) \
    result function parameters {                                                  \
        REAL(result, #function, types);                                           \
        if (FAILS_FILE(named, file)) return failed;                               \
        return real arguments;                                                    \
    }
ON_FILE(ssize_t, read, "read", (int file, void *into, size_t n), (file, into, n), -1, int, void *, size_t)
ON_FILE(ssize_t, pread, "read", (int file, void *into, size_t n, off_t at), (file, into, n, at), -1, int, void *, size_t, off_t)
ON_FILE(ssize_t, pread64, "read", (int file, void *into, size_t n, off64_t at), (file, into, n, at), -1, int, void *, size_t, off64_t)
ON_FILE(ssize_t, preadv, "read", (int file, const struct iovec *into, int n, off_t at), (file, into, n, at), -1, int, const struct iovec *, int, off_t)
ON_FILE(ssize_t, preadv64v2, "read", (int file, const struct iovec *into, int n, off64_t at, int flags), (file, into, n, at, flags), -1, int, const struct iovec *, int, off64_t, int)
ON_FILE(ssize_t, preadv2, "read", (int file, const struct iovec *into, int n, off_t at, int flags), (file, into, n, at, flags), -1, int, const struct iovec *, int, off_t, int)
ON_FILE(ssize_t, write, "write", (int file, const void *from, size_t n), (file, from, n), -1, int, const void *, size_t)
ON_FILE(ssize_t, pwrite, "write", (int file, const void *from, size_t n, off_t at), (file, from, n, at), -1, int, const void *, size_t, off_t)
ON_FILE(ssize_t, pwrite64, "write", (int file, const void *from, size_t n, off64_t at), (file, from, n, at), -1, int, const void *, size_t, off64_t)
ON_FILE(ssize_t, writev, "write", (int file, const struct iovec *from, int n), (file, from, n), -1, int, const struct iovec *, int)
ON_FILE(int, fsync, "fsync", (int file), (file), -1, int)
ON_FILE(int, fdatasync, "fsync", (int file), (file), -1, int)
ON_FILE(int, ftruncate, "truncate", (int file, off_t size), (file, size), -1, int, off_t)
ON_FILE(int, ftruncate64, "truncate", (int file, off64_t size), (file, size), -1, int, off64_t)
ON_FILE(int, flock, "lock", (int file, int how), (file, how), -1, int, int)
ON_FILE(int, fchmod, "chmod", (int file, mode_t mode), (file, mode), -1, int, mode_t)
ON_FILE(ssize_t, copy_file_range, "write", (int from, off64_t *at, int file, off64_t *to, size_t n, unsigned flags), (from, at, file, to, n, flags), -1, int, off64_t *, int, off64_t *, size_t, unsigned)
ON_FILE(ssize_t, sendfile, "write", (int file, int from, off_t *at, size_t n), (file, from, at, n), -1, int, int, off_t *, size_t)
ON_FILE(ssize_t, sendfile64, "write", (int file, int from, off64_t *at, size_t n), (file, from, at, n), -1, int, int, off64_t *, size_t)
ON_FILE(void *, mmap, "mmap", (void *at, size_t n, int may, int flags, int file, off_t from), (at, n, may, flags, file, from), MAP_FAILED, void *, size_t, int, int, int, off_t)
ON_FILE(void *, mmap64, "mmap", (void *at, size_t n, int may, int flags, int file, off64_t from), (at, n, may, flags, file, from), MAP_FAILED, void *, size_t, int, int, int, off64_t)

#define ON_PATH(function, named, parameters, arguments, directory, types...) \
    int function parameters {                                                \
        REAL(int, #function, types);                                         \
        if (FAILS_PATH(named, directory, path)) return -1;                   \
        return real arguments;                                               \
    }
ON_PATH(creat, "open", (const char *path, mode_t mode), (path, mode), AT_FDCWD, const char *, mode_t)
ON_PATH(unlink, "unlink", (const char *path), (path), AT_FDCWD, const char *)
ON_PATH(unlinkat, "unlink", (int at, const char *path, int flags), (at, path, flags), at, int, const char *, int)
ON_PATH(rmdir, "unlink", (const char *path), (path), AT_FDCWD, const char *)
ON_PATH(mkdir, "mkdir", (const char *path, mode_t mode), (path, mode), AT_FDCWD, const char *, mode_t)
ON_PATH(mkdirat, "mkdir", (int at, const char *path, mode_t mode), (at, path, mode), at, int, const char *, mode_t)
ON_PATH(chmod, "chmod", (const char *path, mode_t mode), (path, mode), AT_FDCWD, const char *, mode_t)
ON_PATH(utimensat, "utime", (int at, const char *path, const struct timespec when[2], int flags), (at, path, when, flags), at, int, const char *, const struct timespec *, int)
/* The path is that of the new name. */
ON_PATH(rename, "rename", (const char *old, const char *path), (old, path), AT_FDCWD, const char *, const char *)
ON_PATH(renameat, "rename", (int from, const char *old, int to, const char *path), (from, old, to, path), to, int, const char *, int, const char *)
ON_PATH(renameat2, "rename", (int from, const char *old, int to, const char *path, unsigned flags), (from, old, to, path, flags), to, int, const char *, int, const char *, unsigned)
ON_PATH(link, "link", (const char *old, const char *path), (old, path), AT_FDCWD, const char *, const char *)
ON_PATH(linkat, "link", (int from, const char *old, int to, const char *path, int flags), (from, old, to, path, flags), to, int, const char *, int, const char *, int)
ON_PATH(symlink, "link", (const char *old, const char *path), (old, path), AT_FDCWD, const char *, const char *)
ON_PATH(symlinkat, "link", (const char *old, int to, const char *path), (old, to, path), to, const char *, int, const char *)

DIR *opendir(const char *path) {
    REAL(DIR *, "opendir", const char *);
    if (FAILS_PATH("list", AT_FDCWD, path)) return NULL;
    return real(path);
}

static long ahead(void) { return clock_ahead + (shared ? atomic_load(&shared->clock_jumped) : 0); }

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(int, "clock_gettime", clockid_t, struct timespec *);
    int failed = real(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    REAL(int, "gettimeofday", struct timeval *restrict, void *restrict);
    int failed = real(now, zone);
    if (!failed) now->tv_sec += ahead();
    return failed;
}

time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into) *into = now.tv_sec;
    return now.tv_sec;
}
