/* A pool of threads that read and write blocks: pread or pwrite, and the checksum of what was read.
 *
 * The event loop hands in parts and learns of their ends through an eventfd, both in batches, so that a block
 * costs it a few microseconds and no turn of the interpreter's lock. A run of neighbouring parts is one call.
 * Calls that wait for their end (`kv_pool_run`) are made by threads of the interpreter, which let go of it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MAX_RUN_PARTS 64
#define FOLLOWED 1u /* the next part is its neighbour and goes with it */
#define WRITES 2u
#define MISMATCH 1

typedef struct {
    uint64_t low, high;
} hash128;
typedef hash128 (*hash_fn)(const void *, size_t);

typedef struct {
    uint64_t id;
    int32_t fd;
    uint32_t flags;
    int64_t offset;
    uint64_t n_bytes; /* of the slot */
    uint64_t address;
    uint64_t hash_bytes;  /* of these the checksum is taken */
    uint8_t expected[16]; /* xxh3-128, big-endian */
} part;

typedef struct {
    uint64_t id;
    int64_t result; /* 0, MISMATCH, or -errno */
} ended;

typedef struct {
    ended *results;
    int left;
    pthread_cond_t done;
} waiter;

typedef struct {
    part part;
    waiter *waiter; /* NULL: the end goes to the event loop */
} task;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t more;
    task *ring;
    size_t ring_size, head, n_waiting;
    ended *done;
    size_t done_size, n_done;
    int64_t *since_ns; /* of each thread, 0 while it rests */
    pthread_t *threads;
    int n_threads, n_resting, closing, told, event_fd;
    hash_fn hash;
} pool;

typedef struct {
    pool *pool;
    int number;
} start;

static int64_t now_ns(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (int64_t)at.tv_sec * 1000000000 + at.tv_nsec;
}

static int64_t move(const part *first, int n_parts) {
    struct iovec views[MAX_RUN_PARTS];
    int64_t expected = 0;
    for (int i = 0; i < n_parts; i++) {
        views[i].iov_base = (void *)(uintptr_t)first[i].address;
        views[i].iov_len = first[i].n_bytes;
        expected += (int64_t)first[i].n_bytes;
    }
    ssize_t moved;
    do
        moved = first->flags & WRITES ? pwritev(first->fd, views, n_parts, first->offset)
                                      : preadv(first->fd, views, n_parts, first->offset);
    while (moved < 0 && errno == EINTR);
    if (moved < 0) return -errno;
    return moved == expected ? 0 : -EIO;
}

static void big_endian(uint64_t value, uint8_t *out) {
    for (int i = 7; i >= 0; i--, value >>= 8) out[i] = (uint8_t)value;
}

static int64_t verified(const pool *pool, const part *read) {
    uint8_t found[16];
    hash128 sum = pool->hash((const void *)(uintptr_t)read->address, read->hash_bytes);
    big_endian(sum.high, found);
    big_endian(sum.low, found + 8);
    return memcmp(found, read->expected, 16) ? MISMATCH : 0;
}

static void run(const pool *pool, const part *parts, int n_parts, int64_t *results) {
    int64_t whole = move(parts, n_parts);
    for (int i = 0; i < n_parts; i++) {
        /* When a run fails, which of them is it? */
        int64_t result = whole && n_parts > 1 ? move(&parts[i], 1) : whole;
        results[i] = result || parts[i].flags & WRITES ? result : verified(pool, &parts[i]);
    }
}

/* With the lock held. */
static void end(pool *pool, const task *task, int64_t result) {
    if (task->waiter) {
        task->waiter->results[task->part.id] = (ended){task->part.id, result};
        if (!--task->waiter->left) pthread_cond_signal(&task->waiter->done);
    } else {
        pool->done[pool->n_done++] = (ended){task->part.id, result}; /* room was made when it was added */
    }
}

static void *work(void *argument) {
    start *own = argument;
    pool *pool = own->pool;
    int number = own->number;
    free(own);
    task tasks[MAX_RUN_PARTS];
    part parts[MAX_RUN_PARTS];
    int64_t results[MAX_RUN_PARTS];
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->n_waiting && !pool->closing) {
            pool->n_resting++;
            pthread_cond_wait(&pool->more, &pool->lock);
            pool->n_resting--;
        }
        if (!pool->n_waiting) break;
        int n_parts = 0;
        do {
            tasks[n_parts] = pool->ring[pool->head];
            parts[n_parts] = tasks[n_parts].part;
            pool->head = (pool->head + 1) % pool->ring_size;
            pool->n_waiting--;
        } while (parts[n_parts++].flags & FOLLOWED && n_parts < MAX_RUN_PARTS && pool->n_waiting);
        pool->since_ns[number] = now_ns();
        pthread_mutex_unlock(&pool->lock);
        run(pool, parts, n_parts, results);
        pthread_mutex_lock(&pool->lock);
        pool->since_ns[number] = 0;
        for (int i = 0; i < n_parts; i++) end(pool, &tasks[i], results[i]);
        int tell = pool->n_done && !pool->told;
        if (tell) {
            pool->told = 1;
            pthread_mutex_unlock(&pool->lock);
            uint64_t one = 1;
            while (write(pool->event_fd, &one, sizeof one) < 0 && errno == EINTR) {
            }
            pthread_mutex_lock(&pool->lock);
        }
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

void *kv_pool_open(int n_threads, int event_fd, hash_fn hash) {
    pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->more, NULL);
    pool->event_fd = event_fd;
    pool->hash = hash;
    pool->since_ns = calloc((size_t)n_threads, sizeof *pool->since_ns);
    pool->threads = calloc((size_t)n_threads, sizeof *pool->threads);
    for (int i = 0; pool->since_ns && pool->threads && i < n_threads; i++) {
        start *own = malloc(sizeof *own);
        if (!own) break;
        *own = (start){pool, i};
        if (pthread_create(&pool->threads[i], NULL, work, own)) {
            free(own);
            break;
        }
        pool->n_threads++;
    }
    if (pool->n_threads) return pool;
    free(pool->since_ns);
    free(pool->threads);
    free(pool);
    return NULL;
}

/* With the lock held: room for so many more in the ring and among the ends. */
static int make_room(pool *pool, size_t n_parts, size_t n_unended) {
    size_t wanted = pool->n_waiting + n_parts;
    if (wanted > pool->ring_size) {
        size_t size = wanted * 2;
        task *ring = malloc(size * sizeof *ring);
        if (!ring) return 0;
        for (size_t i = 0; i < pool->n_waiting; i++)
            ring[i] = pool->ring[(pool->head + i) % pool->ring_size];
        free(pool->ring);
        pool->ring = ring;
        pool->ring_size = size;
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

/* With the lock held; how many threads to wake, -1 when there is no memory. */
static int add(pool *pool, const part *parts, int n_parts, waiter *waiter, size_t n_unended) {
    if (!make_room(pool, (size_t)n_parts, n_unended)) return -1;
    int n_runs = 0;
    for (int i = 0; i < n_parts; i++) {
        pool->ring[(pool->head + pool->n_waiting++) % pool->ring_size] = (task){parts[i], waiter};
        n_runs += !(parts[i].flags & FOLLOWED);
    }
    return n_runs < pool->n_resting ? n_runs : pool->n_resting;
}

/* Without the lock, or who is woken would at once wait for it. */
static void wake(pool *pool, int n_threads) {
    while (n_threads-- > 0) pthread_cond_signal(&pool->more);
}

/* `n_unended`: parts whose end the event loop will learn, these included. 0 when there is no memory. */
int kv_pool_add(pool *pool, const part *parts, int n_parts, int n_unended) {
    pthread_mutex_lock(&pool->lock);
    int woken = add(pool, parts, n_parts, NULL, (size_t)n_unended);
    pthread_mutex_unlock(&pool->lock);
    wake(pool, woken);
    return woken >= 0;
}

/* Do all and wait. Ids are 0 to n_parts - 1. 0 when there is no memory. */
int kv_pool_run(pool *pool, const part *parts, int n_parts, ended *results) {
    waiter waiter = {results, n_parts, PTHREAD_COND_INITIALIZER};
    pthread_mutex_lock(&pool->lock);
    int woken = add(pool, parts, n_parts, &waiter, 0);
    pthread_mutex_unlock(&pool->lock);
    wake(pool, woken);
    pthread_mutex_lock(&pool->lock);
    while (woken >= 0 && waiter.left) pthread_cond_wait(&waiter.done, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    pthread_cond_destroy(&waiter.done);
    return woken >= 0;
}

/* At most so many ends; the eventfd is written again only after all were taken. */
int kv_pool_take(pool *pool, ended *taken, int most) {
    pthread_mutex_lock(&pool->lock);
    size_t n = pool->n_done < (size_t)most ? pool->n_done : (size_t)most;
    memcpy(taken, pool->done, n * sizeof *taken);
    pool->n_done -= n;
    memmove(pool->done, pool->done + n, pool->n_done * sizeof *taken);
    if (!pool->n_done) pool->told = 0;
    pthread_mutex_unlock(&pool->lock);
    return (int)n;
}

/* End all that no thread has begun; whoever waits in kv_pool_run learns it there. */
void kv_pool_give_up(pool *pool) {
    pthread_mutex_lock(&pool->lock);
    while (pool->n_waiting) {
        end(pool, &pool->ring[pool->head], -ECANCELED);
        pool->head = (pool->head + 1) % pool->ring_size;
        pool->n_waiting--;
    }
    pthread_mutex_unlock(&pool->lock);
}

/* For how long the oldest running call runs; -1 when none does. */
int64_t kv_pool_oldest_ns(pool *pool) {
    int64_t oldest = 0;
    pthread_mutex_lock(&pool->lock);
    int64_t now = now_ns(); /* not before: a call may begin while this waits for the lock */
    for (int i = 0; i < pool->n_threads; i++)
        if (pool->since_ns[i] && (!oldest || pool->since_ns[i] < oldest)) oldest = pool->since_ns[i];
    pthread_mutex_unlock(&pool->lock);
    return oldest ? now - oldest : -1;
}

/* Does what waits, then ends the threads. Blocks as long as a call runs. */
void kv_pool_close(pool *pool) {
    pthread_mutex_lock(&pool->lock);
    pool->closing = 1;
    pthread_cond_broadcast(&pool->more);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->n_threads; i++) pthread_join(pool->threads[i], NULL);
    free(pool->ring);
    free(pool->done);
    free(pool->since_ns);
    free(pool->threads);
    free(pool);
}
