/* A wall clock that can be set under a running process: LD_PRELOAD=clock_shim.so CLOCK_SHIM_FILE=FILE.

   The file holds one int64, nanoseconds to add to CLOCK_REALTIME; it is mapped, so that a change is seen by
   every process at once. Monotonic clocks are not touched. Waits until a wall-clock time, which the kernel
   would judge by its own clock, are converted when they begin. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define NS 1000000000LL
/* Times after 1985 are wall-clock times; monotonic ones count from the machine's start. */
#define WALL_S 500000000LL

static volatile int64_t *offset_file;

static int64_t offset_ns(void) { return offset_file ? *offset_file : 0; }

__attribute__((constructor)) static void map_offset(void) {
  const char *path = getenv("CLOCK_SHIM_FILE");
  int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (fd < 0) return;
  void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
  close(fd);
  if (mapped != MAP_FAILED) offset_file = mapped;
}

static void shift(struct timespec *ts, int64_t by_ns) {
  int64_t total = (int64_t)ts->tv_sec * NS + ts->tv_nsec + by_ns;
  if (total < 0) total = 0;
  ts->tv_sec = total / NS;
  ts->tv_nsec = total % NS;
}

static const struct timespec *kernels(const struct timespec *until, struct timespec *copy) {
  if (!until || until->tv_sec < WALL_S) return until;
  *copy = *until;
  shift(copy, -offset_ns());
  return copy;
}

/* The next definition of a function behind this one; `version` where the C library has several of it. */
static void *following(const char *name, const char *version) {
  void *found = NULL;
#ifdef __GLIBC__
  if (version) found = dlvsym(RTLD_NEXT, name, version);
#endif
  return found ? found : dlsym(RTLD_NEXT, name);
}

#define NEXT(name, version) \
  static __typeof__(&name) next; \
  if (!next) next = (__typeof__(next))following(#name, version)

int clock_gettime(clockid_t id, struct timespec *ts) {
  NEXT(clock_gettime, NULL);
  int failed = next(id, ts);
  if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) shift(ts, offset_ns());
  return failed;
}

int gettimeofday(struct timeval *restrict tv, void *restrict zone) {
  (void)zone;
  struct timespec ts;
  int failed = clock_gettime(CLOCK_REALTIME, &ts);
  if (!failed) {
    tv->tv_sec = ts.tv_sec;
    tv->tv_usec = ts.tv_nsec / 1000;
  }
  return failed;
}

time_t time(time_t *out) {
  struct timespec ts;
  clock_gettime(CLOCK_REALTIME, &ts);
  if (out) *out = ts.tv_sec;
  return ts.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *restrict c, pthread_mutex_t *restrict m,
                           const struct timespec *restrict until) {
  NEXT(pthread_cond_timedwait, "GLIBC_2.3.2"); /* on x86 there is an older one with another layout */
  struct timespec copy;
  return next(c, m, kernels(until, &copy));
}

int sem_timedwait(sem_t *restrict s, const struct timespec *restrict until) {
  NEXT(sem_timedwait, NULL);
  struct timespec copy;
  return next(s, kernels(until, &copy));
}

long syscall(long n, ...) {
  NEXT(syscall, NULL);
  va_list args;
  va_start(args, n);
  long a = va_arg(args, long), b = va_arg(args, long), c = va_arg(args, long);
  long d = va_arg(args, long), e = va_arg(args, long), f = va_arg(args, long);
  va_end(args);
  struct timespec copy;
  if (n == SYS_futex && (b & FUTEX_CLOCK_REALTIME)) d = (long)kernels((const struct timespec *)d, &copy);
  return next(n, a, b, c, d, e, f);
}
