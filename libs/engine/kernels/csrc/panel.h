/* Products of some rows with one panel of a matrix, or with two panels at once. */
#pragma once

#include "amx.h"

/* Most rows: so many times 512 floats stay in the L2 cache. */
#if HAS_AMX
#define BLOCK_ROWS 128
#else
#define BLOCK_ROWS 120
#endif

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

#if HAS_AMX
/* Whether the matrix unit multiplies pairs by w. */
INLINE int by_unit(int is_pairs, const matrix_t *w) {
    return is_pairs && (w->kind == MATRIX_BF16 || unit_takes_int4(w));
}

/* The product with n_panels panels, up to UNIT_PANELS, from *first on; their results are out_panel floats apart. */
void unit_product(const float *const *rows, int64_t n_rows, const panel_t *first, int64_t n_panels, int64_t out_panel);
#endif
