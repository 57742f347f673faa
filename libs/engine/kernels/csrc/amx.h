/* Products of pairs by the matrix unit of newer Intel processors: AMX_BF16.
 *
 * A tile is 16 rows of 16 pairs, or of 16 sums. A panel of BF16 weights is a column of such tiles already. Every output
 * element is one chain in ascending column order: of tiles' dot products with 32 columns each, for any number of rows.
 * So a row's result has the same bits in every batch. */
#pragma once

#include "tile.h"

#if defined(__AMX_BF16__)
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif

#define UNIT_ROWS 16   /* of a tile */
#define UNIT_PAIRS 16  /* of a row of a tile */
#define UNIT_PANELS 16 /* most of a work item */

/* run_tiles for pairs. With a step of LANES, `a` points to the lanes of one panel, in order. */
void run_unit_tiles(const tiles_t *t);

/* Whether run_unit_int4 multiplies by w: tiles end where groups of columns do. */
int unit_takes_int4(const matrix_t *w);

/* out[r][p][0..15] (+)= x[r] times the INT4 panels panel .. panel + n_panels - 1, for n_panels <= UNIT_PANELS. Rows of
 * out are `stride` floats apart, panels `out_panel`. */
void run_unit_int4(const float *const *rows, int64_t n_rows, const matrix_t *w, int64_t panel, int64_t n_panels,
                   float *out, int64_t stride, int64_t out_panel, int add);

/* Ends the calling thread's use of the unit, until its next product. A thread that leaves the kernels, or sleeps, must
 * call it: the system then saves less of the thread's state, and other libraries set up the unit as they need it. */
#if HAS_AMX
void release_unit(void);
#else
INLINE void release_unit(void) {}
#endif
