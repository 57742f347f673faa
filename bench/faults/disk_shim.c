/* A disk that fails on demand under one process: LD_PRELOAD=disk_shim.so DISK_SHIM_FILE=FILE DISK_SHIM_PREFIX=DIR.

   FILE holds a `control`, mapped and shared, so that a change is seen at once and calls are counted. Only calls
   on paths below DIR, and on descriptors opened there, are touched. A call that hangs goes on when its fault is
   lifted, as one that a disk answers late. Reads that the kernel does by itself would go past it, so the process
   finds no io_uring, as where a sandbox forbids it. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OPEN, READ, WRITE, SYNC, META, KINDS };
#define HANGS (-1)
#define MAX_FDS 65536

typedef struct {
  _Atomic int32_t fault;   /* 0 none, HANGS, or the errno to fail with */
  _Atomic int32_t delay_us; /* each call takes so much longer */
  _Atomic int32_t waiting; /* calls that hang now */
  _Atomic int32_t bitten;  /* calls that hung or failed */
} kind;

static kind *kinds; /* of KINDS */
static char prefix[4096];
static size_t prefix_bytes;
static _Atomic unsigned char ours[MAX_FDS];

__attribute__((constructor)) static void map_control(void) {
  const char *path = getenv("DISK_SHIM_FILE"), *below = getenv("DISK_SHIM_PREFIX");
  if (!path || !below || strlen(below) >= sizeof prefix) return;
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return;
  void *mapped = mmap(NULL, KINDS * sizeof(kind), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (mapped == MAP_FAILED) return;
  strcpy(prefix, below);
  prefix_bytes = strlen(prefix);
  kinds = mapped;
}

static int below(const char *path) { return kinds && path && !strncmp(path, prefix, prefix_bytes); }

static int watched(int fd) { return kinds && fd >= 0 && fd < MAX_FDS && ours[fd]; }

static void pause_us(long us) {
  struct timespec time = {us / 1000000, us % 1000000 * 1000};
  nanosleep(&time, NULL);
}

/* 0 to go on, else the errno to fail with. */
static int struck(int what) {
  kind *now = &kinds[what];
  int delay_us = now->delay_us, fault = now->fault;
  if (delay_us) pause_us(delay_us);
  if (!fault) return 0;
  now->bitten++;
  if (fault != HANGS) return fault;
  now->waiting++;
  while (now->fault == HANGS) pause_us(2000);
  now->waiting--;
  return 0;
}

#define NEXT(name) \
  static __typeof__(&name) next; \
  if (!next) next = (__typeof__(next))dlsym(RTLD_NEXT, #name)
#define FAIL_IF(condition, what, failed) \
  do { \
    int error = condition ? struck(what) : 0; \
    if (error) { \
      errno = error; \
      return failed; \
    } \
  } while (0)

static int opened(int fd, int is_ours) {
  if (fd >= 0 && fd < MAX_FDS) ours[fd] = (unsigned char)is_ours;
  return fd;
}

#define OPENS(name) \
  int name(const char *path, int flags, ...) { \
    NEXT(name); \
    va_list args; \
    va_start(args, flags); \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(args, mode_t) : 0; \
    va_end(args); \
    int is_ours = below(path); \
    FAIL_IF(is_ours, OPEN, -1); \
    return opened(next(path, flags, mode), is_ours); \
  }
#define OPENS_AT(name) \
  int name(int folder, const char *path, int flags, ...) { \
    NEXT(name); \
    va_list args; \
    va_start(args, flags); \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(args, mode_t) : 0; \
    va_end(args); \
    int is_ours = below(path); \
    FAIL_IF(is_ours, OPEN, -1); \
    return opened(next(folder, path, flags, mode), is_ours); \
  }
OPENS(open)
OPENS(open64)
OPENS_AT(openat)
OPENS_AT(openat64)

int close(int fd) {
  NEXT(close);
  if (fd >= 0 && fd < MAX_FDS) ours[fd] = 0;
  return next(fd);
}

#define ON_FD(type, name, what, parameters, ...) \
  type name parameters { \
    NEXT(name); \
    FAIL_IF(watched(fd), what, -1); \
    return next(__VA_ARGS__); \
  }
ON_FD(ssize_t, pread, READ, (int fd, void *to, size_t n, off_t at), fd, to, n, at)
ON_FD(ssize_t, pread64, READ, (int fd, void *to, size_t n, off64_t at), fd, to, n, at)
ON_FD(ssize_t, preadv, READ, (int fd, const struct iovec *to, int n, off_t at), fd, to, n, at)
ON_FD(ssize_t, preadv64, READ, (int fd, const struct iovec *to, int n, off64_t at), fd, to, n, at)
ON_FD(ssize_t, pwrite, WRITE, (int fd, const void *from, size_t n, off_t at), fd, from, n, at)
ON_FD(ssize_t, pwrite64, WRITE, (int fd, const void *from, size_t n, off64_t at), fd, from, n, at)
ON_FD(ssize_t, pwritev, WRITE, (int fd, const struct iovec *from, int n, off_t at), fd, from, n, at)
ON_FD(ssize_t, pwritev64, WRITE, (int fd, const struct iovec *from, int n, off64_t at), fd, from, n, at)
ON_FD(ssize_t, preadv2, READ, (int fd, const struct iovec *to, int n, off_t at, int how), fd, to, n, at, how)
ON_FD(ssize_t, preadv64v2, READ, (int fd, const struct iovec *to, int n, off64_t at, int how), fd, to, n, at, how)
ON_FD(ssize_t, pwritev2, WRITE, (int fd, const struct iovec *from, int n, off_t at, int how), fd, from, n, at, how)
ON_FD(ssize_t, pwritev64v2, WRITE, (int fd, const struct iovec *from, int n, off64_t at, int how), fd, from, n, at,
      how)
ON_FD(int, fsync, SYNC, (int fd), fd)
ON_FD(int, fdatasync, SYNC, (int fd), fd)

/* These return the error. */
#define ALLOCATES(name, offset_t) \
  int name(int fd, offset_t at, offset_t n) { \
    NEXT(name); \
    int error = watched(fd) ? struck(WRITE) : 0; \
    return error ? error : next(fd, at, n); \
  }
ALLOCATES(posix_fallocate, off_t)
ALLOCATES(posix_fallocate64, off64_t)

#define ON_PATH(type, name, failed, parameters, ...) \
  type name parameters { \
    NEXT(name); \
    FAIL_IF(below(path), META, failed); \
    return next(__VA_ARGS__); \
  }
ON_PATH(int, mkdir, -1, (const char *path, mode_t mode), path, mode)
ON_PATH(int, unlink, -1, (const char *path), path)
ON_PATH(int, stat, -1, (const char *restrict path, struct stat *restrict to), path, to)
ON_PATH(int, stat64, -1, (const char *restrict path, struct stat64 *restrict to), path, to)
ON_PATH(int, lstat, -1, (const char *restrict path, struct stat *restrict to), path, to)
ON_PATH(int, lstat64, -1, (const char *restrict path, struct stat64 *restrict to), path, to)
ON_PATH(DIR *, opendir, NULL, (const char *path), path)
struct statvfs;
struct statvfs64;
int statvfs(const char *restrict, struct statvfs *restrict);
int statvfs64(const char *restrict, struct statvfs64 *restrict);
ON_PATH(int, statvfs, -1, (const char *restrict path, struct statvfs *restrict to), path, to)
ON_PATH(int, statvfs64, -1, (const char *restrict path, struct statvfs64 *restrict to), path, to)

long syscall(long number, ...) {
  NEXT(syscall);
  long arguments[6];
  va_list args;
  va_start(args, number);
  for (int i = 0; i < 6; i++) arguments[i] = va_arg(args, long);
  va_end(args);
#ifdef SYS_io_uring_setup
  if (kinds && number == SYS_io_uring_setup) {
    errno = ENOSYS;
    return -1;
  }
#endif
  return next(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5]);
}
