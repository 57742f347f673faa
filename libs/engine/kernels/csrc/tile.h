/* One register tile of a matrix product.
 *
 * Every output element is one chain of fused multiply-adds in ascending column order, for any tile and any number
 * of rows or threads. So a row's result has the same bits in every batch. */
#pragma once

#include "matrix.h"

/* Rows of a tile: with 16 AVX2 registers, 6 x 2 sums, 2 of a panel and a broadcast; with 32 of AVX-512, 12 sums. */
#if VL == 16
#define TILE_ROWS 12
#define EACH_HEIGHT(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
#else
#define TILE_ROWS 6
#define EACH_HEIGHT(X) X(1) X(2) X(3) X(4) X(5) X(6)
#endif

/* c[m][0..15] (+)= sum_i a[m][offset + i * step] * b[i * b_stride + 0..15] for m < n_rows <= TILE_ROWS. */
INLINE void tile(const int n_rows, const float *const *a, int64_t offset, const int64_t step, const float *b,
                 int64_t b_stride, float *c, int64_t c_stride, int64_t n, const int accumulate) {
    vf sum[TILE_ROWS][NV];
    const float *row[TILE_ROWS];
    UNROLL for (int m = 0; m < n_rows; m++) {
        row[m] = a[m] + offset;
        UNROLL for (int v = 0; v < NV; v++) sum[m][v] = accumulate ? load(c + m * c_stride + v * VL) : (vf){0};
    }
    for (int64_t i = 0; i < n; i++) {
        vf lanes[NV];
        UNROLL for (int v = 0; v < NV; v++) lanes[v] = load(b + i * b_stride + v * VL);
        UNROLL for (int m = 0; m < n_rows; m++) {
            float x = row[m][i * step];
            UNROLL for (int v = 0; v < NV; v++) sum[m][v] += x * lanes[v];
        }
    }
    UNROLL for (int m = 0; m < n_rows; m++)
        UNROLL for (int v = 0; v < NV; v++) store(c + m * c_stride + v * VL, sum[m][v]);
}

/* Height of the next tile. Slightly more rows than one tile are halved, because a low tile wastes the multipliers. */
INLINE int64_t tile_height(int64_t rows_left) {
    if (rows_left <= TILE_ROWS) return rows_left;
    return rows_left < TILE_ROWS * 3 / 2 ? (rows_left + 1) / 2 : TILE_ROWS;
}
