/* Reads that the kernel does without a thread of ours for each: io_uring, by its system calls alone. For one thread;
 * only `ring_wake` is for others. Where the kernel, or what confines the process, refuses it there is none. */
#ifndef SLIPSTREAM_DISK_RING_H
#define SLIPSTREAM_DISK_RING_H

#include <stdint.h>
#include <sys/uio.h>

typedef struct ring ring;

/* NULL when there is no io_uring here. It is used by the thread that calls `ring_begin`. */
ring *ring_open(unsigned most_reads);
void ring_close(ring *ring);

/* 0 when the calling thread may use it. */
int ring_begin(ring *ring);

/* A read that `ring_wait` hands to the kernel; at most `most_reads` at a time. `views` stay until it has ended. */
void ring_read(ring *ring, int fd, const struct iovec *views, int n_views, int64_t offset, uint64_t id);

/* Hand in what was asked for. With `until_something` returns when a read ended or `ring_wake` was called. */
void ring_wait(ring *ring, int until_something);

/* The next read that has ended, 0 when there is none: its id, and bytes read or -errno. */
int ring_next(ring *ring, uint64_t *id, int64_t *result);

/* Whether `ring_wait` would find an end, without asking the kernel. */
int ring_has_news(const ring *ring);

void ring_wake(ring *ring);

#endif
