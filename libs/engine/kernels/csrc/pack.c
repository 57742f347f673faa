/* Packs the weights of a checkpoint into panels: transposes squares of words in vector registers.
 *
 * A word is a float, a pair of bf16 values, or eight INT4 values. Rows need no alignment. */
#include "matrix.h"

typedef struct {
    int kind;
    uint32_t exponents, step, overflow; /* (w & exponents) + step has bits of `overflow` for a value out of range */
} words_kind_t;

/* Values must stay finite when they are doubled `doublings` times. */
static words_kind_t kind_of(int kind, int32_t doublings) {
    uint32_t units = (uint32_t)doublings + 1;
    if (kind == MATRIX_F32) return (words_kind_t){kind, 0x7f800000u, units << 23, 0x80000000u};
    return (words_kind_t){kind, 0x7f807f80u, units << 23 | units << 7, 0x80008000u};
}

/* Nibbles 0, 2, 4, 6 of a word in its low half. */
#define GATHER_EVEN(type, name)                     \
    INLINE type name(type word) {                   \
        word &= 0x0f0f0f0fu;                        \
        word = (word | word >> 4) & 0x00ff00ffu;    \
        return (word | word >> 8) & 0xffffu;        \
    }
GATHER_EVEN(uint32_t, gather_even)
GATHER_EVEN(vu, gather_even_words)

/* Packs words 0 .. n - 1, a multiple of VL, of 16 rows; adds the range check's bits to *seen. */
INLINE void pack_squares(const words_kind_t k, const char *rows, int64_t row_bytes, int64_t n, uint32_t *panel,
                         vu *seen) {
    for (int64_t word = 0; word < n; word += VL, panel += VL * LANES)
        for (int row = 0; row < LANES; row += VL) {
            vu v[VL];
            UNROLL for (int r = 0; r < VL; r++) {
                v[r] = (vu)load_words(rows + (row + r) * row_bytes + word * 4);
                if (k.kind == MATRIX_INT4) v[r] = gather_even_words(v[r]) | gather_even_words(v[r] >> 4) << 16;
                else *seen |= (v[r] & k.exponents) + k.step;
            }
            transpose(v);
            UNROLL for (int i = 0; i < VL; i++) stream_words(panel + i * LANES + row, v[i]);
        }
}

/* Packs words first .. n_words - 1 one by one: the last columns, and panels with less than 16 rows. */
static void pack_rest(const words_kind_t k, const char *rows, int64_t row_bytes, int64_t n_rows, int64_t first,
                      int64_t n_words, uint32_t *panel, vu *seen) {
    for (int64_t row = 0; row < LANES; row++)
        for (int64_t i = first; i < n_words; i++) {
            uint32_t word = 0;
            int64_t left = row_bytes - 4 * i;
            if (row < n_rows) memcpy(&word, rows + row * row_bytes + 4 * i, left < 4 ? (size_t)left : 4);
            if (k.kind == MATRIX_INT4 && row < n_rows) word = gather_even(word) | gather_even(word >> 4) << 16;
            else (*seen)[0] |= (word & k.exponents) + k.step;
            panel[i * LANES + row] = word;
        }
}

INLINE int32_t pack_rows(const words_kind_t k, const void *source, int64_t rows, int64_t row_bytes, uint32_t *panels) {
    int64_t n_words = (row_bytes + 3) / 4;
    const char *row = source;
    vu seen = {0};
    uint32_t found = 0;
    for (; rows > 0; rows -= LANES, row += LANES * row_bytes, panels += n_words * LANES) {
        int64_t whole = rows < LANES ? 0 : row_bytes / 4 / VL * VL;
        pack_squares(k, row, row_bytes, whole, panels, &seen);
        pack_rest(k, row, row_bytes, rows < LANES ? rows : LANES, whole, n_words, panels, &seen);
    }
    finish_stream();
    for (int i = 0; i < VL; i++) found |= seen[i];
    return k.kind == MATRIX_INT4 || !(found & k.overflow);
}

int32_t ss_pack_f32(const float *source, int64_t rows, int64_t cols, float *panels, int32_t doublings) {
    return pack_rows(kind_of(MATRIX_F32, doublings), source, rows, cols * 4, (uint32_t *)panels);
}

int32_t ss_pack_bf16(const uint16_t *source, int64_t rows, int64_t cols, uint32_t *panels, int32_t doublings) {
    return pack_rows(kind_of(MATRIX_BF16, doublings), source, rows, cols * 2, panels);
}

void ss_pack_int4(const uint32_t *source, int64_t rows, int64_t n_words, uint32_t *panels) {
    pack_rows(kind_of(MATRIX_INT4, 0), source, rows, n_words * 4, panels);
}
