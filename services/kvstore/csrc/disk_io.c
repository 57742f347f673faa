/* A pool of threads that reads blocks: pread, and the checksum of what was read.
 *
 * The event loop hands in parts and learns of their ends through an eventfd, both in batches, so that a block
 * costs it a few microseconds and no turn of the interpreter's lock. A run of neighbouring parts is one call.
 */
#define _GNU_SOURCE
#include "disk_io.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#define MAX_RUN_PARTS 64
#define FOLLOWED 1u /* the next part is its neighbour and goes with it */
#define MISMATCH 1

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
    pthread_mutex_t lock;
    pthread_cond_t more;
    part *ring;
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
        moved = preadv(first->fd, views, n_parts, first->offset);
    while (moved < 0 && errno == EINTR);
    if (moved < 0) return -errno;
    return moved == expected ? 0 : -EIO;
}

static int64_t verified(const pool *pool, const part *read) {
    uint8_t found[16];
    big_endian(pool->hash((const void *)(uintptr_t)read->address, read->hash_bytes), found);
    return memcmp(found, read->expected, 16) ? MISMATCH : 0;
}

static void run(const pool *pool, const part *parts, int n_parts, int64_t *results) {
    int64_t whole = move(parts, n_parts);
    for (int i = 0; i < n_parts; i++) {
        /* When a run fails, which of them is it? */
        int64_t result = whole && n_parts > 1 ? move(&parts[i], 1) : whole;
        results[i] = result ? result : verified(pool, &parts[i]);
    }
}

static void *work(void *argument) {
    start *own = argument;
    pool *pool = own->pool;
    int number = own->number;
    free(own);
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
            parts[n_parts] = pool->ring[pool->head];
            pool->head = (pool->head + 1) % pool->ring_size;
            pool->n_waiting--;
        } while (parts[n_parts++].flags & FOLLOWED && n_parts < MAX_RUN_PARTS && pool->n_waiting);
        pool->since_ns[number] = now_ns();
        pthread_mutex_unlock(&pool->lock);
        run(pool, parts, n_parts, results);
        pthread_mutex_lock(&pool->lock);
        pool->since_ns[number] = 0;
        for (int i = 0; i < n_parts; i++) /* room was made when they were added */
            pool->done[pool->n_done++] = (ended){parts[i].id, results[i]};
        if (!pool->told) {
            pool->told = 1;
            pthread_mutex_unlock(&pool->lock);
            tell(pool->event_fd);
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
        part *ring = malloc(size * sizeof *ring);
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

/* `n_unended`: parts whose end the event loop will learn, these included. 0 when there is no memory; then none
 * was taken. */
int kv_pool_add(pool *pool, const part *parts, int n_parts, int n_unended) {
    int n_runs = 0;
    pthread_mutex_lock(&pool->lock);
    int taken = make_room(pool, (size_t)n_parts, (size_t)n_unended);
    for (int i = 0; taken && i < n_parts; i++) {
        pool->ring[(pool->head + pool->n_waiting++) % pool->ring_size] = parts[i];
        n_runs += !(parts[i].flags & FOLLOWED);
    }
    int n_woken = n_runs < pool->n_resting ? n_runs : pool->n_resting;
    pthread_mutex_unlock(&pool->lock);
    /* Without the lock, or who is woken would at once wait for it. */
    while (n_woken-- > 0) pthread_cond_signal(&pool->more);
    return taken;
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

/* End all that no thread has begun. */
void kv_pool_give_up(pool *pool) {
    pthread_mutex_lock(&pool->lock);
    while (pool->n_waiting) {
        pool->done[pool->n_done++] = (ended){pool->ring[pool->head].id, -ECANCELED};
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
