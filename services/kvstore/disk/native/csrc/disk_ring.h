/* Reads by io_uring, through its system calls alone, without a thread for each read. Single-threaded; other threads may
 * only call `ring_wake`. `ring_open` fails where the kernel or a sandbox refuses io_uring. */
#ifndef SLIPSTREAM_DISK_RING_H
#define SLIPSTREAM_DISK_RING_H

#include <stdint.h>
#include <sys/uio.h>

typedef struct ring ring;

/* NULL when io_uring is not available. The thread that calls `ring_begin` uses the ring. */
ring *ring_open(unsigned most_reads);
void ring_close(ring *ring);

/* Returns 0 when the calling thread may use the ring. */
int ring_begin(ring *ring);

/* Adds a read that `ring_wait` submits; at most `most_reads` at a time. `views` must live until its end. */
void ring_read(ring *ring, int fd, const struct iovec *views, int n_views, int64_t offset, uint64_t id);

/* Submits the added reads. With `until_event`, returns when a read ended or `ring_wake` was called. */
void ring_wait(ring *ring, int until_event);

/* Returns 1 with the id and the result (bytes read or -errno) of the next completed read, 0 when there is none. */
int ring_next(ring *ring, uint64_t *id, int64_t *result);

/* Whether `ring_wait` would find a completion, without a system call. */
int ring_has_completions(const ring *ring);

void ring_wake(ring *ring);

#endif
