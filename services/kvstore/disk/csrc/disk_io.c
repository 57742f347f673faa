/* A pool of threads that reads blocks and takes the checksum of what was read.
 *
 * The event loop hands in parts and learns of their ends through an eventfd, both in batches, so that a block
 * costs it a few microseconds and no turn of the interpreter's lock. A run of neighbouring parts is one read.
 *
 * When reads end, others begin before anything is verified, so that the disk never waits for a checksum. That is why
 * only a part of what is asked for is at the disk when little is: what came with one turn is verified during the
 * next. Reads of files that are opened for direct I/O one thread hands to the kernel's ring (`disk_ring.c`), where
 * there is one; else each is a call of one of the threads.
 */
#define _GNU_SOURCE
#include "disk_part.h"
#include "disk_ring.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define MAX_RUN_PARTS 64
#define MOST_AT_DISK 8 /* reads */
#define FEW_BYTES ((uint64_t)2 << 20)  /* at the disk: as many as any disk is busy with while an interrupt is served */
#define MANY_BYTES ((uint64_t)8 << 20)
#define HELP_BYTES ((uint64_t)1 << 20) /* so much to verify is worth waking another thread */
#define N_FLIGHTS (2 * MOST_AT_DISK)

/* A run on its way: at the disk, landed, or being verified. */
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
    pthread_mutex_t lock;
    pthread_cond_t more;
    part *waiting; /* a ring */
    size_t room, head, n_waiting;
    ended *done;
    size_t done_size, n_done;
    flight flights[N_FLIGHTS];
    flight *idle, *landed, *last_landed;
    int n_at_disk;
    uint64_t bytes_at_disk, bytes_landed, bytes_unended;
    pthread_t *threads;
    int n_threads, n_resting, closing, told, event_fd;
    ring *ring;
    pthread_t ring_thread;
    int ring_state; /* 0 not known yet, 1 in use, -1 refused */
    int ring_sleeps;
    hash_fn hash;
} pool;

static void verify(const pool *pool, flight *flight) {
    for (int i = 0; i < flight->n; i++)
        if (!flight->results[i]) flight->results[i] = verified(pool->hash, &flight->parts[i]);
}

static void read_run(flight *flight) {
    int64_t whole = move(flight->parts, flight->views, flight->n, flight->n_bytes);
    for (int i = 0; i < flight->n; i++) {
        /* When a run fails, which of them is it? */
        const part *one = &flight->parts[i];
        flight->results[i] = whole && flight->n > 1 ? move(one, &flight->views[i], 1, one->n_bytes) : whole;
    }
}

/* All that follows is called with the lock held, but for the threads' own functions. */

static uint64_t next_run_bytes(const pool *pool) {
    uint64_t n_bytes = 0;
    for (size_t i = 0; i < pool->n_waiting && i < MAX_RUN_PARTS; i++) {
        const part *part = &pool->waiting[(pool->head + i) % pool->room];
        n_bytes += part->n_bytes;
        if (!(part->flags & FOLLOWED)) break;
    }
    return n_bytes;
}

static int may_begin(const pool *pool) {
    if (!pool->n_waiting || !pool->idle || pool->n_at_disk >= MOST_AT_DISK) return 0;
    uint64_t most = pool->bytes_unended / 2;
    most = most < FEW_BYTES ? FEW_BYTES : most > MANY_BYTES ? MANY_BYTES : most;
    return !pool->n_at_disk || pool->bytes_at_disk + next_run_bytes(pool) <= most;
}

static int is_for_ring(const pool *pool) {
    return pool->ring_state > 0 && pool->waiting[pool->head].flags & DIRECT;
}

static flight *begin(pool *pool) {
    flight *flight = pool->idle;
    pool->idle = flight->next;
    flight->n = 0;
    flight->n_bytes = 0;
    uint32_t flags;
    do {
        part *part = &flight->parts[flight->n];
        *part = pool->waiting[pool->head];
        pool->head = (pool->head + 1) % pool->room;
        pool->n_waiting--;
        flags = part->flags;
        flight->views[flight->n] = (struct iovec){(void *)(uintptr_t)part->address, part->n_bytes};
        flight->results[flight->n++] = 0;
        flight->n_bytes += part->n_bytes;
    } while (flags & FOLLOWED && flight->n < MAX_RUN_PARTS && pool->n_waiting);
    flight->since_ns = now_ns();
    pool->n_at_disk++;
    pool->bytes_at_disk += flight->n_bytes;
    return flight;
}

static void left_disk(pool *pool, const flight *flight) {
    pool->n_at_disk--;
    pool->bytes_at_disk -= flight->n_bytes;
}

static void give_back(pool *pool, flight *flight) {
    flight->since_ns = 0;
    flight->next = pool->idle;
    pool->idle = flight;
}

/* What a thread could do now; the ring's thread is woken for what is its own. */
static void wake(pool *pool) {
    int begins = may_begin(pool);
    if (begins && is_for_ring(pool)) {
        if (pool->ring_sleeps) ring_wake(pool->ring);
        pool->ring_sleeps = 0;
    } else if (begins && pool->n_resting) {
        pthread_cond_signal(&pool->more);
    }
}

static void end(pool *pool, flight *flight) {
    for (int i = 0; i < flight->n; i++) /* room was made when they were added */
        pool->done[pool->n_done++] = (ended){flight->parts[i].id, flight->results[i]};
    pool->bytes_unended -= flight->n_bytes;
    give_back(pool, flight);
    wake(pool);
    int tells = !pool->told;
    pool->told = 1;
    if (pool->closing) pthread_cond_broadcast(&pool->more);
    if (tells) {
        pthread_mutex_unlock(&pool->lock);
        tell(pool->event_fd);
        pthread_mutex_lock(&pool->lock);
    }
}

static int verify_landed(pool *pool) {
    flight *flight = pool->landed;
    if (!flight) return 0;
    pool->landed = flight->next;
    pool->bytes_landed -= flight->n_bytes;
    flight->since_ns = now_ns();
    if (pool->bytes_landed >= HELP_BYTES && pool->n_resting) pthread_cond_signal(&pool->more);
    pthread_mutex_unlock(&pool->lock);
    verify(pool, flight);
    pthread_mutex_lock(&pool->lock);
    end(pool, flight);
    return 1;
}

static int is_over(const pool *pool) {
    return pool->closing && !pool->n_waiting && !pool->n_at_disk && !pool->landed;
}

static void *work(void *argument) {
    pool *pool = argument;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        if (verify_landed(pool)) continue;
        if (may_begin(pool) && !is_for_ring(pool)) {
            flight *flight = begin(pool);
            wake(pool);
            pthread_mutex_unlock(&pool->lock);
            read_run(flight);
            pthread_mutex_lock(&pool->lock);
            left_disk(pool, flight);
            wake(pool); /* somebody else reads while this thread verifies */
            pthread_mutex_unlock(&pool->lock);
            verify(pool, flight);
            pthread_mutex_lock(&pool->lock);
            end(pool, flight);
            continue;
        }
        if (is_over(pool)) break;
        pool->n_resting++;
        pthread_cond_wait(&pool->more, &pool->lock);
        pool->n_resting--;
    }
    pthread_cond_broadcast(&pool->more);
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* A read by the ring has ended. One that failed or came short is read again by a thread, part by part. */
static void land(pool *pool, flight *flight, int64_t result) {
    left_disk(pool, flight);
    flight->since_ns = 0;
    if (result == (int64_t)flight->n_bytes) {
        flight->next = NULL;
        if (pool->landed)
            pool->last_landed->next = flight;
        else
            pool->landed = flight;
        pool->last_landed = flight;
        pool->bytes_landed += flight->n_bytes;
        return;
    }
    for (int i = flight->n - 1; i >= 0; i--) { /* there is room for all that has not ended */
        pool->head = (pool->head + pool->room - 1) % pool->room;
        pool->waiting[pool->head] = flight->parts[i];
        pool->waiting[pool->head].flags = 0;
        pool->n_waiting++;
    }
    give_back(pool, flight);
    wake(pool);
}

static void *work_the_ring(void *argument) {
    pool *pool = argument;
    ring *ring = pool->ring;
    int refused = ring_begin(ring);
    pthread_mutex_lock(&pool->lock);
    pool->ring_state = refused ? -1 : 1;
    pthread_cond_broadcast(&pool->more);
    while (!refused) {
        int n_new = 0;
        for (; may_begin(pool) && is_for_ring(pool); n_new++) {
            flight *flight = begin(pool);
            const part *first = flight->parts;
            ring_read(ring, first->fd, flight->views, flight->n, first->offset, (uint64_t)(flight - pool->flights));
        }
        if (!n_new && is_over(pool)) break;
        pool->ring_sleeps = !pool->landed;
        int sleeps = pool->ring_sleeps;
        pthread_mutex_unlock(&pool->lock);
        ring_wait(ring, sleeps);
        pthread_mutex_lock(&pool->lock);
        pool->ring_sleeps = 0;
        uint64_t id;
        int64_t result;
        int n_ended = 0;
        for (; ring_next(ring, &id, &result); n_ended++) land(pool, &pool->flights[id], result);
        if (!n_ended) verify_landed(pool); /* else the disk first */
    }
    pthread_cond_broadcast(&pool->more);
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static void start_ring(pool *pool) {
    pool->ring = ring_open(MOST_AT_DISK);
    if (!pool->ring) {
        pool->ring_state = -1;
        return;
    }
    if (pthread_create(&pool->ring_thread, NULL, work_the_ring, pool)) {
        pool->ring_state = -1;
    } else {
        pthread_mutex_lock(&pool->lock);
        while (!pool->ring_state) pthread_cond_wait(&pool->more, &pool->lock);
        pthread_mutex_unlock(&pool->lock);
        if (pool->ring_state < 0) pthread_join(pool->ring_thread, NULL);
    }
    if (pool->ring_state < 0) ring_close(pool->ring);
}

void *kv_pool_open(int n_threads, int event_fd, hash_fn hash, int with_ring) {
    pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->more, NULL);
    pool->event_fd = event_fd;
    pool->hash = hash;
    for (int i = 0; i < N_FLIGHTS; i++) give_back(pool, &pool->flights[i]);
    pool->threads = calloc((size_t)n_threads, sizeof *pool->threads);
    for (int i = 0; pool->threads && i < n_threads; i++) {
        if (pthread_create(&pool->threads[i], NULL, work, pool)) break;
        pool->n_threads++;
    }
    if (!pool->n_threads) {
        free(pool->threads);
        free(pool);
        return NULL;
    }
    if (with_ring)
        start_ring(pool);
    else
        pool->ring_state = -1;
    return pool;
}

/* Whether reads of files opened for direct I/O go through the kernel's ring. */
int kv_pool_has_ring(const pool *pool) { return pool->ring_state > 0; }

/* Room for so many more among what waits and among the ends; what has not ended may wait again. */
static int make_room(pool *pool, size_t n_unended) {
    if (n_unended > pool->room) {
        size_t size = n_unended * 2;
        part *waiting = malloc(size * sizeof *waiting);
        if (!waiting) return 0;
        for (size_t i = 0; i < pool->n_waiting; i++)
            waiting[i] = pool->waiting[(pool->head + i) % pool->room];
        free(pool->waiting);
        pool->waiting = waiting;
        pool->room = size;
        pool->head = 0;
    }
    if (n_unended > pool->done_size) {
        ended *done = realloc(pool->done, n_unended * 2 * sizeof *done);
        if (!done) return 0;
        pool->done = done;
        pool->done_size = n_unended * 2;
    }
    return 1;
}

/* `n_unended`: parts whose end the event loop will learn, these included. 0 when there is no memory; then none
 * was taken. */
int kv_pool_add(pool *pool, const part *parts, int n_parts, int n_unended) {
    int n_runs = 0;
    pthread_mutex_lock(&pool->lock);
    int taken = make_room(pool, (size_t)n_unended);
    for (int i = 0; taken && i < n_parts; i++) {
        pool->waiting[(pool->head + pool->n_waiting++) % pool->room] = parts[i];
        pool->bytes_unended += parts[i].n_bytes;
        n_runs += !(parts[i].flags & FOLLOWED);
    }
    int begins = may_begin(pool), ring_begins = begins && is_for_ring(pool) && pool->ring_sleeps;
    int n_woken = !begins || is_for_ring(pool) ? 0 : n_runs < pool->n_resting ? n_runs : pool->n_resting;
    if (ring_begins) pool->ring_sleeps = 0;
    pthread_mutex_unlock(&pool->lock);
    /* Without the lock, or who is woken would at once wait for it. */
    if (ring_begins) ring_wake(pool->ring);
    while (n_woken-- > 0) pthread_cond_signal(&pool->more);
    return taken;
}

/* At most so many ends; the eventfd, which does not block, is written again only after all were taken. */
int kv_pool_take(pool *pool, ended *taken, int most) {
    uint64_t n_told; /* read before the ends are: one that comes later is told again */
    while (read(pool->event_fd, &n_told, sizeof n_told) < 0 && errno == EINTR) {
    }
    pthread_mutex_lock(&pool->lock);
    size_t n = pool->n_done < (size_t)most ? pool->n_done : (size_t)most;
    memcpy(taken, pool->done, n * sizeof *taken);
    pool->n_done -= n;
    memmove(pool->done, pool->done + n, pool->n_done * sizeof *taken);
    if (!pool->n_done) pool->told = 0;
    pthread_mutex_unlock(&pool->lock);
    return (int)n;
}

/* End all that no thread has begun. */
void kv_pool_give_up(pool *pool) {
    pthread_mutex_lock(&pool->lock);
    while (pool->n_waiting) {
        const part *part = &pool->waiting[pool->head];
        pool->done[pool->n_done++] = (ended){part->id, -ECANCELED};
        pool->bytes_unended -= part->n_bytes;
        pool->head = (pool->head + 1) % pool->room;
        pool->n_waiting--;
    }
    pthread_mutex_unlock(&pool->lock);
}

/* For how long the oldest running read or checksum runs; 0 when only some wait; -1 when there is nothing to do. */
int64_t kv_pool_oldest_ns(pool *pool) {
    int64_t oldest = 0;
    pthread_mutex_lock(&pool->lock);
    int64_t now = now_ns(); /* not before: a call may begin while this waits for the lock */
    for (const flight *flight = pool->flights; flight < pool->flights + N_FLIGHTS; flight++)
        if (flight->since_ns && (!oldest || flight->since_ns < oldest)) oldest = flight->since_ns;
    int some_wait = pool->n_waiting || pool->landed;
    pthread_mutex_unlock(&pool->lock);
    return oldest ? now - oldest : some_wait ? 0 : -1;
}

/* Does what waits, then ends the threads. Blocks as long as a call runs. */
void kv_pool_close(pool *pool) {
    pthread_mutex_lock(&pool->lock);
    pool->closing = 1;
    pthread_cond_broadcast(&pool->more);
    if (pool->ring_state > 0) ring_wake(pool->ring);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->n_threads; i++) pthread_join(pool->threads[i], NULL);
    if (pool->ring_state > 0) {
        ring_wake(pool->ring);
        pthread_join(pool->ring_thread, NULL);
        ring_close(pool->ring);
    }
    free(pool->waiting);
    free(pool->done);
    free(pool->threads);
    free(pool);
}
