/* The operations of a layer, for external callers and `stack.c`. They return 0, or -1 when out of memory. */
#pragma once

#include "attention.h"

/* down(silu(gate(x)) * up(x)) */
typedef struct {
    const matrix_t *gate, *up, *down;
} mlp_t;

typedef struct {
    const matrix_t *router;
    const float *correction_bias;
    int64_t n_experts, n_chosen, n_group, topk_group, norm_topk_prob;
    const matrix_t *gate, *up, *down; /* [n_experts] each */
    mlp_t shared;                     /* all NULL without shared experts */
    float routed_scaling_factor;
} moe_t;

/* The cache slots and the rotary angles of a batch's rows. */
typedef struct {
    int64_t n_rows, lora, rope;
    const float *cos_sin; /* [n_rows][2][rope / 2]: cosines, then sines */
    const int32_t *page_of_row, *offset_of_row; /* page -1: another rank holds the row's slot */
    int64_t page_bytes, is_bf16;
} slots_t;

void ss_rms_norm(context_t *context, const float *x, int64_t x_stride, const float *weight, int64_t n_rows,
                 int64_t width, float eps, float *out);

/* q [n_rows][n_heads][head_dim], rows q_stride apart: rotates the last rope_dim values of each head. */
void ss_rotate_queries(context_t *context, float *q, int64_t q_stride, int64_t n_rows, int64_t n_heads,
                       int64_t head_dim, int64_t rope_dim, const float *cos_sin);

/* kv_a [n_rows][lora + rope], rows kv_a_stride apart: normed latent | rotated key into the rows' slots.
 * layer_base is the layer's first row in page 0. */
int32_t ss_store_latent(context_t *context, const slots_t *slots, const float *kv_a, int64_t kv_a_stride,
                        const float *norm, float eps, char *layer_base);

/* out [n_lanes][v]: the attention over a whole context, from that over each share of its positions. A share is values
 * [n_lanes][v], then the logs of the lanes' sums of exponentials, -inf where a lane sees nothing. */
void ss_merge_shares(context_t *context, const float *const *shares, int64_t n_shares, int64_t n_lanes, int64_t v,
                     float *out);

/* out [n_rows][w->rows] = x W^T, or += with `add`. */
int32_t ss_linear(context_t *context, const float *x, int64_t x_stride, int64_t n_rows, const matrix_t *w,
                  float *out, int32_t add);

/* residual [n_rows][hidden] += the MLP of x, the experts of x. */
int32_t ss_mlp(context_t *context, const mlp_t *mlp, const float *x, int64_t n_rows, float *residual);
int32_t ss_moe(context_t *context, const moe_t *moe, const float *x, int64_t n_rows, float *residual);
