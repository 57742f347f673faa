/* A pool of threads that reads blocks and computes their checksums.
 *
 * The event loop submits parts and receives their ends through an eventfd, both in batches. So a block costs it a few
 * microseconds and no switch of the interpreter's lock. A run of neighbouring parts is one read.
 *
 * When reads end, the pool starts others before it verifies anything, so that the disk never waits for a checksum. A
 * long checksum is computed in pieces, with a poll of the disk between them. The queue bounds the reads at the disk.
 * One thread submits reads of direct-I/O files to io_uring (`disk_ring.c`), where the kernel has it. All other reads
 * are calls of the worker threads.
 */
#define _GNU_SOURCE
#include "disk_queue.h"
#include "disk_ring.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#define HELP_BYTES ((uint64_t)1 << 20)    /* unverified bytes that justify waking another thread */
#define AWAKE_BYTES ((uint64_t)4 << 20)   /* below so many requested bytes, the ring's thread spins */
#define AWAKE_FOR_DISK_NS 400000          /* for at most this time when it waits for the disk, */
#define AWAKE_NS 200000                   /* and for this time when it waits for requests */
#define PIECE_BYTES ((uint64_t)256 << 10) /* hashed between two polls of the disk */

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t more;
    queue queue;
    pthread_t *threads;
    int n_threads, n_idle, closing, signalled, event_fd;
    ring *ring;
    pthread_t ring_thread;
    int ring_state; /* 0 unknown, 1 in use, -1 refused */
    int ring_sleeps;
    hashes hash;
    void *hash_state; /* of the ring's thread */
} pool;

typedef void verifier(pool *, flight *);

static void verify(pool *pool, flight *flight) {
    for (int i = 0; i < flight->n; i++)
        if (!flight->results[i]) flight->results[i] = verified(&pool->hash, &flight->parts[i]);
}

static void read_run(flight *flight) {
    int64_t whole = move(flight->parts, flight->views, flight->n, flight->n_bytes);
    for (int i = 0; i < flight->n; i++) {
        /* If a run fails, each part is read again, to find the bad ones. */
        const part *one = &flight->parts[i];
        flight->results[i] = whole && flight->n > 1 ? move(one, &flight->views[i], 1, one->n_bytes) : whole;
    }
}

/* All following functions are called with the lock held, except the threads' own functions. */

static int is_for_ring(const pool *pool) {
    return pool->ring_state > 0 && pool->queue.waiting[pool->queue.head].flags & DIRECT;
}

/* Wakes a thread that could start a read now; only the ring's thread starts reads for the ring. */
static void wake(pool *pool) {
    int begins = queue_may_begin(&pool->queue);
    if (begins && is_for_ring(pool)) {
        if (pool->ring_sleeps) ring_wake(pool->ring);
        pool->ring_sleeps = 0;
    } else if (begins && pool->n_idle) {
        pthread_cond_signal(&pool->more);
    }
}

static void end(pool *pool, flight *flight) {
    queue_end(&pool->queue, flight);
    wake(pool);
    int signals = !pool->signalled;
    pool->signalled = 1;
    if (pool->closing) pthread_cond_broadcast(&pool->more);
    if (signals) {
        pthread_mutex_unlock(&pool->lock);
        signal_event(pool->event_fd);
        pthread_mutex_lock(&pool->lock);
    }
}

static int verify_landed(pool *pool, verifier *verify) {
    flight *flight = queue_pop_landed(&pool->queue);
    if (!flight) return 0;
    if (pool->queue.bytes_landed >= HELP_BYTES && pool->n_idle) pthread_cond_signal(&pool->more);
    pthread_mutex_unlock(&pool->lock);
    verify(pool, flight);
    pthread_mutex_lock(&pool->lock);
    end(pool, flight);
    return 1;
}

static int is_over(const pool *pool) {
    const queue *queue = &pool->queue;
    return pool->closing && !queue->n_waiting && !queue->n_at_disk && !queue->landed;
}

static void *work(void *argument) {
    pool *pool = argument;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        if (verify_landed(pool, verify)) continue;
        if (queue_may_begin(&pool->queue) && !is_for_ring(pool)) {
            flight *flight = queue_begin(&pool->queue);
            wake(pool);
            pthread_mutex_unlock(&pool->lock);
            read_run(flight);
            pthread_mutex_lock(&pool->lock);
            queue_left_disk(&pool->queue, flight);
            wake(pool); /* another thread reads while this one verifies */
            pthread_mutex_unlock(&pool->lock);
            verify(pool, flight);
            pthread_mutex_lock(&pool->lock);
            end(pool, flight);
            continue;
        }
        if (is_over(pool)) break;
        pool->n_idle++;
        pthread_cond_wait(&pool->more, &pool->lock);
        pool->n_idle--;
    }
    pthread_cond_broadcast(&pool->more);
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* Takes completed reads from the ring. A thread repeats a failed or short read, part by part. */
static int land(pool *pool) {
    uint64_t id;
    int64_t result;
    int n_ended = 0;
    for (; ring_next(pool->ring, &id, &result); n_ended++) {
        flight *flight = &pool->queue.flights[id];
        queue_left_disk(&pool->queue, flight);
        if (result == (int64_t)flight->n_bytes) {
            queue_add_landed(&pool->queue, flight);
        } else {
            queue_read_again(&pool->queue, flight);
            wake(pool);
        }
    }
    return n_ended;
}

/* Starts as many reads as the queue allows; `ring_wait` submits them to the kernel. */
static int begin(pool *pool) {
    int n_new = 0;
    for (; queue_may_begin(&pool->queue) && is_for_ring(pool); n_new++) {
        flight *flight = queue_begin(&pool->queue);
        const part *first = flight->parts;
        uint64_t id = (uint64_t)(flight - pool->queue.flights);
        ring_read(pool->ring, first->fd, flight->views, flight->n, first->offset, id);
    }
    if (n_new) wake(pool); /* reads for other threads may wait behind them */
    return n_new;
}

/* Called by the ring's thread without the lock, within a checksum. */
static void poll_disk(pool *pool) {
    if (!ring_has_completions(pool->ring)) return;
    ring_wait(pool->ring, 0);
    pthread_mutex_lock(&pool->lock);
    land(pool);
    int n_new = begin(pool);
    pthread_mutex_unlock(&pool->lock);
    if (n_new) ring_wait(pool->ring, 0);
}

static void verify_and_poll(pool *pool, flight *flight) {
    for (int i = 0; i < flight->n; i++) {
        const part *part = &flight->parts[i];
        if (i) poll_disk(pool);
        if (part->hash_bytes <= PIECE_BYTES) {
            flight->results[i] = verified(&pool->hash, part);
            continue;
        }
        pool->hash.reset(pool->hash_state, pool->hash.secret, pool->hash.secret_bytes);
        for (uint64_t done = 0, n; done < part->hash_bytes; done += n) {
            if (done) poll_disk(pool);
            n = part->hash_bytes - done < PIECE_BYTES ? part->hash_bytes - done : PIECE_BYTES;
            pool->hash.update(pool->hash_state, (const uint8_t *)(uintptr_t)part->address + done, n);
        }
        flight->results[i] = compared(pool->hash.digest(pool->hash_state), part);
    }
}

static int has_work(const pool *pool) {
    return pool->queue.landed || (queue_may_begin(&pool->queue) && is_for_ring(pool));
}

/* Waking a thread takes as long as a disk needs for a small block. So when few bytes are requested, and the last wait
 * of the kind was short, the thread spins and yields the processor. Returns 1 when there is work. */
static int spin(pool *pool, int64_t last_wait_ns, int64_t most_ns) {
    if (last_wait_ns > most_ns) return 0;
    for (int64_t end_ns = now_ns() + most_ns; now_ns() < end_ns; sched_yield()) {
        if (ring_has_completions(pool->ring)) return 1;
        pthread_mutex_lock(&pool->lock);
        int found = has_work(pool);
        pthread_mutex_unlock(&pool->lock);
        if (found) return 1;
    }
    return 0;
}

static void *work_the_ring(void *argument) {
    pool *pool = argument;
    int refused = ring_begin(pool->ring);
    pthread_mutex_lock(&pool->lock);
    pool->ring_state = refused ? -1 : 1;
    pthread_cond_broadcast(&pool->more);
    int64_t last_wait_ns[2] = {0, 0}; /* for requests, for the disk */
    while (!refused) {
        int n_new = begin(pool);
        if (!n_new && is_over(pool)) break;
        int waits = !pool->queue.landed, for_disk = pool->queue.n_at_disk > 0;
        int64_t since_ns = waits ? now_ns() : 0;
        if (waits && pool->queue.bytes_unended <= AWAKE_BYTES) {
            pthread_mutex_unlock(&pool->lock);
            if (n_new) ring_wait(pool->ring, 0);
            waits = !spin(pool, last_wait_ns[for_disk], for_disk ? AWAKE_FOR_DISK_NS : AWAKE_NS);
            pthread_mutex_lock(&pool->lock);
            if (waits && has_work(pool)) waits = 0;
        }
        pool->ring_sleeps = waits;
        pthread_mutex_unlock(&pool->lock);
        ring_wait(pool->ring, waits);
        pthread_mutex_lock(&pool->lock);
        pool->ring_sleeps = 0;
        if (since_ns) last_wait_ns[for_disk] = now_ns() - since_ns;
        if (!land(pool)) verify_landed(pool, verify_and_poll); /* else the disk first */
    }
    pthread_cond_broadcast(&pool->more);
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static void start_ring(pool *pool) {
    pool->ring_state = -1;
    pool->hash_state = pool->hash.create();
    if (!pool->hash_state) return;
    pool->ring = ring_open(MOST_AT_DISK);
    if (!pool->ring) return;
    pool->ring_state = 0;
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

void *kv_pool_open(int n_threads, int event_fd, const hashes *hash, int with_ring) {
    pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->more, NULL);
    queue_init(&pool->queue);
    pool->event_fd = event_fd;
    pool->hash = *hash;
    pool->ring_state = with_ring ? 0 : -1;
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
    if (with_ring) start_ring(pool);
    return pool;
}

/* Whether reads of files opened for direct I/O use io_uring. */
int kv_pool_has_ring(const pool *pool) { return pool->ring_state > 0; }

/* `n_unended`: all parts that the event loop still waits for, these included. Returns 0, and takes no part, when
 * there is no memory. */
int kv_pool_add(pool *pool, const part *parts, int n_parts, int n_unended) {
    int n_runs = 0;
    pthread_mutex_lock(&pool->lock);
    int taken = queue_make_room(&pool->queue, (size_t)n_unended);
    for (int i = 0; taken && i < n_parts; i++) {
        queue_add(&pool->queue, &parts[i]);
        n_runs += !(parts[i].flags & FOLLOWED);
    }
    int begins = queue_may_begin(&pool->queue), ring_begins = begins && is_for_ring(pool) && pool->ring_sleeps;
    int n_woken = !begins || is_for_ring(pool) ? 0 : n_runs < pool->n_idle ? n_runs : pool->n_idle;
    if (ring_begins) pool->ring_sleeps = 0;
    pthread_mutex_unlock(&pool->lock);
    /* Outside the lock, since a woken thread takes it at once. */
    if (ring_begins) ring_wake(pool->ring);
    while (n_woken-- > 0) pthread_cond_signal(&pool->more);
    return taken;
}

/* Returns at most `most` ends. The eventfd, which does not block, is written again only after all were taken. */
int kv_pool_poll(pool *pool, ended *taken, int most) {
    uint64_t n_signals; /* read before the ends, since a later end is signalled again */
    while (read(pool->event_fd, &n_signals, sizeof n_signals) < 0 && errno == EINTR) {
    }
    pthread_mutex_lock(&pool->lock);
    int n = queue_pop_ended(&pool->queue, taken, most);
    if (!pool->queue.n_done) pool->signalled = 0;
    pthread_mutex_unlock(&pool->lock);
    return n;
}

/* Ends all parts that no thread has started. */
void kv_pool_cancel(pool *pool) {
    pthread_mutex_lock(&pool->lock);
    queue_cancel(&pool->queue, -ECANCELED);
    pthread_mutex_unlock(&pool->lock);
}

/* Run time of the oldest read or checksum; 0 when parts only wait; -1 when the pool is idle. */
int64_t kv_pool_oldest_ns(pool *pool) {
    pthread_mutex_lock(&pool->lock);
    int64_t oldest = queue_oldest_ns(&pool->queue); /* the time is taken there, with the lock */
    pthread_mutex_unlock(&pool->lock);
    return oldest;
}

/* Finishes waiting parts, then ends the threads. Blocks as long as a call runs. */
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
    if (pool->hash_state) pool->hash.free(pool->hash_state);
    queue_free(&pool->queue);
    free(pool->threads);
    free(pool);
}
