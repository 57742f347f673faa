#include "matrix.h"

void ss_pack_f32(const float *source, int64_t rows, int64_t cols, float *panels) {
    for (int64_t row0 = 0; row0 < rows; row0 += LANES, panels += cols * LANES)
        for (int64_t lane = 0; lane < LANES; lane++)
            for (int64_t col = 0; col < cols; col++)
                panels[col * LANES + lane] = row0 + lane < rows ? source[(row0 + lane) * cols + col] : 0;
}

void ss_pack_bf16(const uint16_t *source, int64_t rows, int64_t cols, uint32_t *panels) {
    for (int64_t row0 = 0; row0 < rows; row0 += LANES, panels += pairs_of(cols) * LANES)
        for (int64_t lane = 0; lane < LANES; lane++) {
            const uint16_t *row = source + (row0 + lane) * cols;
            int64_t present = row0 + lane < rows ? cols : 0;
            for (int64_t pair = 0; pair < pairs_of(cols); pair++) {
                uint32_t even = 2 * pair < present ? row[2 * pair] : 0;
                uint32_t odd = 2 * pair + 1 < present ? row[2 * pair + 1] : 0;
                panels[pair * LANES + lane] = even | odd << 16;
            }
        }
}

/* Nibbles 0, 2, 4, 6 of a word in its low half. */
static uint32_t gather_even(uint32_t word) {
    word &= 0x0f0f0f0fu;
    word = (word | word >> 4) & 0x00ff00ffu;
    return (word | word >> 8) & 0xffffu;
}

void ss_pack_int4(const uint32_t *source, int64_t rows, int64_t n_words, uint32_t *panels) {
    for (int64_t row0 = 0; row0 < rows; row0 += LANES, panels += n_words * LANES)
        for (int64_t lane = 0; lane < LANES; lane++)
            for (int64_t i = 0; i < n_words; i++) {
                uint32_t word = row0 + lane < rows ? source[(row0 + lane) * n_words + i] : 0;
                panels[i * LANES + lane] = gather_even(word) | gather_even(word >> 4) << 16;
            }
}

static void expand_bf16(const matrix_t *w, int64_t panel, int64_t col0, int64_t n_cols, float *out) {
    const float *words = (const float *)w->data + (panel * pairs_of(w->cols) + col0 / 2) * LANES;
    for (int64_t col = 0; col < n_cols; col++)
        UNROLL for (int v = 0; v < NV; v++) {
            vf both = load_words(words + col / 2 * LANES + v * VL);
            store(out + col * LANES + v * VL, col % 2 ? odd_values(both) : even_values(both));
        }
}

/* (nibble - 8) * scale in fp32: the exact product, as the reference dequantisation before any rounding. */
static void expand_int4(const matrix_t *w, int64_t panel, int64_t col0, int64_t n_cols, float *out) {
    const uint32_t *words = (const uint32_t *)w->data + (panel * w->cols + col0) / 8 * LANES;
    for (int64_t col = 0; col < n_cols; col += 8, words += LANES) {
        vf scale[NV];
        vu word[NV];
        matrix_scale(w, panel, (col0 + col) / w->group, scale);
        UNROLL for (int v = 0; v < NV; v++) word[v] = load_u32(words + v * VL);
        UNROLL for (int i = 0; i < 8; i++)
            UNROLL for (int v = 0; v < NV; v++)
                store(out + (col + i) * LANES + v * VL, widen_nibbles(word[v], i) * scale[v]);
    }
}

const float *matrix_panel(const matrix_t *w, int64_t panel, int64_t col, int64_t n_cols, float *scratch) {
    switch (w->kind) {
    case MATRIX_F32: return (const float *)w->data + (panel * w->cols + col) * LANES;
    case MATRIX_BF16: expand_bf16(w, panel, col, n_cols, scratch); break;
    default: expand_int4(w, panel, col, n_cols, scratch);
    }
    return scratch;
}
