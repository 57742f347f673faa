/* One register tile of a matrix product.
 *
 * Every output element is one chain of fused multiply-adds, or of dot products of pairs, in ascending column order,
 * for any tile and any number of rows or threads. So a row's result has the same bits in every batch. */
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

/* c[m][0..15] (+)= sum_i a[m][offset + i * step] * b[i * b_stride + 0..15] for m < n_rows, and the same for as many
 * panels as n_panels says: b_panel and c_panel are the distances between them. With `is_pairs` the elements of a and b
 * are pairs of bf16 values; strides, offset and n count elements. */
typedef struct {
    int is_pairs, accumulate;
    const float *const *a;
    int64_t n_rows, offset, step;
    const float *b;
    int64_t b_stride, b_panel;
    float *c;
    int64_t c_stride, c_panel;
    int64_t n, n_panels;
} tiles_t;

/* Tiles of any number of rows and panels. */
void run_tiles(tiles_t t);

/* Height of the next tile. Slightly more rows than one tile are halved, because a low tile wastes the multipliers. */
INLINE int64_t tile_height(int64_t rows_left) {
    if (rows_left <= TILE_ROWS) return rows_left;
    return rows_left < TILE_ROWS * 3 / 2 ? (rows_left + 1) / 2 : TILE_ROWS;
}
