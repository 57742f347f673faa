#define _GNU_SOURCE
#include "disk_ring.h"
#include "disk_base.h"

#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#if __has_include(<linux/io_uring.h>) && defined(SYS_io_uring_setup)
#include <linux/io_uring.h>
#endif

#ifdef IORING_SETUP_R_DISABLED /* headers may be older than the kernel */

#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif
#ifndef IORING_SETUP_TASKRUN_FLAG
#define IORING_SETUP_TASKRUN_FLAG (1U << 9)
#define IORING_SQ_TASKRUN (1U << 2)
#endif
#define WOKEN UINT64_MAX /* the id of the read of `wake_fd` */

struct ring {
    int fd, wake_fd, wake_is_read;
    unsigned *tail, *mask, *flags; /* of the submission queue: entries */
    unsigned *ended_head, *ended_tail, *ended_mask;
    struct io_uring_sqe *entries;
    struct io_uring_cqe *ended;
    void *queues;
    size_t queues_bytes, entries_bytes;
    unsigned n_new;
    uint64_t woken;
};

static int set_up(unsigned n, struct io_uring_params *found) {
    /* Completions are processed during a wait, not within a checksum; older kernels cannot defer them. */
    const unsigned deferred =
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_TASKRUN_FLAG;
    const unsigned kinds[] = {deferred, 0};
    for (int i = 0; i < 2; i++) {
        memset(found, 0, sizeof *found);
        found->flags = kinds[i] | IORING_SETUP_R_DISABLED;
        int fd = (int)syscall(SYS_io_uring_setup, n, found);
        if (fd >= 0 || errno != EINVAL) return fd;
    }
    return -1;
}

ring *ring_open(unsigned most_reads) {
    struct io_uring_params found;
    int fd = set_up(most_reads + 1, &found);
    if (fd < 0) return NULL;
    ring *ring = calloc(1, sizeof *ring);
    if (!ring || !(found.features & IORING_FEAT_SINGLE_MMAP) || !(found.features & IORING_FEAT_NODROP)) {
        free(ring);
        close(fd);
        return NULL;
    }
    ring->fd = fd;
    ring->wake_fd = eventfd(0, EFD_CLOEXEC);
    size_t in = found.sq_off.array + found.sq_entries * sizeof(unsigned);
    size_t out = found.cq_off.cqes + found.cq_entries * sizeof(struct io_uring_cqe);
    ring->queues_bytes = in > out ? in : out;
    ring->entries_bytes = found.sq_entries * sizeof(struct io_uring_sqe);
    int access = PROT_READ | PROT_WRITE, how = MAP_SHARED | MAP_POPULATE;
    uint8_t *queues = mmap(NULL, ring->queues_bytes, access, how, fd, IORING_OFF_SQ_RING);
    ring->queues = queues;
    ring->entries = mmap(NULL, ring->entries_bytes, access, how, fd, IORING_OFF_SQES);
    if (queues == MAP_FAILED || ring->entries == MAP_FAILED || ring->wake_fd < 0) {
        ring_close(ring);
        return NULL;
    }
    ring->tail = (unsigned *)(queues + found.sq_off.tail);
    ring->mask = (unsigned *)(queues + found.sq_off.ring_mask);
    ring->flags = (unsigned *)(queues + found.sq_off.flags);
    unsigned *order = (unsigned *)(queues + found.sq_off.array);
    for (unsigned i = 0; i < found.sq_entries; i++) order[i] = i;
    ring->ended_head = (unsigned *)(queues + found.cq_off.head);
    ring->ended_tail = (unsigned *)(queues + found.cq_off.tail);
    ring->ended_mask = (unsigned *)(queues + found.cq_off.ring_mask);
    ring->ended = (struct io_uring_cqe *)(queues + found.cq_off.cqes);
    return ring;
}

void ring_close(ring *ring) {
    if (ring->queues != MAP_FAILED) munmap(ring->queues, ring->queues_bytes);
    if (ring->entries != MAP_FAILED) munmap(ring->entries, ring->entries_bytes);
    if (ring->wake_fd >= 0) close(ring->wake_fd);
    close(ring->fd);
    free(ring);
}

int ring_begin(ring *ring) {
    if (syscall(SYS_io_uring_register, ring->fd, IORING_REGISTER_ENABLE_RINGS, NULL, 0)) return -1;
    /* A sandbox may forbid this call alone; then a submitted read would never end. */
    return (int)syscall(SYS_io_uring_enter, ring->fd, 0, 0, 0, NULL, 0);
}

static struct io_uring_sqe *new_entry(ring *ring, int kind, int fd, uint64_t id) {
    unsigned at = *ring->tail;
    struct io_uring_sqe *entry = &ring->entries[at & *ring->mask];
    memset(entry, 0, sizeof *entry);
    entry->opcode = (uint8_t)kind;
    entry->fd = fd;
    entry->user_data = id;
    return entry;
}

static void hand_in(ring *ring) {
    __atomic_store_n(ring->tail, *ring->tail + 1, __ATOMIC_RELEASE);
    ring->n_new++;
}

void ring_read(ring *ring, int fd, const struct iovec *views, int n_views, int64_t offset, uint64_t id) {
    struct io_uring_sqe *entry = new_entry(ring, IORING_OP_READV, fd, id);
    entry->addr = (uint64_t)(uintptr_t)views;
    entry->len = (uint32_t)n_views;
    entry->off = (uint64_t)offset;
    hand_in(ring);
}

void ring_wait(ring *ring, int until_event) {
    if (!ring->wake_is_read) {
        struct io_uring_sqe *entry = new_entry(ring, IORING_OP_READ, ring->wake_fd, WOKEN);
        entry->addr = (uint64_t)(uintptr_t)&ring->woken;
        entry->len = sizeof ring->woken;
        entry->off = (uint64_t)-1;
        ring->wake_is_read = 1;
        hand_in(ring);
    }
    unsigned least = until_event ? 1 : 0;
    long taken = syscall(SYS_io_uring_enter, ring->fd, ring->n_new, least, IORING_ENTER_GETEVENTS, NULL, 0);
    if (taken > 0) ring->n_new -= (unsigned)taken;
    if (taken < 0 && errno != EINTR) { /* no memory for now; the next call tries again */
        struct timespec time = {0, 1000000};
        nanosleep(&time, NULL);
    }
}

int ring_next(ring *ring, uint64_t *id, int64_t *result) {
    for (;;) {
        unsigned at = *ring->ended_head;
        if (at == __atomic_load_n(ring->ended_tail, __ATOMIC_ACQUIRE)) return 0;
        const struct io_uring_cqe *entry = &ring->ended[at & *ring->ended_mask];
        *id = entry->user_data;
        *result = entry->res;
        __atomic_store_n(ring->ended_head, at + 1, __ATOMIC_RELEASE);
        if (*id != WOKEN) return 1;
        ring->wake_is_read = 0;
    }
}

int ring_has_completions(const ring *ring) {
    return *ring->ended_head != __atomic_load_n(ring->ended_tail, __ATOMIC_ACQUIRE) ||
           __atomic_load_n(ring->flags, __ATOMIC_RELAXED) & IORING_SQ_TASKRUN;
}

void ring_wake(ring *ring) { signal_event(ring->wake_fd); }

#else

ring *ring_open(unsigned most_reads) { return NULL; }
void ring_close(ring *ring) {}
int ring_begin(ring *ring) { return -1; }
void ring_read(ring *ring, int fd, const struct iovec *views, int n_views, int64_t offset, uint64_t id) {}
void ring_wait(ring *ring, int until_event) {}
int ring_next(ring *ring, uint64_t *id, int64_t *result) { return 0; }
int ring_has_completions(const ring *ring) { return 0; }
void ring_wake(ring *ring) {}

#endif
