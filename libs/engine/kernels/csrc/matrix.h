/* Weights in panels of LANES output features, so that one load covers 16 of them and no sum crosses lanes.
 *
 *   F32   float    [panel][col][16]
 *   BF16  uint32_t [panel][col / 2][16]  pairs: an even column in the low half, the next one in the high half
 *   INT4  uint32_t [panel][col / 8][16]  columns 2i and 2i + 1 at bits 4i and 16 + 4i; scales as a BF16 or F32 panel
 *
 * The last panel is padded with zeros, and so is an odd last column of BF16. Panels are at a multiple of 64 bytes. */
#pragma once

#include "pairs.h"

enum { MATRIX_F32 = 0, MATRIX_BF16 = 1, MATRIX_INT4 = 2 };

typedef struct {
    const void *data;
    const void *scale; /* INT4: panels with a column for each group */
    int64_t rows, cols;
    int32_t kind, scale_kind, group, unused;
} matrix_t;

INLINE int64_t n_panels(const matrix_t *w) { return (w->rows + LANES - 1) / LANES; }

/* Pack rows into panels; 0 when a value is not finite, or would not be when it is doubled `doublings` times. */
int32_t ss_pack_f32(const float *source, int64_t rows, int64_t cols, float *panels, int32_t doublings);
int32_t ss_pack_bf16(const uint16_t *source, int64_t rows, int64_t cols, uint32_t *panels, int32_t doublings);
/* INT4 from the checkpoint's words, column i of eight at bits 4i; n_words of them in a row. */
void ss_pack_int4(const uint32_t *source, int64_t rows, int64_t n_words, uint32_t *panels);

/* Whether products with w take pairs: this processor has the unit, and the weights have no more bits. */
INLINE int takes_pairs(const matrix_t *w) { return HAS_PAIRS && w->kind != MATRIX_F32; }

/* Columns col .. col + n_cols - 1 of one panel as float [n_cols][16]: in place for F32, else in `scratch`. */
const float *matrix_panel(const matrix_t *w, int64_t panel, int64_t col, int64_t n_cols, float *scratch);

/* Column i of the eight in each word, as the value that the nibble stands for: -8 .. 7. */
INLINE vf widen_nibbles(vu words, int i) {
    return __builtin_convertvector((vi)((words >> (i / 2 * 4 + i % 2 * 16)) & 15u) - 8, vf);
}

/* Columns 2i and 2i + 1 of the eight in each word, as pairs. */
INLINE vf nibble_pairs(vu words, int i) {
#if HAS_PAIRS
    static const uint16_t values[16] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                                        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    __m512i table = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)values)); /* ignores the fifth bit */
    return (vf)_mm512_permutexvar_epi16((__m512i)(words >> (4 * i)), table);
#else
    return join_pairs(widen_nibbles(words, 2 * i), widen_nibbles(words, 2 * i + 1));
#endif
}

/* The scales of one group of columns of one panel. */
INLINE void matrix_scale(const matrix_t *w, int64_t panel, int64_t group, vf out[NV]) {
    int64_t n_groups = w->cols / w->group;
    if (w->scale_kind == MATRIX_BF16) {
        const float *words = (const float *)w->scale + (panel * pairs_of(n_groups) + group / 2) * LANES;
        UNROLL for (int v = 0; v < NV; v++) {
            vf both = load_words(words + v * VL);
            out[v] = group % 2 ? odd_values(both) : even_values(both);
        }
    } else {
        const float *values = (const float *)w->scale + (panel * n_groups + group) * LANES;
        UNROLL for (int v = 0; v < NV; v++) out[v] = load(values + v * VL);
    }
}
