#include "panel.h"

#define BLOCK_COLS 512 /* columns per pass when a panel is widened first: 32 KiB */
#define PAIR_COLS 512  /* columns per pass of a packed panel: 16 KiB, and 12 KiB of a tile's rows */

/* The sums of up to two panels for the rows of a tile. */
typedef vf sums_t[2][TILE_ROWS][NV];

/* Adds columns col .. col + 1 of a BF16 panel, of which only the first may exist. */
INLINE void add_bf16(const int is_pairs, const int n_rows, const float *const *rows, int64_t col, const int n_cols,
                     const float *words, vf sum[TILE_ROWS][NV]) {
    UNROLL for (int v = 0; v < NV; v++) {
        vf both = load_words(words + v * VL);
        UNROLL for (int m = 0; m < n_rows; m++) {
            if (is_pairs) {
                sum[m][v] = add_dot(sum[m][v], rows[m] + col / 2, both);
            } else {
                sum[m][v] += rows[m][col] * even_values(both);
                if (n_cols == 2) sum[m][v] += rows[m][col + 1] * odd_values(both);
            }
        }
    }
}

/* Adds one group of columns of an INT4 panel. Pairs are multiplied by the whole numbers, and their sum by the scale. */
INLINE void add_int4(const int is_pairs, const int n_rows, const float *const *rows, int64_t col, int64_t group,
                     const float *words, const vf scale[NV], vf sum[TILE_ROWS][NV]) {
    vf whole[TILE_ROWS][NV];
    if (is_pairs)
        UNROLL for (int m = 0; m < n_rows; m++)
            UNROLL for (int v = 0; v < NV; v++) whole[m][v] = (vf){0};
    for (int64_t end = col + group; col < end; col += 8, words += LANES)
        UNROLL for (int v = 0; v < NV; v++) {
            vu word = (vu)load_words(words + v * VL);
            if (is_pairs) {
                UNROLL for (int i = 0; i < 4; i++) {
                    vf pairs = nibble_pairs(word, i);
                    UNROLL for (int m = 0; m < n_rows; m++)
                        whole[m][v] = add_dot(whole[m][v], rows[m] + col / 2 + i, pairs);
                }
            } else {
                UNROLL for (int i = 0; i < 8; i++) {
                    vf lanes = widen_nibbles(word, i) * scale[v];
                    UNROLL for (int m = 0; m < n_rows; m++) sum[m][v] += rows[m][col + i] * lanes;
                }
            }
        }
    if (is_pairs)
        UNROLL for (int m = 0; m < n_rows; m++)
            UNROLL for (int v = 0; v < NV; v++) sum[m][v] += whole[m][v] * scale[v];
}

/* Multiplies up to TILE_ROWS rows by columns col .. end - 1 of one or two packed panels, widened in registers. */
INLINE void stream_tile(const int kind, const int is_pairs, const int n_rows, const int n_sides,
                        const float *const *rows, const panel_t *const *side, int64_t row0, int64_t col, int64_t end) {
    sums_t sum;
    const matrix_t *w = side[0]->w;
    const float *data[2] = {0};
    UNROLL for (int s = 0; s < n_sides; s++) {
        const panel_t *p = side[s];
        UNROLL for (int m = 0; m < n_rows; m++)
            UNROLL for (int v = 0; v < NV; v++)
                sum[s][m][v] = p->add || col ? load(p->out + (row0 + m) * p->stride + v * VL) : (vf){0};
        int64_t panel_words = kind == MATRIX_F32 ? w->cols : kind == MATRIX_BF16 ? pairs_of(w->cols) : w->cols / 8;
        data[s] = (const float *)p->w->data + p->panel * panel_words * LANES;
    }
    if (kind == MATRIX_F32) {
        for (; col < end; col++)
            UNROLL for (int s = 0; s < n_sides; s++)
                UNROLL for (int v = 0; v < NV; v++) {
                    vf lanes = load(data[s] + col * LANES + v * VL);
                    UNROLL for (int m = 0; m < n_rows; m++) sum[s][m][v] += rows[m][col] * lanes;
                }
    } else if (kind == MATRIX_BF16) {
        for (; col + 1 < end; col += 2)
            UNROLL for (int s = 0; s < n_sides; s++)
                add_bf16(is_pairs, n_rows, rows, col, 2, data[s] + col / 2 * LANES, sum[s]);
        if (col < end)
            UNROLL for (int s = 0; s < n_sides; s++)
                add_bf16(is_pairs, n_rows, rows, col, 1, data[s] + col / 2 * LANES, sum[s]);
    } else {
        for (; col < end; col += w->group)
            UNROLL for (int s = 0; s < n_sides; s++) {
                vf scale[NV];
                matrix_scale(side[s]->w, side[s]->panel, col / w->group, scale);
                add_int4(is_pairs, n_rows, rows, col, w->group, data[s] + col / 8 * LANES, scale, sum[s]);
            }
    }
    UNROLL for (int s = 0; s < n_sides; s++)
        UNROLL for (int m = 0; m < n_rows; m++)
            UNROLL for (int v = 0; v < NV; v++)
                store(side[s]->out + (row0 + m) * side[s]->stride + v * VL, sum[s][m][v]);
}

#define STREAM(kind, is_pairs, rows_, sides) \
    case rows_: stream_tile(kind, is_pairs, rows_, sides, rows, side, row0, col, end); return;
#define DEFINE_STREAM(name, cases)                                                                          \
    static void name(int64_t n_rows, const float *const *rows, const panel_t *const *side, int64_t row0,   \
                     int64_t col, int64_t end) {                                                            \
        switch (n_rows) { cases }                                                                           \
    }
#define F32(n) STREAM(MATRIX_F32, 0, n, 1)
#define BF16(n) STREAM(MATRIX_BF16, 0, n, 1)
#define INT4(n) STREAM(MATRIX_INT4, 0, n, 1)
#define BF16_PAIRS(n) STREAM(MATRIX_BF16, HAS_PAIRS, n, 1)
#define INT4_PAIRS(n) STREAM(MATRIX_INT4, HAS_PAIRS, n, 1)
#define TWO(kind, is_pairs) STREAM(kind, is_pairs, 1, 2) STREAM(kind, is_pairs, 2, 2) STREAM(kind, is_pairs, 3, 2)
DEFINE_STREAM(stream_f32_one, EACH_HEIGHT(F32))
DEFINE_STREAM(stream_bf16_one, EACH_HEIGHT(BF16))
DEFINE_STREAM(stream_int4_one, EACH_HEIGHT(INT4))
DEFINE_STREAM(stream_f32_two, TWO(MATRIX_F32, 0))
DEFINE_STREAM(stream_bf16_two, TWO(MATRIX_BF16, 0))
DEFINE_STREAM(stream_int4_two, TWO(MATRIX_INT4, 0))
#if HAS_PAIRS
DEFINE_STREAM(dot_bf16_one, EACH_HEIGHT(BF16_PAIRS))
DEFINE_STREAM(dot_int4_one, EACH_HEIGHT(INT4_PAIRS))
#define BF16_PAIRS_TWO(n) STREAM(MATRIX_BF16, 1, n, 2)
DEFINE_STREAM(dot_bf16_two, EACH_HEIGHT(BF16_PAIRS_TWO))
DEFINE_STREAM(dot_int4_two, TWO(MATRIX_INT4, 1))
#else
#define dot_bf16_one NULL
#define dot_int4_one NULL
#define dot_bf16_two NULL
#define dot_int4_two NULL
#endif

typedef void (*stream_t)(int64_t, const float *const *, const panel_t *const *, int64_t, int64_t, int64_t);
/* By is_pairs and kind. */
static const stream_t stream_one[2][3] = {{stream_f32_one, stream_bf16_one, stream_int4_one},
                                          {NULL, dot_bf16_one, dot_int4_one}};
static const stream_t stream_two[2][3] = {{stream_f32_two, stream_bf16_two, stream_int4_two},
                                          {NULL, dot_bf16_two, dot_int4_two}};

/* Up to so many rows, widening in registers, once per tile, is cheaper than widening into the L1 cache first. */
static int64_t stream_rows(const matrix_t *w) { return w->kind == MATRIX_INT4 ? TILE_ROWS : 4 * TILE_ROWS; }

static void widen_first(const float *const *rows, int64_t n_rows, const panel_t *a) {
    float widened[BLOCK_COLS * LANES] __attribute__((aligned(64)));
    for (int64_t col = 0; col < a->w->cols; col += BLOCK_COLS) {
        int64_t n_cols = a->w->cols - col < BLOCK_COLS ? a->w->cols - col : BLOCK_COLS;
        const float *b = matrix_panel(a->w, a->panel, col, n_cols, widened);
        run_tiles((tiles_t){.accumulate = a->add || col > 0, .a = rows, .n_rows = n_rows, .offset = col, .step = 1,
                            .b = b, .b_stride = LANES, .c = a->out, .c_stride = a->stride, .n = n_cols, .n_panels = 1});
    }
}

/* Streams all rows over blocks of columns that stay in the L1 cache with a tile's rows. */
static void stream_blocks(const stream_t *by_kind, const float *const *rows, int64_t n_rows, const panel_t *const *side) {
    const matrix_t *w = side[0]->w;
    int64_t cols = w->cols, unit = w->kind == MATRIX_INT4 ? w->group : 2;
    int64_t block = n_rows <= TILE_ROWS ? cols : (PAIR_COLS + unit - 1) / unit * unit;
    for (int64_t col = 0; col < cols; col += block)
        for (int64_t row = 0, n; row < n_rows; row += n) {
            n = tile_height(n_rows - row);
            by_kind[w->kind](n, rows + row, side, row, col, col + block < cols ? col + block : cols);
        }
}

/* Most rows for which two panels are streamed side by side. A broadcast from memory slows pairs' products down,
 * so that two panels share it: 3.56 instead of 2.72 products/ns on a core of Zen 4. */
static int64_t rows_of_two(int is_pairs, const matrix_t *w) {
    return is_pairs && w->kind == MATRIX_BF16 ? BLOCK_ROWS : 3;
}

#if HAS_AMX
void unit_product(const float *const *rows, int64_t n_rows, const panel_t *first, int64_t n_panels, int64_t out_panel) {
    const matrix_t *w = first->w;
    int64_t n = pairs_of(w->cols);
    if (w->kind == MATRIX_INT4) {
        run_unit_int4(rows, n_rows, w, first->panel, n_panels, first->out, first->stride, out_panel, first->add);
        return;
    }
    run_tiles((tiles_t){.is_pairs = 1, .accumulate = first->add, .a = rows, .n_rows = n_rows, .step = 1,
                        .b = (const float *)w->data + first->panel * n * LANES, .b_stride = LANES,
                        .b_panel = n * LANES, .c = first->out, .c_stride = first->stride, .c_panel = out_panel,
                        .n = n, .n_panels = n_panels});
}
#endif

void panel_product(int is_pairs, const float *const *rows, int64_t n_rows, const panel_t *a, const panel_t *b) {
    const panel_t *side[] = {a, b};
#if HAS_AMX
    if (by_unit(is_pairs, a->w) && (!b || by_unit(is_pairs, b->w))) {
        for (int i = 0; i < 2 && side[i]; i++) unit_product(rows, n_rows, side[i], 1, 0);
        return;
    }
#endif
    if (b && n_rows <= rows_of_two(is_pairs, a->w) && a->w->kind == b->w->kind && a->w->group == b->w->group) {
        stream_blocks(stream_two[is_pairs], rows, n_rows, side);
        return;
    }
    for (int i = 0; i < 2 && side[i]; i++) {
        if (!is_pairs && n_rows > stream_rows(side[i]->w)) widen_first(rows, n_rows, side[i]);
        else stream_blocks(stream_one[is_pairs], rows, n_rows, side + i);
    }
}
