#include "context.h"

#include <stdlib.h>

typedef struct {
    size_t n_bytes;
    char *start;
} arena_t;

struct context {
    pool_t *pool;
    arena_t scratch, lasting;
    const int32_t *stop;
};

context_t *ss_context_new(int32_t n_threads) {
    context_t *context = calloc(1, sizeof *context);
    if (context && !(context->pool = pool_new(n_threads))) {
        free(context);
        return NULL;
    }
    return context;
}

void ss_context_free(context_t *context) {
    if (!context) return;
    pool_free(context->pool);
    free(context->scratch.start);
    free(context->lasting.start);
    free(context);
}

void context_watch(context_t *context, const int32_t *stop) { context->stop = stop; }
const int32_t *context_stop(const context_t *context) { return context->stop; }

pool_t *context_pool(const context_t *context) { return context->pool; }

static char *reach(arena_t *arena, size_t n_bytes) {
    if (n_bytes > arena->n_bytes) {
        size_t rounded = (n_bytes + n_bytes / 4 + 4095) & ~(size_t)4095;
        free(arena->start);
        arena->start = aligned_alloc(4096, rounded);
        arena->n_bytes = arena->start ? rounded : 0;
    }
    return arena->start;
}

char *context_scratch(context_t *context, size_t n_bytes) { return reach(&context->scratch, n_bytes); }
char *context_lasting(context_t *context, size_t n_bytes) { return reach(&context->lasting, n_bytes); }
