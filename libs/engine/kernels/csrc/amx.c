#include "amx.h"

#if HAS_AMX

#define PASS_PAIRS 256 /* pairs per pass: two panels of 16 KiB and a block's rows stay in the caches */
#define BLOCK_TILES 2  /* tiles of rows in a block */

/* The layout that LDTILECFG reads. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} unit_layout_t;

/* The rows of the first and the second tile of a block, as 32 * first + second; 0: the unit is released. */
static __thread int configured;

/* The compiler does not know what memory the tile loads read. */
INLINE void finish_stores(const void *of) { __asm__ volatile("" ::"r"(of) : "memory"); }

/* Tiles 0 to 3 hold sums: of the first and the second rows of two panels, or of the first rows of four. 4 and 5 hold
 * rows, 6 and 7 panels. */
static void configure(int64_t first, int64_t second) {
    int wanted = (int)(32 * first + second);
    if (configured == wanted) return;
    unit_layout_t layout = {.palette = 1};
    const int64_t rows[] = {first, first, second, second, first, second, UNIT_PAIRS, UNIT_PAIRS};
    for (int i = 0; i < 8; i++) layout.rows[i] = (uint8_t)rows[i], layout.row_bytes[i] = 64;
    finish_stores(&layout);
    _tile_loadconfig(&layout);
    configured = wanted;
}

void release_unit(void) {
    if (configured) _tile_release();
    configured = 0;
}

/* Rows in memory as the unit loads them: `stride` bytes apart. */
typedef struct {
    const float *start;
    int64_t stride;
} unit_rows_t;

static int is_regular(const float *const *rows, int64_t n_rows, int64_t distance) {
    for (int64_t r = 2; r < n_rows; r++)
        if (rows[r] - rows[r - 1] != distance) return 0;
    return 1;
}

/* Copies n pairs of the 16 lanes of a panel into rows. */
static void turn_lanes(const float *panel, int64_t n, float *out) {
    for (int64_t i = 0; i < n; i += LANES) {
        vu words[LANES];
        UNROLL for (int r = 0; r < LANES; r++)
            words[r] = i + r < n ? (vu)load_words(panel + (i + r) * LANES) : (vu){0};
        transpose(words);
        UNROLL for (int r = 0; r < LANES; r++) store_words(out + r * PASS_PAIRS + i, (vf)words[r]);
    }
}

/* n pairs of up to 32 rows, from rows[r][offset] on: in place where the unit can load them, else copied into `room`
 * [32][PASS_PAIRS], with zeros up to a whole tile. */
static unit_rows_t place_rows(const float *const *rows, int64_t n_rows, int64_t offset, int64_t step, int64_t n,
                              float *room) {
    int64_t distance = n_rows > 1 ? rows[1] - rows[0] : 0;
    if (step == LANES) {
        for (int64_t r = 0; r < n_rows; r += LANES) turn_lanes(rows[r] + offset, n, room + r * PASS_PAIRS);
    } else if (n % UNIT_PAIRS == 0 && is_regular(rows, n_rows, distance)) {
        return (unit_rows_t){rows[0] + offset, distance * 4};
    } else {
        int64_t padded = (n + UNIT_PAIRS - 1) / UNIT_PAIRS * UNIT_PAIRS;
        for (int64_t r = 0; r < n_rows; r++) {
            memcpy(room + r * PASS_PAIRS, rows[r] + offset, (size_t)(4 * n));
            memset(room + r * PASS_PAIRS + n, 0, (size_t)(4 * (padded - n)));
        }
    }
    return (unit_rows_t){room, PASS_PAIRS * 4};
}

/* 16 rows by up to four panels, or 32 by up to two. Strides are in bytes, between panels too. */
typedef struct {
    const float *a, *b;
    float *c;
    int64_t a_stride, b_stride, c_stride, b_panel, c_panel, n_pairs;
    int accumulate;
} unit_block_t;

INLINE const float *at_row(const float *start, int64_t row, int64_t stride) {
    return (const float *)((const char *)start + row * stride);
}

/* Where the sums of a tile are. */
INLINE float *sums_at(const unit_block_t *t, int64_t tile_row, int64_t panel) {
    return (float *)((char *)t->c + tile_row * UNIT_ROWS * t->c_stride + panel * t->c_panel);
}

/* Adds 16 pairs, from `a` and `b` on. A product waits for the last one with the same sums, so four take turns. */
INLINE void add_tiles(const int is_tall, const int n_panels, const unit_block_t *t, const float *a, const float *b,
                      int64_t b_stride, int64_t b_panel) {
    _tile_loadd(4, a, t->a_stride);
    _tile_loadd(6, b, b_stride);
    _tile_dpbf16ps(0, 4, 6);
    if (n_panels > 1) {
        _tile_loadd(7, at_row(b, 1, b_panel), b_stride);
        _tile_dpbf16ps(1, 4, 7);
    }
    if (is_tall) {
        _tile_loadd(5, at_row(a, UNIT_ROWS, t->a_stride), t->a_stride);
        _tile_dpbf16ps(2, 5, 6);
        if (n_panels > 1) _tile_dpbf16ps(3, 5, 7);
    } else if (n_panels > 2) {
        _tile_loadd(6, at_row(b, 2, b_panel), b_stride);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, at_row(b, 3, b_panel), b_stride);
        _tile_dpbf16ps(3, 4, 7);
    }
}

/* Adds the last pairs of the panels, with zeros up to a whole tile: what follows a panel may be no number. */
INLINE void add_rest(const int is_tall, const int n_panels, const unit_block_t *t, int64_t first) {
    float rest[4][UNIT_PAIRS * LANES] __attribute__((aligned(64)));
    memset(rest, 0, sizeof rest);
    for (int64_t p = 0; p < n_panels; p++)
        for (int64_t i = first; i < t->n_pairs; i++)
            store_words(rest[p] + (i - first) * LANES, load_words(at_row(at_row(t->b, p, t->b_panel), i, t->b_stride)));
    finish_stores(rest);
    add_tiles(is_tall, n_panels, t, t->a + first, rest[0], 4 * LANES, sizeof rest[0]);
}

INLINE void run_block(const int is_tall, const int n_panels, const unit_block_t *t) {
    const int64_t stride = t->c_stride, whole = t->n_pairs / UNIT_PAIRS * UNIT_PAIRS;
    float *sums[] = {sums_at(t, 0, 0), sums_at(t, 0, 1), sums_at(t, is_tall, is_tall ? 0 : 2),
                     sums_at(t, is_tall, is_tall ? 1 : 3)};
    const int has[] = {1, n_panels > 1, is_tall || n_panels > 2, is_tall ? n_panels > 1 : n_panels > 2};
    if (t->accumulate) {
        _tile_loadd(0, sums[0], stride);
        if (has[1]) _tile_loadd(1, sums[1], stride);
        if (has[2]) _tile_loadd(2, sums[2], stride);
        if (has[3]) _tile_loadd(3, sums[3], stride);
    } else {
        _tile_zero(0);
        if (has[1]) _tile_zero(1);
        if (has[2]) _tile_zero(2);
        if (has[3]) _tile_zero(3);
    }
    for (int64_t i = 0; i < whole; i += UNIT_PAIRS)
        add_tiles(is_tall, n_panels, t, t->a + i, at_row(t->b, i, t->b_stride), t->b_stride, t->b_panel);
    if (whole < t->n_pairs) add_rest(is_tall, n_panels, t, whole);
    _tile_stored(0, sums[0], stride);
    if (has[1]) _tile_stored(1, sums[1], stride);
    if (has[2]) _tile_stored(2, sums[2], stride);
    if (has[3]) _tile_stored(3, sums[3], stride);
}

/* Computes as many panels as fit into a block, of n_panels; returns their number. */
static int64_t run_panels(const unit_block_t *t, int is_tall, int64_t n_panels) {
    if (is_tall) {
        if (n_panels == 1) return run_block(1, 1, t), 1;
        return run_block(1, 2, t), 2;
    }
    if (n_panels >= 4) return run_block(0, 4, t), 4;
    if (n_panels >= 2) return run_block(0, 2, t), 2;
    return run_block(0, 1, t), 1;
}

/* One pass over n pairs, from `first` on. */
static void run_pass(const tiles_t *t, int64_t first, int64_t n) {
    float room[BLOCK_TILES * UNIT_ROWS * PASS_PAIRS] __attribute__((aligned(64)));
    for (int64_t row = 0, n_rows; row < t->n_rows; row += n_rows) {
        n_rows = t->n_rows - row < BLOCK_TILES * UNIT_ROWS ? t->n_rows - row : BLOCK_TILES * UNIT_ROWS;
        int is_tall = n_rows > UNIT_ROWS;
        unit_rows_t rows = place_rows(t->a + row, n_rows, t->offset + first * t->step, t->step, n, room);
        configure(is_tall ? UNIT_ROWS : n_rows, is_tall ? n_rows - UNIT_ROWS : n_rows);
        finish_stores(room);
        unit_block_t block = {.a = rows.start, .a_stride = rows.stride,
                              .b = t->b + first * t->b_stride, .b_stride = 4 * t->b_stride, .b_panel = 4 * t->b_panel,
                              .c = t->c + row * t->c_stride, .c_stride = 4 * t->c_stride, .c_panel = 4 * t->c_panel,
                              .n_pairs = n, .accumulate = t->accumulate || first};
        for (int64_t left = t->n_panels, done; left > 0; left -= done) {
            done = run_panels(&block, is_tall, left);
            block.b += done * t->b_panel, block.c += done * t->c_panel;
        }
    }
}

void run_unit_tiles(const tiles_t *t) {
    for (int64_t first = 0; first < t->n; first += PASS_PAIRS)
        run_pass(t, first, t->n - first < PASS_PAIRS ? t->n - first : PASS_PAIRS);
}

int unit_takes_int4(const matrix_t *w) {
    return w->kind == MATRIX_INT4 && w->group % (2 * UNIT_PAIRS) == 0 && PASS_PAIRS * 2 % w->group == 0;
}

/* Columns col .. col + n_cols - 1 of one INT4 panel as pairs of whole numbers. */
static void widen_panel(const matrix_t *w, int64_t panel, int64_t col, int64_t n_cols, float *out) {
    const uint32_t *words = (const uint32_t *)w->data + (panel * w->cols + col) / 8 * LANES;
    for (int64_t i = 0; i < n_cols / 8; i++) {
        vu word = load_u32(words + i * LANES);
        UNROLL for (int j = 0; j < 4; j++) store_words(out + (4 * i + j) * LANES, nibble_pairs(word, j));
    }
}

/* The products of up to 16 rows with groups of columns `first` .. + n - 1 of a pass, for n <= 4, as whole numbers. */
static void multiply_groups(int64_t group_pairs, int64_t first, int64_t n, unit_rows_t rows, const float *b,
                            float products[4][UNIT_ROWS * LANES]) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = first * group_pairs; i < (first + 1) * group_pairs; i += UNIT_PAIRS) {
#define MULTIPLY(sums, row, panel, group)                                              \
    if (n > group) {                                                                   \
        _tile_loadd(row, rows.start + i + group * group_pairs, rows.stride);           \
        _tile_loadd(panel, b + (i + group * group_pairs) * LANES, 4 * LANES);          \
        _tile_dpbf16ps(sums, row, panel);                                              \
    }
        MULTIPLY(0, 4, 6, 0)
        MULTIPLY(1, 5, 7, 1)
        MULTIPLY(2, 4, 6, 2)
        MULTIPLY(3, 5, 7, 3)
    }
    _tile_stored(0, products[0], 4 * LANES);
    if (n > 1) _tile_stored(1, products[1], 4 * LANES);
    if (n > 2) _tile_stored(2, products[2], 4 * LANES);
    if (n > 3) _tile_stored(3, products[3], 4 * LANES);
}

/* One pass of rows by one INT4 panel. */
typedef struct {
    const matrix_t *w;
    int64_t panel, col, n_cols; /* columns col .. col + n_cols - 1 */
    unit_rows_t rows;
    int64_t n_rows;
    const float *b; /* the panel's columns as pairs of whole numbers */
    float *out;
    int64_t stride;
    int accumulate;
} unit_groups_t;

/* Adds the products of groups times their scales, in ascending order. `room` rows, at least n_rows, stay in registers. */
INLINE void add_groups(const int room, const unit_groups_t *t) {
    float products[4][UNIT_ROWS * LANES] __attribute__((aligned(64)));
    vf sum[UNIT_ROWS];
    UNROLL for (int r = 0; r < room; r++)
        sum[r] = t->accumulate && r < t->n_rows ? load(t->out + r * t->stride) : (vf){0};
    int64_t first = t->col / t->w->group, n_groups = t->n_cols / t->w->group;
    for (int64_t at = 0; at < n_groups; at += 4) {
        int64_t n = n_groups - at < 4 ? n_groups - at : 4;
        multiply_groups(t->w->group / 2, at, n, t->rows, t->b, products);
        for (int64_t i = 0; i < n; i++) {
            vf scale[NV];
            matrix_scale(t->w, t->panel, first + at + i, scale);
            UNROLL for (int r = 0; r < room; r++) sum[r] += load(products[i] + r * LANES) * scale[0];
        }
    }
    UNROLL for (int r = 0; r < room; r++)
        if (r < t->n_rows) store(t->out + r * t->stride, sum[r]);
}

static void run_groups(const unit_groups_t *t) {
    if (t->n_rows == 1) add_groups(1, t);
    else if (t->n_rows == 2) add_groups(2, t);
    else if (t->n_rows <= 4) add_groups(4, t);
    else if (t->n_rows <= 8) add_groups(8, t);
    else add_groups(UNIT_ROWS, t);
}

void run_unit_int4(const float *const *rows, int64_t n_rows, const matrix_t *w, int64_t panel, int64_t n_panels,
                   float *out, int64_t stride, int64_t out_panel, int add) {
    float widened[UNIT_PANELS][PASS_PAIRS * LANES] __attribute__((aligned(64)));
    float room[UNIT_ROWS * PASS_PAIRS] __attribute__((aligned(64)));
    for (int64_t col = 0, n; col < w->cols; col += n) {
        n = w->cols - col < 2 * PASS_PAIRS ? w->cols - col : 2 * PASS_PAIRS;
        for (int64_t row = 0; row < n_rows; row += UNIT_ROWS) {
            int64_t height = n_rows - row < UNIT_ROWS ? n_rows - row : UNIT_ROWS;
            unit_groups_t t = {.w = w, .col = col, .n_cols = n, .n_rows = height, .stride = stride,
                               .rows = place_rows(rows + row, height, col / 2, 1, n / 2, room),
                               .accumulate = add || col};
            configure(height, height);
            for (int64_t p = 0; p < n_panels; p++) {
                if (!row) widen_panel(w, panel + p, col, n, widened[p]);
                finish_stores(widened);
                t.panel = panel + p, t.b = widened[p], t.out = out + row * stride + p * out_panel;
                run_groups(&t);
            }
        }
    }
}
#endif
