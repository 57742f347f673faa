#include "amx.h"

/* n_rows <= TILE_ROWS rows of one or two panels. */
INLINE void tile(const int is_pairs, const int n_rows, const int n_sides, const tiles_t *t, const int64_t step,
                 const int accumulate) {
    vf sum[TILE_ROWS][2][NV];
    const float *row[TILE_ROWS], *b = t->b;
    UNROLL for (int m = 0; m < n_rows; m++) {
        row[m] = t->a[m] + t->offset;
        UNROLL for (int s = 0; s < n_sides; s++)
            UNROLL for (int v = 0; v < NV; v++)
                sum[m][s][v] = accumulate ? load(t->c + m * t->c_stride + s * t->c_panel + v * VL) : (vf){0};
    }
    for (int64_t i = 0; i < t->n; i++, b += t->b_stride) {
        vf lanes[2][NV];
        UNROLL for (int s = 0; s < n_sides; s++)
            UNROLL for (int v = 0; v < NV; v++) lanes[s][v] = load(b + s * t->b_panel + v * VL);
        UNROLL for (int m = 0; m < n_rows; m++) {
            const float *x = row[m] + i * step;
            UNROLL for (int s = 0; s < n_sides; s++)
                UNROLL for (int v = 0; v < NV; v++)
                    sum[m][s][v] = is_pairs ? add_dot(sum[m][s][v], x, lanes[s][v]) : sum[m][s][v] + *x * lanes[s][v];
        }
    }
    UNROLL for (int m = 0; m < n_rows; m++)
        UNROLL for (int s = 0; s < n_sides; s++)
            UNROLL for (int v = 0; v < NV; v++) store(t->c + m * t->c_stride + s * t->c_panel + v * VL, sum[m][s][v]);
}

/* One case per (is_pairs, n_sides, step, accumulate), so that all are constants inside the tile. */
#define DEFINE_TILES(name, height_case) \
    static void name(const tiles_t *t) { \
        switch (t->n_rows) { EACH_HEIGHT(height_case) } \
    }
#define TILE(is_pairs, rows, sides, step, accumulate) \
    case rows: tile(is_pairs, rows, sides, t, step, accumulate); return;
#define FRESH(rows) TILE(0, rows, 1, 1, 0)
#define ADDED(rows) TILE(0, rows, 1, 1, 1)
#define FRESH_STRIDED(rows) TILE(0, rows, 1, t->step, 0)
#define ADDED_STRIDED(rows) TILE(0, rows, 1, t->step, 1)
DEFINE_TILES(fresh, FRESH)
DEFINE_TILES(added, ADDED)
DEFINE_TILES(fresh_strided, FRESH_STRIDED)
DEFINE_TILES(added_strided, ADDED_STRIDED)
typedef void (*tile_t)(const tiles_t *);
/* By step (1 or any) and accumulate. */
static const tile_t one_of_floats[] = {fresh, added, fresh_strided, added_strided};

#if HAS_PAIRS
#define FRESH_PAIRS(rows) TILE(1, rows, 1, 1, 0)
#define ADDED_PAIRS(rows) TILE(1, rows, 1, 1, 1)
#define FRESH_STRIDED_PAIRS(rows) TILE(1, rows, 1, t->step, 0)
#define ADDED_STRIDED_PAIRS(rows) TILE(1, rows, 1, t->step, 1)
DEFINE_TILES(fresh_pairs, FRESH_PAIRS)
DEFINE_TILES(added_pairs, ADDED_PAIRS)
DEFINE_TILES(fresh_strided_pairs, FRESH_STRIDED_PAIRS)
DEFINE_TILES(added_strided_pairs, ADDED_STRIDED_PAIRS)
static const tile_t one_of_pairs[] = {fresh_pairs, added_pairs, fresh_strided_pairs, added_strided_pairs};

#define FRESH_TWO(rows) TILE(1, rows, 2, 1, 0)
#define ADDED_TWO(rows) TILE(1, rows, 2, 1, 1)
#define FRESH_STRIDED_TWO(rows) TILE(1, rows, 2, t->step, 0)
#define ADDED_STRIDED_TWO(rows) TILE(1, rows, 2, t->step, 1)
DEFINE_TILES(fresh_two, FRESH_TWO)
DEFINE_TILES(added_two, ADDED_TWO)
DEFINE_TILES(fresh_strided_two, FRESH_STRIDED_TWO)
DEFINE_TILES(added_strided_two, ADDED_STRIDED_TWO)
static const tile_t two_of_pairs[] = {fresh_two, added_two, fresh_strided_two, added_strided_two};
#else
#define one_of_pairs one_of_floats
#define two_of_pairs one_of_floats
#endif

static void run_heights(tile_t any_height, tiles_t t) {
    for (int64_t left = t.n_rows; left > 0; left -= t.n_rows) {
        t.n_rows = tile_height(left);
        any_height(&t);
        t.a += t.n_rows, t.c += t.n_rows * t.c_stride;
    }
}

void run_tiles(tiles_t t) {
#if HAS_AMX
    if (t.is_pairs) {
        run_unit_tiles(&t);
        return;
    }
#endif
    int form = 2 * (t.step != 1) + t.accumulate;
    for (int64_t n; t.n_panels > 0; t.n_panels -= n, t.b += n * t.b_panel, t.c += n * t.c_panel) {
        n = t.is_pairs && t.n_panels > 1 ? 2 : 1;
        run_heights((n == 2 ? two_of_pairs : t.is_pairs ? one_of_pairs : one_of_floats)[form], t);
    }
}
