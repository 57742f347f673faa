#include "panel.h"

#define BLOCK_COLS 512 /* columns per pass when a panel is widened first: 32 KiB */

/* Multiplies up to TILE_ROWS rows by one or two packed panels, which are widened in registers. */
INLINE void stream_tile(const int kind, const int n_rows, const int n_sides, const float *const *rows,
                        const panel_t *const *side, int64_t row0) {
    vf sum[2][TILE_ROWS][NV];
    const matrix_t *w = side[0]->w;
    UNROLL for (int s = 0; s < n_sides; s++)
        UNROLL for (int m = 0; m < n_rows; m++)
            UNROLL for (int v = 0; v < NV; v++)
                sum[s][m][v] = side[s]->add ? load(side[s]->out + (row0 + m) * side[s]->stride + v * VL) : (vf){0};
    const uint32_t *words[2] = {0};
    const float *floats[2] = {0};
    UNROLL for (int s = 0; s < n_sides; s++) {
        int64_t at = side[s]->panel * w->cols;
        if (kind == MATRIX_F32) floats[s] = (const float *)side[s]->w->data + at * LANES;
        if (kind == MATRIX_BF16) words[s] = (const uint32_t *)side[s]->w->data + at * (LANES / 2);
        if (kind == MATRIX_INT4) words[s] = (const uint32_t *)side[s]->w->data + at / 8 * LANES;
    }
    if (kind != MATRIX_INT4) {
        for (int64_t col = 0; col < w->cols; col++)
            UNROLL for (int s = 0; s < n_sides; s++) {
                vf lanes[NV];
                if (kind == MATRIX_BF16) widen_lanes(words[s] + col * (LANES / 2), lanes);
                else UNROLL for (int v = 0; v < NV; v++) lanes[v] = load(floats[s] + col * LANES + v * VL);
                UNROLL for (int m = 0; m < n_rows; m++)
                    UNROLL for (int v = 0; v < NV; v++) sum[s][m][v] += rows[m][col] * lanes[v];
            }
    } else {
        int64_t n_groups = w->cols / w->group;
        for (int64_t group = 0; group < n_groups; group++) {
            vf scale[2][NV];
            UNROLL for (int s = 0; s < n_sides; s++)
                matrix_scale(side[s]->w, side[s]->panel * n_groups + group, scale[s]);
            for (int64_t col = group * w->group; col < (group + 1) * w->group; col += 8)
                UNROLL for (int s = 0; s < n_sides; s++) {
                    vu word[NV];
                    UNROLL for (int v = 0; v < NV; v++) word[v] = load_u32(words[s] + col / 8 * LANES + v * VL);
                    UNROLL for (int i = 0; i < 8; i++) {
                        vf lanes[NV];
                        UNROLL for (int v = 0; v < NV; v++) lanes[v] = widen_nibbles(word[v], i) * scale[s][v];
                        UNROLL for (int m = 0; m < n_rows; m++)
                            UNROLL for (int v = 0; v < NV; v++) sum[s][m][v] += rows[m][col + i] * lanes[v];
                    }
                }
        }
    }
    UNROLL for (int s = 0; s < n_sides; s++)
        UNROLL for (int m = 0; m < n_rows; m++)
            UNROLL for (int v = 0; v < NV; v++)
                store(side[s]->out + (row0 + m) * side[s]->stride + v * VL, sum[s][m][v]);
}

#define STREAM(kind, rows_, sides) \
    case rows_: stream_tile(kind, rows_, sides, rows, side, row0); return;
#define DEFINE_STREAM(name, cases) \
    static void name(int64_t n_rows, const float *const *rows, const panel_t *const *side, int64_t row0) { \
        switch (n_rows) { cases }                                                                          \
    }
#define F32(n) STREAM(MATRIX_F32, n, 1)
#define BF16(n) STREAM(MATRIX_BF16, n, 1)
#define INT4(n) STREAM(MATRIX_INT4, n, 1)
#define PAIRS(kind) STREAM(kind, 1, 2) STREAM(kind, 2, 2) STREAM(kind, 3, 2)
DEFINE_STREAM(stream_f32_one, EACH_HEIGHT(F32))
DEFINE_STREAM(stream_bf16_one, EACH_HEIGHT(BF16))
DEFINE_STREAM(stream_int4_one, EACH_HEIGHT(INT4))
DEFINE_STREAM(stream_f32_two, PAIRS(MATRIX_F32))
DEFINE_STREAM(stream_bf16_two, PAIRS(MATRIX_BF16))
DEFINE_STREAM(stream_int4_two, PAIRS(MATRIX_INT4))

typedef void (*stream_t)(int64_t, const float *const *, const panel_t *const *, int64_t);
static const stream_t stream_one[] = {stream_f32_one, stream_bf16_one, stream_int4_one};
static const stream_t stream_two[] = {stream_f32_two, stream_bf16_two, stream_int4_two};

/* Up to so many rows, widening in registers, once per tile, is cheaper than widening into the L1 cache first. */
static int64_t stream_rows(const matrix_t *w) { return w->kind == MATRIX_INT4 ? TILE_ROWS : 4 * TILE_ROWS; }

static void widen_first(const float *const *rows, int64_t n_rows, const panel_t *a) {
    float widened[BLOCK_COLS * LANES] __attribute__((aligned(64)));
    for (int64_t col = 0; col < a->w->cols; col += BLOCK_COLS) {
        int64_t n_cols = a->w->cols - col < BLOCK_COLS ? a->w->cols - col : BLOCK_COLS;
        const float *b = matrix_panel(a->w, a->panel, col, n_cols, widened);
        tile_rows(rows, n_rows, col, 1, b, LANES, a->out, a->stride, n_cols, a->add || col > 0);
    }
}

void panel_product(const float *const *rows, int64_t n_rows, const panel_t *a, const panel_t *b) {
    if (b && n_rows <= 3 && a->w->kind == b->w->kind) {
        const panel_t *side[] = {a, b};
        stream_two[a->w->kind](n_rows, rows, side, 0);
        return;
    }
    for (; a; a = b, b = NULL) {
        if (n_rows > stream_rows(a->w)) {
            widen_first(rows, n_rows, a);
            continue;
        }
        for (int64_t row = 0, n; row < n_rows; row += n) {
            n = tile_height(n_rows - row);
            stream_one[a->w->kind](n, rows + row, &a, row);
        }
    }
}
