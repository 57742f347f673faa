#include "gemm.h"
#include "panel.h"

#define MAX_GROUP UNIT_PANELS          /* panels of a work item */
#define MIN_GROUP (HAS_AMX ? 4 : 2)    /* so many share a row's loads, or hide each other's latency */

#define NARROW_ROWS 16 /* of a work item */

typedef struct {
    const float *x;
    int64_t x_stride, n_rows, n;
    float *words;
    int64_t words_stride;
} narrowing_t;

static void narrow_item(void *arguments, int64_t item, int thread) {
    const narrowing_t *t = arguments;
    (void)thread;
    for (int64_t r = item * NARROW_ROWS; r < t->n_rows && r < (item + 1) * NARROW_ROWS; r++)
        narrow_row(t->x + r * t->x_stride, t->n, t->words + r * t->words_stride);
}

void narrow_rows(const float *x, int64_t x_stride, int64_t n_rows, int64_t n, float *words, int64_t words_stride,
                 pool_t *pool) {
    narrowing_t t = {x, x_stride, n_rows, n, words, words_stride};
    pool_run(n_rows * n > SERIAL_WORK ? pool : NULL, narrow_item, &t, (n_rows + NARROW_ROWS - 1) / NARROW_ROWS);
}

/* Computes some rows of a product; `rows` are their x. */
typedef struct {
    const product_t *p;
    const float *const *rows;
    int64_t row0, n_rows;
} block_t;

static int64_t lanes_of(const product_t *p, int64_t panel) {
    int64_t left = p->w->rows - panel * LANES;
    return left < LANES ? left : LANES;
}

static float *out_of(const block_t *b, int64_t panel) {
    return b->p->out + b->row0 * b->p->out_stride + panel * LANES;
}

/* Stores one row's results of a panel. Those beyond the last row of the matrix are zeros, and complete a pair. */
static void store_row(const block_t *b, int64_t panel, int64_t r, const float *values) {
    const product_t *p = b->p;
    int64_t lanes = lanes_of(p, panel);
    float words[LANES / 2], *row = p->out + (b->row0 + r) * p->out_stride;
    if (p->narrows) {
        narrow_row(values, LANES, words);
        memcpy(row + panel * (LANES / 2), words, (size_t)(4 * pairs_of(lanes)));
    } else {
        memcpy(row + panel * LANES, values, (size_t)(4 * lanes));
    }
}

/* gate and up: [rows][16] of a panel. */
static void store_gated(const block_t *b, int64_t panel, float *gate, const float *up) {
    for (int64_t r = 0; r < b->n_rows; r++) {
        UNROLL for (int v = 0; v < NV; v++) {
            float *at = gate + r * LANES + v * VL;
            store(at, vsilu(load(at)) * load(up + r * LANES + v * VL));
        }
        store_row(b, panel, r, gate + r * LANES);
    }
}

static void gated_panel(const block_t *b, int64_t panel) {
    float gate[BLOCK_ROWS * LANES] __attribute__((aligned(64)));
    float up[BLOCK_ROWS * LANES] __attribute__((aligned(64)));
    panel_t gate_panel = {b->p->w, panel, gate, LANES, 0}, up_panel = {b->p->up, panel, up, LANES, 0};
    panel_product((int)b->p->is_pairs, b->rows, b->n_rows, &gate_panel, &up_panel);
    store_gated(b, panel, gate, up);
}

/* Computes the last panel, where fewer than 16 results of a row may be written. */
static void partial_panel(const block_t *b, int64_t panel) {
    float padded[BLOCK_ROWS * LANES] __attribute__((aligned(64)));
    float *out = out_of(b, panel);
    int64_t stride = b->p->out_stride, n_bytes = 4 * lanes_of(b->p, panel);
    memset(padded, 0, sizeof(float) * (size_t)(b->n_rows * LANES));
    if (b->p->add)
        for (int64_t r = 0; r < b->n_rows; r++) memcpy(padded + r * LANES, out + r * stride, n_bytes);
    panel_t side = {b->p->w, panel, padded, LANES, 1};
    panel_product((int)b->p->is_pairs, b->rows, b->n_rows, &side, NULL);
    for (int64_t r = 0; r < b->n_rows; r++) memcpy(out + r * stride, padded + r * LANES, n_bytes);
}

#if HAS_AMX
/* All panels of a work item at once: rows that are not apart by one distance are copied for the unit only once. */
static void gated_panels(const block_t *b, int64_t panel, int64_t end) {
    float gate[UNIT_PANELS][BLOCK_ROWS * LANES] __attribute__((aligned(64)));
    float up[UNIT_PANELS][BLOCK_ROWS * LANES] __attribute__((aligned(64)));
    panel_t gates = {b->p->w, panel, gate[0], LANES, 0}, ups = {b->p->up, panel, up[0], LANES, 0};
    unit_product(b->rows, b->n_rows, &gates, end - panel, BLOCK_ROWS * LANES);
    unit_product(b->rows, b->n_rows, &ups, end - panel, BLOCK_ROWS * LANES);
    for (int64_t i = 0; i < end - panel; i++) store_gated(b, panel + i, gate[i], up[i]);
}

static void run_unit_panels(const block_t *b, int64_t panel, int64_t end) {
    const product_t *p = b->p;
    int64_t whole = p->w->rows / LANES < end ? p->w->rows / LANES : end;
    panel_t first = {p->w, panel, out_of(b, panel), p->out_stride, (int)p->add};
    if (panel < whole) unit_product(b->rows, b->n_rows, &first, whole - panel, LANES);
    if (whole < end) partial_panel(b, whole);
}
#endif

static void run_panels(const block_t *b, int64_t panel, int64_t end) {
    const product_t *p = b->p;
#if HAS_AMX
    if (by_unit((int)p->is_pairs, p->w) && (!p->up || by_unit((int)p->is_pairs, p->up))) {
        p->up ? gated_panels(b, panel, end) : run_unit_panels(b, panel, end);
        return;
    }
#endif
    if (p->up) {
        for (; panel < end; panel++) gated_panel(b, panel);
        return;
    }
    int64_t whole = p->w->rows / LANES < end ? p->w->rows / LANES : end;
    for (; panel < whole; panel += 2) {
        panel_t first = {p->w, panel, out_of(b, panel), p->out_stride, (int)p->add};
        panel_t second = {p->w, panel + 1, out_of(b, panel + 1), p->out_stride, (int)p->add};
        panel_product((int)b->p->is_pairs, b->rows, b->n_rows, &first, panel + 1 < whole ? &second : NULL);
    }
    if (whole < end) partial_panel(b, whole);
}

size_t products_room(int64_t n) { return ROOM(int64_t, n + 1); }

static int64_t blocks_of(const product_t *p) { return (p->n_rows + BLOCK_ROWS - 1) / BLOCK_ROWS; }
static int64_t groups_of(const product_t *p, int64_t group) { return (n_panels(p->w) + group - 1) / group; }

typedef struct {
    const product_t *products;
    const int64_t *first_item; /* of each product; ends with the number of items */
    int64_t n, group;
} share_t;

/* Multiplies one block of rows by one group of panels. */
static void run_item(void *arguments, int64_t item, int thread) {
    const share_t *share = arguments;
    int64_t low = 0, high = share->n - 1;
    (void)thread;
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (share->first_item[middle] <= item) low = middle;
        else high = middle - 1;
    }
    const product_t *p = share->products + low;
    int64_t within = item - share->first_item[low], n_groups = groups_of(p, share->group);
    int64_t row0 = within / n_groups * BLOCK_ROWS, panel = within % n_groups * share->group;
    int64_t n_rows = p->n_rows - row0 < BLOCK_ROWS ? p->n_rows - row0 : BLOCK_ROWS;
    int64_t end = panel + share->group < n_panels(p->w) ? panel + share->group : n_panels(p->w);
    const float *rows[BLOCK_ROWS];
    for (int64_t r = 0; r < n_rows; r++)
        rows[r] = p->x + (p->row_of ? p->row_of[row0 + r] : row0 + r) * p->x_stride;
    run_panels(&(block_t){p, rows, row0, n_rows}, panel, end);
}

void run_products(const product_t *products, int64_t n, char *scratch, pool_t *pool) {
    int64_t *first_item = (int64_t *)scratch, total = 0, work = 0, group;
    for (int64_t i = 0; i < n; i++) {
        total += blocks_of(products + i) * n_panels(products[i].w);
        work += products[i].n_rows * products[i].w->rows * products[i].w->cols;
    }
    group = total / (pool_threads(pool) * 6); /* about six items per thread, so that others help a delayed one */
    group = group < MIN_GROUP ? MIN_GROUP : group > MAX_GROUP ? MAX_GROUP : group;
    first_item[0] = 0;
    for (int64_t i = 0; i < n; i++)
        first_item[i + 1] = first_item[i] + blocks_of(products + i) * groups_of(products + i, group);
    share_t share = {products, first_item, n, group};
    pool_run(work > SERIAL_WORK ? pool : NULL, run_item, &share, first_item[n]);
}
