/* Weights in panels of LANES output features, so that one load covers 16 of them and no sum crosses lanes.
 *
 *   F32   float    [panel][col][16]
 *   BF16  uint32_t [panel][col][8]       word j = feature j in the low half, feature j + 8 in the high half
 *   INT4  uint32_t [panel][col / 8][16]  the checkpoint's own words; scales as a BF16 or F32 panel per group
 *
 * The last panel is padded with zeros. */
#pragma once

#include "vec.h"

enum { MATRIX_F32 = 0, MATRIX_BF16 = 1, MATRIX_INT4 = 2 };

typedef struct {
    const void *data;
    const void *scale; /* INT4: panels of [cols / group] */
    int64_t rows, cols;
    int32_t kind, scale_kind, group, unused;
} matrix_t;

INLINE int64_t n_panels(const matrix_t *w) { return (w->rows + LANES - 1) / LANES; }

void ss_pack_f32(const float *source, int64_t rows, int64_t cols, float *panels);
void ss_pack_bf16(const uint16_t *source, int64_t rows, int64_t cols, uint32_t *panels);
void ss_pack_u32(const uint32_t *source, int64_t rows, int64_t cols, uint32_t *panels);

/* Columns col .. col + n_cols - 1 of one panel as float [n_cols][16]: in place for F32, else in `scratch`. */
const float *matrix_panel(const matrix_t *w, int64_t panel, int64_t col, int64_t n_cols, float *scratch);

/* Nibble i of each word, as the value it stands for: -8 .. 7. */
INLINE vf widen_nibbles(vu words, int i) {
    return __builtin_convertvector((vi)((words >> (4 * i)) & 15u) - 8, vf);
}

/* 16 bf16 values of a panel. */
INLINE void widen_lanes(const uint32_t *words, vf out[NV]) {
#if VL == 16
    __m256i both = _mm256_loadu_si256((const __m256i *)words);
    __m256i low = _mm256_slli_epi32(both, 16), high = _mm256_and_si256(both, _mm256_set1_epi32(-65536));
    out[0] = (vf)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
#else
    UNROLL for (int v = 0; v < NV / 2; v++) {
        vu both = load_u32(words + v * VL);
        out[v] = (vf)(both << 16);
        out[v + NV / 2] = (vf)(both & 0xffff0000u);
    }
#endif
}

/* The scales of one group of columns: `group` counts groups of all panels before it. */
INLINE void matrix_scale(const matrix_t *w, int64_t group, vf out[NV]) {
    if (w->scale_kind == MATRIX_BF16) widen_lanes((const uint32_t *)w->scale + group * (LANES / 2), out);
    else UNROLL for (int v = 0; v < NV; v++) out[v] = load((const float *)w->scale + group * LANES + v * VL);
}
