/* A pool of threads that makes groups of blocks durable in four steps: payloads, a sync of each file, headers, a sync
 * of each file. The event loop submits a whole group and receives its end through an eventfd, so no step waits for the
 * interpreter. A header is written only after its payload was synced.
 */
#define _GNU_SOURCE
#include "disk_base.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#define PAGE_BYTES 4096
#define MAX_RUN_BYTES (1u << 20) /* largest run of neighbours in one write */
#define MAX_RUN_BLOCKS 64
#define SYNC_FAILED (1 << 20) /* added to the error number of a sync; alone: an earlier sync failed */
#define SEALED_BYTES 64 /* of a header, before its seal */

/* Returns bytes written, or -errno. Tests pass their own. */
typedef int64_t (*write_fn)(int fd, const struct iovec *views, int n_views, int64_t offset);
typedef int64_t (*sync_fn)(int fd);

/* State of a file's syncs, owned by the caller: one sync at a time, and a failure is permanent. */
typedef struct {
    int32_t running, poisoned;
} sync_state;

typedef struct {
    uint64_t id;
    int64_t payload_at, header_at;
    uint64_t slot_bytes, address;
    sync_state *syncs;
    uint8_t header[SEALED_BYTES];
    int64_t fd;
} block_write;

typedef enum { BEGUN, PAYLOADS, FIRST_SYNC, HEADERS, SECOND_SYNC, DONE } phase;

typedef struct job {
    struct group *group;
    int first, n; /* blocks of the group, in its order */
    struct job *next;
} job;

typedef struct group {
    int n, size, n_left;
    phase phase;
    block_write *blocks; /* in the order of the disk */
    int64_t *results;
    job *jobs;
    uint8_t *pages; /* of headers; zero behind each seal */
    struct group *next;
} group;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t more, synced;
    job *first, *last;         /* waiting */
    group *done, *last_done;   /* ended, not taken yet */
    group *spare;
    int64_t *since_ns; /* start of each thread's call, 0 while it is idle */
    pthread_t *threads;
    int n_threads, n_idle, closing, signalled, event_fd;
    hash_fn hash;
    write_fn write;
    sync_fn sync;
} writer;

typedef struct {
    writer *writer;
    int number;
} start;

static int64_t system_write(int fd, const struct iovec *views, int n_views, int64_t offset) {
    ssize_t written;
    do
        written = pwritev(fd, views, n_views, offset);
    while (written < 0 && errno == EINTR);
    return written < 0 ? -errno : written;
}

static int64_t system_sync(int fd) {
    int failed;
    do
        failed = fdatasync(fd);
    while (failed < 0 && errno == EINTR);
    return failed < 0 ? -errno : 0;
}

static int64_t write_all(const writer *writer, int fd, const struct iovec *views, int n_views, int64_t offset) {
    int64_t expected = 0;
    for (int i = 0; i < n_views; i++) expected += (int64_t)views[i].iov_len;
    int64_t written = writer->write(fd, views, n_views, offset);
    return written < 0 ? written : written == expected ? 0 : -EIO;
}

static int64_t write_payloads(const writer *writer, const block_write *blocks, int n) {
    struct iovec views[MAX_RUN_BLOCKS];
    for (int i = 0; i < n; i++)
        views[i] = (struct iovec){(void *)(uintptr_t)blocks[i].address, blocks[i].slot_bytes};
    return write_all(writer, (int)blocks->fd, views, n, blocks->payload_at);
}

static int64_t write_headers(const writer *writer, const block_write *blocks, uint8_t *pages, int n) {
    for (int i = 0; i < n; i++) {
        uint8_t *page = pages + (size_t)i * PAGE_BYTES;
        memcpy(page, blocks[i].header, SEALED_BYTES);
        big_endian(writer->hash(page, SEALED_BYTES), page + SEALED_BYTES);
    }
    struct iovec view = {pages, (size_t)n * PAGE_BYTES};
    return write_all(writer, (int)blocks->fd, &view, 1, blocks->header_at);
}

/* Syncs exclude each other: the kernel reports a failure once, and no other sync may miss it. */
static int64_t sync_file(writer *writer, const block_write *block) {
    sync_state *state = block->syncs;
    pthread_mutex_lock(&writer->lock);
    while (state->running) pthread_cond_wait(&writer->synced, &writer->lock);
    int poisoned = state->poisoned;
    state->running = !poisoned;
    pthread_mutex_unlock(&writer->lock);
    if (poisoned) return -SYNC_FAILED;
    int64_t failed = writer->sync((int)block->fd);
    pthread_mutex_lock(&writer->lock);
    state->running = 0;
    state->poisoned |= failed != 0;
    pthread_cond_broadcast(&writer->synced);
    pthread_mutex_unlock(&writer->lock);
    return failed ? failed - SYNC_FAILED : 0;
}

static int64_t run(writer *writer, const job *job) {
    const group *group = job->group;
    const block_write *blocks = group->blocks + job->first;
    switch (group->phase) {
    case PAYLOADS: return write_payloads(writer, blocks, job->n);
    case HEADERS: return write_headers(writer, blocks, group->pages + (size_t)job->first * PAGE_BYTES, job->n);
    default: return sync_file(writer, blocks);
    }
}

/* With the lock held: records a job's result for each of its blocks; a sync's for all blocks of its file. */
static void note(const job *job, int64_t result) {
    const group *group = job->group;
    int of_file = group->phase == FIRST_SYNC || group->phase == SECOND_SYNC;
    if (!result) return;
    if (!of_file) {
        for (int i = job->first; i < job->first + job->n; i++) group->results[i] = result;
        return;
    }
    for (int i = 0; i < group->n; i++)
        if (group->blocks[i].syncs == group->blocks[job->first].syncs) group->results[i] = result;
}

/* Whether a block extends the job before it. */
static int joins(const group *group, const job *job, int at) {
    const block_write *first = &group->blocks[job->first], *before = &group->blocks[at - 1];
    const block_write *block = &group->blocks[at];
    if (job->first + job->n != at && group->phase != FIRST_SYNC && group->phase != SECOND_SYNC) return 0;
    if (block->syncs != first->syncs) return 0;
    switch (group->phase) {
    case PAYLOADS:
        return before->payload_at + (int64_t)before->slot_bytes == block->payload_at &&
               before->slot_bytes == block->slot_bytes && job->n < MAX_RUN_BLOCKS &&
               (uint64_t)(job->n + 1) * block->slot_bytes <= MAX_RUN_BYTES;
    case HEADERS: return before->header_at + PAGE_BYTES == block->header_at;
    default: return 1;
    }
}

/* With the lock held: queues the jobs of the group's next step that has any; returns their number. */
static int advance(writer *writer, group *group) {
    int n_jobs = 0;
    while (!n_jobs && ++group->phase < DONE) {
        for (int at = 0; at < group->n; at++) {
            if (group->results[at]) continue;
            job *last = n_jobs ? &group->jobs[n_jobs - 1] : NULL;
            if (last && joins(group, last, at)) {
                last->n++;
            } else {
                group->jobs[n_jobs++] = (job){group, at, 1, NULL};
            }
        }
    }
    group->n_left = n_jobs;
    for (int i = 0; i < n_jobs; i++) {
        if (writer->last)
            writer->last->next = &group->jobs[i];
        else
            writer->first = &group->jobs[i];
        writer->last = &group->jobs[i];
    }
    if (!n_jobs) {
        group->next = NULL;
        if (writer->last_done)
            writer->last_done->next = group;
        else
            writer->done = group;
        writer->last_done = group;
    }
    return n_jobs;
}

static void *work(void *argument) {
    start *own = argument;
    writer *writer = own->writer;
    int number = own->number;
    free(own);
    pthread_mutex_lock(&writer->lock);
    for (;;) {
        while (!writer->first && !writer->closing) {
            writer->n_idle++;
            pthread_cond_wait(&writer->more, &writer->lock);
            writer->n_idle--;
        }
        job *job = writer->first;
        if (!job) break;
        writer->first = job->next;
        if (!writer->first) writer->last = NULL;
        writer->since_ns[number] = now_ns();
        pthread_mutex_unlock(&writer->lock);
        int64_t result = run(writer, job);
        pthread_mutex_lock(&writer->lock);
        writer->since_ns[number] = 0;
        note(job, result);
        int n_jobs = --job->group->n_left ? 0 : advance(writer, job->group);
        int n_woken = n_jobs - 1 < writer->n_idle ? n_jobs - 1 : writer->n_idle; /* one is for this thread */
        int signals = writer->done && !writer->signalled;
        writer->signalled |= signals;
        if (n_woken <= 0 && !signals) continue;
        pthread_mutex_unlock(&writer->lock);
        while (n_woken-- > 0) pthread_cond_signal(&writer->more);
        if (signals) signal_event(writer->event_fd);
        pthread_mutex_lock(&writer->lock);
    }
    pthread_mutex_unlock(&writer->lock);
    return NULL;
}

void *kv_writer_open(int n_threads, int event_fd, hash_fn hash, write_fn write, sync_fn sync) {
    writer *writer = calloc(1, sizeof *writer);
    if (!writer) return NULL;
    pthread_mutex_init(&writer->lock, NULL);
    pthread_cond_init(&writer->more, NULL);
    pthread_cond_init(&writer->synced, NULL);
    writer->event_fd = event_fd;
    writer->hash = hash;
    writer->write = write ? write : system_write;
    writer->sync = sync ? sync : system_sync;
    writer->since_ns = calloc((size_t)n_threads, sizeof *writer->since_ns);
    writer->threads = calloc((size_t)n_threads, sizeof *writer->threads);
    for (int i = 0; writer->since_ns && writer->threads && i < n_threads; i++) {
        start *own = malloc(sizeof *own);
        if (!own) break;
        *own = (start){writer, i};
        if (pthread_create(&writer->threads[i], NULL, work, own)) {
            free(own);
            break;
        }
        writer->n_threads++;
    }
    if (writer->n_threads) return writer;
    free(writer->since_ns);
    free(writer->threads);
    free(writer);
    return NULL;
}

static void free_group(group *group) {
    if (!group) return;
    free(group->blocks);
    free(group->results);
    free(group->jobs);
    free(group->pages);
    free(group);
}

static group *new_group(int size) {
    group *group = calloc(1, sizeof *group);
    if (!group) return NULL;
    group->size = size;
    group->blocks = malloc((size_t)size * sizeof *group->blocks);
    group->results = malloc((size_t)size * sizeof *group->results);
    group->jobs = malloc((size_t)size * sizeof *group->jobs);
    group->pages = aligned_alloc(PAGE_BYTES, (size_t)size * PAGE_BYTES);
    if (group->blocks && group->results && group->jobs && group->pages) {
        memset(group->pages, 0, (size_t)size * PAGE_BYTES);
        return group;
    }
    free_group(group);
    return NULL;
}

static int by_location(const void *one, const void *other) {
    const block_write *a = one, *b = other;
    if (a->fd != b->fd) return a->fd < b->fd ? -1 : 1;
    return a->payload_at < b->payload_at ? -1 : a->payload_at > b->payload_at;
}

/* Makes these blocks durable. Returns 0, and takes none, when there is no memory. */
int kv_writer_add(writer *writer, const block_write *blocks, int n) {
    pthread_mutex_lock(&writer->lock);
    group *group = writer->spare;
    if (group && group->size >= n)
        writer->spare = group->next;
    else
        group = NULL;
    pthread_mutex_unlock(&writer->lock);
    if (!group) group = new_group(n > 32 ? n : 32);
    if (!group) return 0;
    memcpy(group->blocks, blocks, (size_t)n * sizeof *blocks);
    qsort(group->blocks, (size_t)n, sizeof *blocks, by_location);
    memset(group->results, 0, (size_t)n * sizeof *group->results);
    group->n = n;
    group->phase = BEGUN;
    pthread_mutex_lock(&writer->lock);
    int n_jobs = advance(writer, group);
    int n_woken = n_jobs < writer->n_idle ? n_jobs : writer->n_idle;
    pthread_mutex_unlock(&writer->lock);
    while (n_woken-- > 0) pthread_cond_signal(&writer->more);
    return 1;
}

/* The ends of one group, if it has at most `most` blocks; 0 when no group has ended. */
int kv_writer_poll(writer *writer, ended *taken, int most) {
    pthread_mutex_lock(&writer->lock);
    group *group = writer->done;
    if (!group || group->n > most) {
        writer->signalled = 0;
        pthread_mutex_unlock(&writer->lock);
        return 0;
    }
    writer->done = group->next;
    if (!writer->done) writer->last_done = NULL;
    int n = group->n;
    for (int i = 0; i < n; i++) taken[i] = (ended){group->blocks[i].id, group->results[i]};
    group->next = writer->spare;
    writer->spare = group;
    pthread_mutex_unlock(&writer->lock);
    return n;
}

/* Run time of the oldest call; 0 between two steps of a group; -1 when the writer is idle. */
int64_t kv_writer_oldest_ns(writer *writer) {
    int64_t oldest = 0;
    pthread_mutex_lock(&writer->lock);
    int64_t now = now_ns(); /* under the lock: a call may start while this function waits for it */
    for (int i = 0; i < writer->n_threads; i++)
        if (writer->since_ns[i] && (!oldest || writer->since_ns[i] < oldest)) oldest = writer->since_ns[i];
    int some_wait = writer->first != NULL;
    pthread_mutex_unlock(&writer->lock);
    return oldest ? now - oldest : some_wait ? 0 : -1;
}

/* Finishes waiting groups, then ends the threads. Blocks as long as a call runs. */
void kv_writer_close(writer *writer) {
    pthread_mutex_lock(&writer->lock);
    writer->closing = 1;
    pthread_cond_broadcast(&writer->more);
    pthread_mutex_unlock(&writer->lock);
    for (int i = 0; i < writer->n_threads; i++) pthread_join(writer->threads[i], NULL);
    for (group *group = writer->done, *next; group; group = next) {
        next = group->next;
        free_group(group);
    }
    for (group *group = writer->spare, *next; group; group = next) {
        next = group->next;
        free_group(group);
    }
    free(writer->since_ns);
    free(writer->threads);
    free(writer);
}
