#include "context.h"

#include <stdlib.h>

struct context {
    pool_t *pool;
    size_t n_bytes;
    char *scratch;
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
    free(context->scratch);
    free(context);
}

pool_t *context_pool(const context_t *context) { return context->pool; }

char *context_scratch(context_t *context, size_t n_bytes) {
    if (n_bytes > context->n_bytes) {
        size_t rounded = (n_bytes + n_bytes / 4 + 4095) & ~(size_t)4095;
        free(context->scratch);
        context->scratch = aligned_alloc(4096, rounded);
        context->n_bytes = context->scratch ? rounded : 0;
    }
    return context->scratch;
}
