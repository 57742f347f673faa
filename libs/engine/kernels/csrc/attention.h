/* Multi-head latent attention over a paged cache, for selected sequences of a batch. */
#pragma once

#include "amx.h"
#include "gemm.h"

typedef struct {
    /* query rows of the whole batch, rotated: [rows][heads][nope + rope], rows q_stride apart */
    const float *q;
    int64_t q_stride;
    int64_t n_heads, nope, rope, lora, v;
    /* kv_b_proj by head: uk [lora x nope] (transposed), uv [v x lora] */
    const matrix_t *uk, *uv;
    /* the layer's first cache row in page 0, and the layout of pages */
    const char *layer_base;
    int64_t page_bytes, block_tokens, is_bf16;
    /* the batch; page_table has block_tokens of each context a page, and a row sees the first visible[row] of them */
    const int32_t *query_start, *context_len, *visible, *page_table;
    int64_t table_stride;
    /* the sequences of the batch to compute */
    const int32_t *sequences;
    int64_t n_sequences;
    float *out;            /* [rows][heads * v]; zeros where a row sees nothing */
    float *log_sums;       /* [rows][heads]: log of the sum of exponentials of scores, or NULL */
    float scale;
} attention_t;

int32_t ss_attend_absorbed(context_t *context, const attention_t *a);
int32_t ss_attend_expanded(context_t *context, const attention_t *a);

INLINE int64_t width_of(const attention_t *a) { return a->lora + a->rope; }
INLINE int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Whether scores and mixed values are products of pairs: cache and weights hold bf16, and no pair crosses a part. */
INLINE int attends_pairs(const attention_t *a) {
    return HAS_PAIRS && a->is_bf16 && a->uk->kind == MATRIX_BF16 && a->uv->kind == MATRIX_BF16 &&
           (a->nope | a->rope | a->lora) % 2 == 0;
}

/* The divisor of a lane of the batch. A lane that sees nothing has the sum 0 and stays 0. One that sees only scores of
 * -inf, after an overflow in the model, has it too and becomes NaN, which the sampler refuses. Of a share both stay 0:
 * another share may have finite scores, and else merging makes NaN of them. */
INLINE float divisor_of(const attention_t *a, int64_t lane, float sum) {
    return sum == 0 && (a->log_sums || a->visible[lane / a->n_heads] <= 0) ? 1 : sum;
}

/* Scores count in powers of two: their exponentials take fewer operations. */
INLINE float score_scale(const attention_t *a) { return a->scale * 1.44269504089f; }

/* `sum` is relative to 2^best, where `best` is the lane's maximum score. */
INLINE void keep_log_sum(const attention_t *a, int64_t lane, float best, float sum) {
    if (a->log_sums) a->log_sums[lane] = sum == 0 ? -INFINITY : best * 0.69314718056f + logf(sum);
}

INLINE const char *cache_row(const attention_t *a, int64_t sequence, int64_t token) {
    int64_t page = a->page_table[sequence * a->table_stride + token / a->block_tokens];
    int64_t row_bytes = width_of(a) * (a->is_bf16 ? 2 : 4);
    return a->layer_base + page * a->page_bytes + token % a->block_tokens * row_bytes;
}
