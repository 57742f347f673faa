/* Products of some rows with one panel of a matrix, or with two panels at once. */
#pragma once

#include "tile.h"

#define BLOCK_ROWS 120 /* most rows: 120 x 512 floats stay in the L2 cache */

/* One panel of a matrix and the place of its 16 results per row: out[r * stride + 0..15], += with `add`. */
typedef struct {
    const matrix_t *w;
    int64_t panel;
    float *out;
    int64_t stride;
    int add;
} panel_t;

/* b may be NULL. With few rows, two panels side by side hide the latency of the multiply-adds. `is_pairs`: the rows
 * are pairs of bf16 values, and matrices take pairs. */
void panel_product(int is_pairs, const float *const *rows, int64_t n_rows, const panel_t *a, const panel_t *b);
