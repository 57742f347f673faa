#include "matrix.h"

#define DEFINE_PACK(name, type, to_lane)                                                        \
    void name(const type *source, int64_t rows, int64_t cols, to_lane *panels) {                \
        for (int64_t row0 = 0; row0 < rows; row0 += LANES, panels += cols * LANES)              \
            for (int64_t lane = 0; lane < LANES; lane++)                                        \
                for (int64_t col = 0; col < cols; col++)                                        \
                    panels[col * LANES + lane] =                                                \
                        row0 + lane < rows ? (to_lane)source[(row0 + lane) * cols + col] : 0;   \
    }

DEFINE_PACK(ss_pack_f32, float, float)
DEFINE_PACK(ss_pack_u32, uint32_t, uint32_t)

void ss_pack_bf16(const uint16_t *source, int64_t rows, int64_t cols, uint32_t *panels) {
    for (int64_t row0 = 0; row0 < rows; row0 += LANES, panels += cols * LANES / 2)
        for (int64_t pair = 0; pair < LANES / 2; pair++) {
            int64_t low = row0 + pair, high = row0 + pair + LANES / 2;
            for (int64_t col = 0; col < cols; col++) {
                uint32_t low_bits = low < rows ? source[low * cols + col] : 0;
                uint32_t high_bits = high < rows ? source[high * cols + col] : 0;
                panels[col * (LANES / 2) + pair] = low_bits | high_bits << 16;
            }
        }
}

static void expand_bf16(const uint32_t *words, int64_t n_cols, float *out) {
    for (int64_t col = 0; col < n_cols; col++) {
        vf lanes[NV];
        widen_lanes(words + col * (LANES / 2), lanes);
        UNROLL for (int v = 0; v < NV; v++) store(out + col * LANES + v * VL, lanes[v]);
    }
}

/* (nibble - 8) * scale in fp32: the exact product, as the reference dequantisation before any rounding. */
static void expand_int4(const matrix_t *w, int64_t panel, int64_t col0, int64_t n_cols, float *out) {
    const uint32_t *words = (const uint32_t *)w->data + (panel * w->cols + col0) / 8 * LANES;
    int64_t n_groups = w->cols / w->group;
    for (int64_t col = 0; col < n_cols; col += 8, words += LANES) {
        vf scale[NV];
        vu word[NV];
        matrix_scale(w, panel * n_groups + (col0 + col) / w->group, scale);
        UNROLL for (int v = 0; v < NV; v++) word[v] = load_u32(words + v * VL);
        UNROLL for (int i = 0; i < 8; i++)
            UNROLL for (int v = 0; v < NV; v++)
                store(out + (col + i) * LANES + v * VL, widen_nibbles(word[v], i) * scale[v]);
    }
}

const float *matrix_panel(const matrix_t *w, int64_t panel, int64_t col, int64_t n_cols, float *scratch) {
    int64_t at = panel * w->cols + col;
    switch (w->kind) {
    case MATRIX_F32: return (const float *)w->data + at * LANES;
    case MATRIX_BF16: expand_bf16((const uint32_t *)w->data + at * (LANES / 2), n_cols, scratch); break;
    default: expand_int4(w, panel, col, n_cols, scratch);
    }
    return scratch;
}
