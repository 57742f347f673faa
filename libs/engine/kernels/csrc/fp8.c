/* FP8 (e4m3 of OCP's 8-bit floating point, 2023) in blocks, as bf16 or fp32: DeepSeek-V3's checkpoints. */

#include "matrix.h"

enum { NOT_A_NUMBER = 0x7f };

/* With exponent and mantissa at the places of a float's, 2^120 is missing; subnormals come out right, too. */
static inline float widened(uint8_t value) {
    uint32_t bits = (uint32_t)(value & 0x80) << 24 | (uint32_t)(value & 0x7f) << 20;
    float found;
    memcpy(&found, &bits, sizeof found);
    return found * 0x1p120f;
}

/* To the nearest, ties to even. */
static inline uint16_t rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static uint8_t widen_span(const uint8_t *values, int64_t n, float factor, float *f32, uint16_t *bf16) {
    uint8_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        uint8_t magnitude = values[i] & 0x7f;
        largest = magnitude > largest ? magnitude : largest;
    }
    if (bf16)
        for (int64_t i = 0; i < n; i++) bf16[i] = rounded(widened(values[i]) * factor);
    else
        for (int64_t i = 0; i < n; i++) f32[i] = widened(values[i]) * factor;
    return largest;
}

/* Rows x cols of a tensor from (first_row, first_col) on, each times the factor of its block; `n_factors` stand
 * in a row of `factors`. One of `f32` and `bf16` is the target. 0 when a value is NaN; there are no infinities. */
int32_t ss_widen_fp8(const uint8_t *values, int64_t rows, int64_t cols, int64_t first_row, int64_t first_col,
                     const float *factors, int64_t n_factors, int64_t block_rows, int64_t block_cols, float *f32,
                     uint16_t *bf16) {
    uint8_t largest = 0;
    for (int64_t row = 0; row < rows; row++) {
        const float *of_row = factors + (first_row + row) / block_rows * n_factors;
        int64_t end;
        for (int64_t col = 0; col < cols; col = end) {
            int64_t block = (first_col + col) / block_cols, at = row * cols + col;
            end = (block + 1) * block_cols - first_col;
            end = end < cols ? end : cols;
            uint8_t seen = widen_span(values + at, end - col, of_row[block], f32 ? f32 + at : 0, bf16 ? bf16 + at : 0);
            largest = seen > largest ? seen : largest;
        }
    }
    return largest != NOT_A_NUMBER;
}

/* A piece of a tensor in FP8, and the factors of the tensor's blocks. */
typedef struct {
    const uint8_t *values;
    int64_t rows, cols, first_row, first_col;
    const float *factors;
    int64_t n_factors, block_rows, block_cols;
} fp8_piece_t;

INLINE const float *factors_of(const fp8_piece_t *p, int64_t row) {
    return p->factors + (p->first_row + row) / p->block_rows * p->n_factors;
}

/* Sets a bit of `nan` (0x80 of each byte) at a NaN, and the sign of a value in `overflow` out of its dtype's range. */
typedef struct {
    vu nan, overflow;
} seen_t;

typedef uint8_t bytes_t __attribute__((vector_size(VL), aligned(1), may_alias));
typedef uint16_t shorts_t __attribute__((vector_size(VL * 2), aligned(1), may_alias));

/* `values` has a byte a lane. */
INLINE vf widened_words(vu values, float factor) {
    return (vf)((values & 0x80u) << 24 | (values & 0x7fu) << 20) * 0x1p120f * factor;
}

INLINE vu rounded_words(vf values) {
    vu bits = (vu)values;
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

/* VL words of a panel, before they are transposed: floats, or pairs of bf16. */
INLINE vu words_of(const uint8_t *values, float factor, int is_bf16, seen_t *seen) {
    if (!is_bf16) {
        vu stored = __builtin_convertvector(*(const bytes_t *)values, vu);
        vu word = (vu)widened_words(stored, factor);
        seen->nan |= (stored & 0x7fu) + 1u;
        seen->overflow |= (word & 0x7f800000u) + 0x00800000u;
        return word;
    }
    vu stored = __builtin_convertvector(*(const shorts_t *)values, vu);
    vu word = rounded_words(widened_words(stored & 0xffu, factor)) |
              rounded_words(widened_words(stored >> 8, factor)) << 16;
    seen->nan |= (stored & 0x7f7fu) + 0x0101u;
    seen->overflow |= (word & 0x7f807f80u) + 0x00800080u;
    return word;
}

/* The products of 128 magnitudes with one factor as bf16, NaN for that of a NaN; all rows of a square then look
 * their values up, instead of widening, multiplying and rounding each. */
#if VL == 16
typedef struct {
    const float *factor;
    __m512i products[4];
} table_t;

INLINE void fill_table(table_t *t, const float *factor) {
    if (t->factor == factor) return;
    t->factor = factor;
    for (int i = 0; i < 4; i++) {
        vu low = (vu)_mm512_add_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                      _mm512_set1_epi32(32 * i));
        vu high = low + 16u;
        __m512i found = (__m512i)rounded_words(widened_words(low, *factor));
        __m512i others = (__m512i)rounded_words(widened_words(high, *factor));
        t->products[i] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(found)),
                                            _mm512_cvtepi32_epi16(others), 1);
    }
    t->products[3] = _mm512_mask_set1_epi16(t->products[3], 0x80000000u, 0x7fff);
}

INLINE vu looked_up(const table_t *t, const uint8_t *values, seen_t *seen) {
    __m512i stored = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)values));
    __m512i low = _mm512_permutex2var_epi16(t->products[0], stored, t->products[1]);
    __m512i high = _mm512_permutex2var_epi16(t->products[2], stored, t->products[3]);
    __mmask32 is_high = _mm512_test_epi16_mask(stored, _mm512_set1_epi16(0x40));
    vu word = (vu)_mm512_mask_blend_epi16(is_high, low, high);
    word ^= (vu)_mm512_slli_epi16(stored, 8) & 0x80008000u;
    seen->overflow |= (word & 0x7f807f80u) + 0x00800080u;
    return word;
}
#else
typedef struct {
    const float *factor;
} table_t;

INLINE void fill_table(table_t *t, const float *factor) { t->factor = factor; }
INLINE vu looked_up(const table_t *t, const uint8_t *values, seen_t *seen) { return words_of(values, *t->factor, 1, seen); }
#endif

/* Word by word: what lies across blocks or at the edge of the matrix. Zeros stand for columns that are not there. */
static uint32_t word_of(const fp8_piece_t *p, const float *of_row, int64_t row, int64_t col, int is_bf16, seen_t *seen) {
    uint32_t word = 0;
    for (int i = 0; i < per_element(is_bf16) && col + i < p->cols; i++) {
        uint8_t value = p->values[row * p->cols + col + i];
        float found = widened(value) * of_row[(p->first_col + col + i) / p->block_cols];
        if (is_bf16) word |= (uint32_t)rounded(found) << (16 * i);
        else memcpy(&word, &found, sizeof word);
        seen->nan[0] |= (value & 0x7fu) + 1u;
    }
    seen->overflow[0] |= is_bf16 ? (word & 0x7f807f80u) + 0x00800080u : (word & 0x7f800000u) + 0x00800000u;
    return word;
}

/* VL words of each of 16 rows whose factors, and `block` of their columns, are the same for all those words. */
INLINE void pack_square(const fp8_piece_t *p, const float *const *of_row, const table_t *table, int64_t row,
                        int64_t col, int64_t block, uint32_t *panel, int is_bf16, seen_t *seen) {
    const uint8_t *values = p->values + row * p->cols + col;
    for (int half = 0; half < LANES; half += VL) {
        vu v[VL];
        UNROLL for (int r = 0; r < VL; r++) {
            const uint8_t *of = values + (half + r) * p->cols;
            v[r] = table ? looked_up(table, of, seen) : words_of(of, of_row[half + r][block], is_bf16, seen);
        }
        transpose(v);
        UNROLL for (int i = 0; i < VL; i++) stream_words(panel + i * LANES + half, v[i]);
    }
}

INLINE int32_t pack_fp8(const fp8_piece_t *p, uint32_t *panels, const int is_bf16) {
    const int64_t per = per_element(is_bf16), n_words = (p->cols + per - 1) / per;
    const float *of_row[LANES];
    table_t table = {0};
    seen_t seen = {0};
    uint32_t nan = 0, overflow = 0;
    for (int64_t row = 0; row < p->rows; row += LANES, panels += n_words * LANES) {
        int64_t n_rows = p->rows - row < LANES ? p->rows - row : LANES;
        for (int r = 0; r < n_rows; r++) of_row[r] = factors_of(p, row + r);
        for (int64_t word = 0, step; word < n_words; word += step) {
            int64_t col = word * per, block = (p->first_col + col) / p->block_cols;
            int64_t end = (block + 1) * p->block_cols - p->first_col; /* of the block's columns */
            uint32_t *target = panels + word * LANES;
            step = VL;
            if (n_rows == LANES && col + VL * per <= (end < p->cols ? end : p->cols)) {
                if (is_bf16 && of_row[0] == of_row[LANES - 1]) {
                    fill_table(&table, of_row[0] + block);
                    pack_square(p, of_row, &table, row, col, block, target, 1, &seen);
                } else pack_square(p, of_row, 0, row, col, block, target, is_bf16, &seen);
                continue;
            }
            step = n_words - word < VL ? n_words - word : VL;
            for (int64_t i = 0; i < step; i++)
                for (int r = 0; r < LANES; r++)
                    target[i * LANES + r] =
                        r < n_rows ? word_of(p, of_row[r], row + r, col + i * per, is_bf16, &seen) : 0;
        }
    }
    finish_stream();
    for (int i = 0; i < VL; i++) nan |= seen.nan[i], overflow |= seen.overflow[i];
    return !(nan & 0x8080u) && !(overflow & 0x80008000u);
}

/* As ss_widen_fp8, then ss_pack_bf16 or ss_pack_f32, without the values between: a third of the memory traffic. */
int32_t ss_pack_fp8(const uint8_t *values, int64_t rows, int64_t cols, int64_t first_row, int64_t first_col,
                    const float *factors, int64_t n_factors, int64_t block_rows, int64_t block_cols, uint32_t *panels,
                    int32_t is_bf16) {
    fp8_piece_t piece = {values, rows, cols, first_row, first_col, factors, n_factors, block_rows, block_cols};
    return is_bf16 ? pack_fp8(&piece, panels, 1) : pack_fp8(&piece, panels, 0);
}
