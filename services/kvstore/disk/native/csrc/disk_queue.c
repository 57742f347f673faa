#include "disk_queue.h"

#include <stdlib.h>

#define FEW_BYTES ((uint64_t)2 << 20) /* at the disk: enough to keep any disk busy while an interrupt is served */
#define MANY_BYTES ((uint64_t)8 << 20)
#define MOST_BYTES ((uint64_t)12 << 20)

static void release_flight(queue *queue, flight *flight) {
    flight->since_ns = 0;
    flight->next = queue->idle;
    queue->idle = flight;
}

void queue_init(queue *queue) {
    for (int i = 0; i < N_FLIGHTS; i++) release_flight(queue, &queue->flights[i]);
}

void queue_free(queue *queue) {
    free(queue->waiting);
    free(queue->done);
}

int queue_make_room(queue *queue, size_t n_unended) {
    if (n_unended > queue->room) {
        size_t size = n_unended * 2;
        part *waiting = malloc(size * sizeof *waiting);
        if (!waiting) return 0;
        for (size_t i = 0; i < queue->n_waiting; i++)
            waiting[i] = queue->waiting[(queue->head + i) % queue->room];
        free(queue->waiting);
        queue->waiting = waiting;
        queue->room = size;
        queue->head = 0;
    }
    if (n_unended > queue->done_size) {
        ended *done = realloc(queue->done, n_unended * 2 * sizeof *done);
        if (!done) return 0;
        queue->done = done;
        queue->done_size = n_unended * 2;
    }
    return 1;
}

void queue_add(queue *queue, const part *part) {
    queue->waiting[(queue->head + queue->n_waiting++) % queue->room] = *part;
    queue->bytes_waiting += part->n_bytes;
    queue->bytes_unended += part->n_bytes;
}

static uint64_t next_run_bytes(const queue *queue) {
    uint64_t n_bytes = 0;
    for (size_t i = 0; i < queue->n_waiting && i < MAX_RUN_PARTS; i++) {
        const part *part = &queue->waiting[(queue->head + i) % queue->room];
        n_bytes += part->n_bytes;
        if (!(part->flags & FOLLOWED)) break;
    }
    return n_bytes;
}

/* A disk may report its reads only when none is left, and then idles until it gets others. So the queue keeps many
 * reads at the disk while there are any. One round is verified during the next, so each round is at most half of the
 * remaining bytes. For few callers, half of their bytes are at the disk while they process the other half. */
static uint64_t most_bytes(const queue *queue) {
    uint64_t of_left = (queue->bytes_waiting + queue->bytes_at_disk) / 2, of_asked = queue->bytes_unended / 2;
    uint64_t most = of_asked > MANY_BYTES ? MANY_BYTES : of_asked;
    if (of_left > MOST_BYTES) of_left = MOST_BYTES;
    if (most < of_left) most = of_left;
    return most < FEW_BYTES ? FEW_BYTES : most;
}

int queue_may_begin(const queue *queue) {
    if (!queue->n_waiting || !queue->idle || queue->n_at_disk >= MOST_AT_DISK) return 0;
    return !queue->n_at_disk || queue->bytes_at_disk + next_run_bytes(queue) <= most_bytes(queue);
}

flight *queue_begin(queue *queue) {
    flight *flight = queue->idle;
    queue->idle = flight->next;
    flight->n = 0;
    flight->n_bytes = 0;
    uint32_t flags;
    do {
        part *part = &flight->parts[flight->n];
        *part = queue->waiting[queue->head];
        queue->head = (queue->head + 1) % queue->room;
        queue->n_waiting--;
        flags = part->flags;
        flight->views[flight->n] = (struct iovec){(void *)(uintptr_t)part->address, part->n_bytes};
        flight->results[flight->n++] = 0;
        flight->n_bytes += part->n_bytes;
    } while (flags & FOLLOWED && flight->n < MAX_RUN_PARTS && queue->n_waiting);
    flight->since_ns = now_ns();
    queue->n_at_disk++;
    queue->bytes_waiting -= flight->n_bytes;
    queue->bytes_at_disk += flight->n_bytes;
    return flight;
}

void queue_left_disk(queue *queue, const flight *flight) {
    queue->n_at_disk--;
    queue->bytes_at_disk -= flight->n_bytes;
}

void queue_add_landed(queue *queue, flight *flight) {
    flight->since_ns = 0;
    flight->next = NULL;
    if (queue->landed)
        queue->last_landed->next = flight;
    else
        queue->landed = flight;
    queue->last_landed = flight;
    queue->bytes_landed += flight->n_bytes;
}

flight *queue_pop_landed(queue *queue) {
    flight *flight = queue->landed;
    if (!flight) return NULL;
    queue->landed = flight->next;
    queue->bytes_landed -= flight->n_bytes;
    flight->since_ns = now_ns();
    return flight;
}

void queue_read_again(queue *queue, flight *flight) {
    for (int i = flight->n - 1; i >= 0; i--) { /* `queue_make_room` counted all unended parts */
        queue->head = (queue->head + queue->room - 1) % queue->room;
        queue->waiting[queue->head] = flight->parts[i];
        queue->waiting[queue->head].flags = 0;
        queue->n_waiting++;
    }
    queue->bytes_waiting += flight->n_bytes;
    release_flight(queue, flight);
}

void queue_end(queue *queue, flight *flight) {
    for (int i = 0; i < flight->n; i++) /* `queue_make_room` counted them */
        queue->done[queue->n_done++] = (ended){flight->parts[i].id, flight->results[i]};
    queue->bytes_unended -= flight->n_bytes;
    release_flight(queue, flight);
}

void queue_cancel(queue *queue, int64_t result) {
    while (queue->n_waiting) {
        const part *part = &queue->waiting[queue->head];
        queue->done[queue->n_done++] = (ended){part->id, result};
        queue->bytes_unended -= part->n_bytes;
        queue->head = (queue->head + 1) % queue->room;
        queue->n_waiting--;
    }
    queue->bytes_waiting = 0;
}

int queue_pop_ended(queue *queue, ended *taken, int most) {
    size_t n = queue->n_done < (size_t)most ? queue->n_done : (size_t)most;
    if (!n) return 0;
    memcpy(taken, queue->done, n * sizeof *taken);
    queue->n_done -= n;
    memmove(queue->done, queue->done + n, queue->n_done * sizeof *taken);
    return (int)n;
}

int64_t queue_oldest_ns(const queue *queue) {
    int64_t oldest = 0, now = now_ns();
    for (const flight *flight = queue->flights; flight < queue->flights + N_FLIGHTS; flight++)
        if (flight->since_ns && (!oldest || flight->since_ns < oldest)) oldest = flight->since_ns;
    return oldest ? now - oldest : queue->n_waiting || queue->landed ? 0 : -1;
}
