/* A context: the threads and one scratch memory that every operation re-uses. One caller at a time. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "pool.h"

typedef struct context context_t;

context_t *ss_context_new(int32_t n_threads);
void ss_context_free(context_t *context);

pool_t *context_pool(const context_t *context);

/* Makes at least n_bytes of 64-byte aligned scratch available; earlier contents are lost. NULL: out of memory. */
char *context_scratch(context_t *context, size_t n_bytes);

/* A second scratch memory, for data that must survive operations that use the first one. */
char *context_lasting(context_t *context, size_t n_bytes);

/* Sets the word that stops a forward pass when another thread sets it; attention then skips work, so that results
 * are undefined. NULL: the pass cannot be stopped. */
void context_watch(context_t *context, const int32_t *stop);
const int32_t *context_stop(const context_t *context);

static inline int is_set(const int32_t *stop) { return stop && __atomic_load_n(stop, __ATOMIC_RELAXED); }

/* Bump allocation from the scratch that context_scratch returned. */
#define TAKE(cursor, type, count) \
    ((type *)take_bytes(&(cursor), sizeof(type) * (size_t)(count)))

static inline void *take_bytes(char **cursor, size_t n_bytes) {
    void *taken = *cursor;
    *cursor += (n_bytes + 63) & ~(size_t)63;
    return taken;
}

#define ROOM(type, count) ((sizeof(type) * (size_t)(count) + 63) & ~(size_t)63)
