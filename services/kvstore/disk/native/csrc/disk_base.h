/* Types and helpers that the reader and the writer share. */
#ifndef SLIPSTREAM_DISK_BASE_H
#define SLIPSTREAM_DISK_BASE_H

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    uint64_t low, high;
} hash128;
typedef hash128 (*hash_fn)(const void *, size_t);

/* xxhash's own functions: the checksum of a whole buffer, and the incremental form, both under a secret. */
typedef struct {
    hash128 (*whole)(const void *, size_t, const void *secret, size_t secret_bytes);
    void *(*create)(void);
    int (*free)(void *);
    int (*reset)(void *, const void *secret, size_t secret_bytes);
    int (*update)(void *, const void *, size_t);
    hash128 (*digest)(const void *);
    const void *secret;
    size_t secret_bytes;
} hashes;

typedef struct {
    uint64_t id;
    int64_t result; /* 0, or -errno and the like */
} ended;

static inline int64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

static inline void big_endian(hash128 sum, uint8_t out[16]) {
    for (int i = 7; i >= 0; i--, sum.high >>= 8, sum.low >>= 8) {
        out[i] = (uint8_t)sum.high;
        out[8 + i] = (uint8_t)sum.low;
    }
}

/* Wakes the poller of the eventfd. */
static inline void signal_event(int event_fd) {
    uint64_t one = 1;
    while (write(event_fd, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

#endif
