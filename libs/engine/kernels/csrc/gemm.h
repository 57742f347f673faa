/* Batches of matrix products whose panels are distributed among the threads. */
#pragma once

#include "context.h"
#include "matrix.h"
#include "tile.h"

/* With fewer multiplications, a few microseconds of work, distributing them costs more than it gains. */
#define SERIAL_WORK (64 * 1024)

/* `tile` for any number of rows. */
void tile_rows(const float *const *a, int64_t n_rows, int64_t offset, int64_t step, const float *b,
               int64_t b_stride, float *c, int64_t c_stride, int64_t n, int accumulate);

/* out[r] (+)= W x[r], or out[r] = silu(W x[r]) * (up x[r]) when `up` is given. */
typedef struct {
    const float *x;
    int64_t x_stride;
    const int32_t *row_of; /* x row of each output row; NULL: the same */
    int64_t n_rows;
    const matrix_t *w, *up;
    float *out;
    int64_t out_stride;
    int64_t add; /* 1: add to what `out` holds */
} product_t;

/* Scratch bytes that run_products needs for n products. */
size_t products_room(int64_t n);

/* Runs products that do not overlap in `out`. */
void run_products(const product_t *products, int64_t n, char *scratch, pool_t *pool);
