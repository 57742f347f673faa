/* FP8 (e4m3 of OCP's 8-bit floating point, 2023) in blocks, as bf16 or fp32: DeepSeek-V3's checkpoints. */

#include <stdint.h>
#include <string.h>

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
