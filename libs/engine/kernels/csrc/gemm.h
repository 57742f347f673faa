/* Batches of matrix products whose panels are distributed among the threads. */
#pragma once

#include "context.h"
#include "matrix.h"
#include "tile.h"

/* With fewer multiplications, a few microseconds of work, distributing them costs more than it gains. */
#define SERIAL_WORK (64 * 1024)

/* out[r] (+)= W x[r], or out[r] = silu(W x[r]) * (up x[r]) when `up` is given. Matrices take pairs with `is_pairs`. */
typedef struct {
    const float *x;
    int64_t x_stride;
    int64_t is_pairs;      /* 1: x holds pairs of bf16 values */
    const int32_t *row_of; /* x row of each output row; NULL: the same */
    int64_t n_rows;
    const matrix_t *w, *up;
    float *out;
    int64_t out_stride;
    int64_t add;          /* 1: add to what `out` holds */
    int64_t narrows;      /* with `up`, 1: `out` takes pairs of bf16 values */
} product_t;

/* Narrows rows of n values to pairs, rows of pairs_of(n) words, words_stride apart. */
void narrow_rows(const float *x, int64_t x_stride, int64_t n_rows, int64_t n, float *words, int64_t words_stride,
                 pool_t *pool);

/* Scratch bytes that run_products needs for n products. */
size_t products_room(int64_t n);

/* Runs products that do not overlap in `out`. */
void run_products(const product_t *products, int64_t n, char *scratch, pool_t *pool);
