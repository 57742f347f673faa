#include "matrix.h"

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
