/* Blocks to read, from when they are asked for until their ends are taken: they wait, are at the disk, have landed,
 * have ended. Of one pool, whose lock is held in all calls. */
#ifndef SLIPSTREAM_DISK_QUEUE_H
#define SLIPSTREAM_DISK_QUEUE_H

#include "disk_part.h"

#define MAX_RUN_PARTS 64
#define MOST_AT_DISK 16 /* reads */
#define N_FLIGHTS (2 * MOST_AT_DISK)

/* A run of neighbours on its way: at the disk, landed, or being verified. */
typedef struct flight {
    part parts[MAX_RUN_PARTS];
    struct iovec views[MAX_RUN_PARTS];
    int64_t results[MAX_RUN_PARTS];
    int n;
    uint64_t n_bytes;
    int64_t since_ns; /* of its read or its checksums; 0 while nobody is at it */
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

/* Room for so many more among what waits and among the ends; what has not ended may wait again. 0: no memory. */
int queue_make_room(queue *queue, size_t n_unended);

/* There is room for it. */
void queue_add(queue *queue, const part *part);

/* Whether another read should be handed to the disk now. */
int queue_may_begin(const queue *queue);

/* The next run; it is at the disk from here on. */
flight *queue_begin(queue *queue);
void queue_left_disk(queue *queue, const flight *flight);

/* It was read and is to be verified. */
void queue_put_landed(queue *queue, flight *flight);
flight *queue_take_landed(queue *queue); /* NULL when there is none */

/* Its parts wait once more, for themselves, before all others, and not for the kernel's ring. */
void queue_read_again(queue *queue, flight *flight);

/* Its results are its parts' ends. */
void queue_end(queue *queue, flight *flight);

/* All that waits ends. */
void queue_give_up(queue *queue, int64_t result);

/* At most so many ends. */
int queue_take(queue *queue, ended *taken, int most);

/* For how long the oldest running read or checksum runs; 0 when only some wait; -1 when there is nothing to do. */
int64_t queue_oldest_ns(const queue *queue);

#endif
