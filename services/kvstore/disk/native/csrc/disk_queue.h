/* Blocks to read, from their submission until their ends are taken: waiting, at the disk, landed, ended. All calls hold
 * the lock of the queue's pool. */
#ifndef SLIPSTREAM_DISK_QUEUE_H
#define SLIPSTREAM_DISK_QUEUE_H

#include "disk_part.h"

#define MAX_RUN_PARTS 64
#define MOST_AT_DISK 16 /* reads */
#define N_FLIGHTS (2 * MOST_AT_DISK)

/* A run of neighbours at the disk, landed, or being verified. */
typedef struct flight {
    part parts[MAX_RUN_PARTS];
    struct iovec views[MAX_RUN_PARTS];
    int64_t results[MAX_RUN_PARTS];
    int n;
    uint64_t n_bytes;
    int64_t since_ns; /* start of its read or its checksums; 0 while idle or landed */
    struct flight *next;
} flight;

typedef struct {
    part *waiting; /* a ring */
    size_t room, head, n_waiting;
    ended *done;
    size_t done_size, n_done;
    flight flights[N_FLIGHTS];
    flight *idle, *landed, *last_landed;
    int n_at_disk;
    uint64_t bytes_waiting, bytes_at_disk, bytes_landed, bytes_unended;
} queue;

void queue_init(queue *queue);
void queue_free(queue *queue);

/* Makes room for `n_unended` parts among the waiting and the ended ones; a part may wait twice. 0: no memory. */
int queue_make_room(queue *queue, size_t n_unended);

/* Appends a part; `queue_make_room` was called for it. */
void queue_add(queue *queue, const part *part);

/* Whether the disk should get another read now. */
int queue_may_begin(const queue *queue);

/* Moves the next run to the disk. */
flight *queue_begin(queue *queue);
void queue_left_disk(queue *queue, const flight *flight);

/* Adds a run that was read and must be verified. */
void queue_add_landed(queue *queue, flight *flight);
flight *queue_pop_landed(queue *queue); /* NULL when there is none */

/* Queues its parts again, singly, before all others, and not for io_uring. */
void queue_read_again(queue *queue, flight *flight);

/* Records its results as its parts' ends. */
void queue_end(queue *queue, flight *flight);

/* Ends all waiting parts. */
void queue_cancel(queue *queue, int64_t result);

/* Returns at most `most` ends. */
int queue_pop_ended(queue *queue, ended *taken, int most);

/* Run time of the oldest read or checksum; 0 when parts only wait; -1 when the queue is idle. */
int64_t queue_oldest_ns(const queue *queue);

#endif
