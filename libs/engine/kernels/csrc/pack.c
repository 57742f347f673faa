/* Packs the weights of a checkpoint into panels: transposes squares of words in vector registers.
 *
 * A word is a float, a pair of bf16 values, or eight INT4 values. Rows need no alignment. */
#include "matrix.h"

typedef uint32_t words_t __attribute__((vector_size(VL * 4), aligned(2), may_alias));

/* The lower, and the upper, halves of two vectors, word by word in turn. */
#if VL == 16
#define ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#define ROUNDS 4
#elif VL == 8
#define ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#define ROUNDS 3
#else
#define ZIP_LOW 0, 4, 1, 5
#define ZIP_HIGH 2, 6, 3, 7
#define ROUNDS 2
#endif

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
GATHER_EVEN(words_t, gather_even_words)

/* Row r, word c -> row c, word r: each round turns the bits of (r, c) by one place. */
INLINE void transpose(words_t v[VL]) {
    UNROLL for (int round = 0; round < ROUNDS; round++) {
        words_t next[VL];
        UNROLL for (int i = 0; i < VL / 2; i++) {
            next[2 * i] = __builtin_shufflevector(v[i], v[i + VL / 2], ZIP_LOW);
            next[2 * i + 1] = __builtin_shufflevector(v[i], v[i + VL / 2], ZIP_HIGH);
        }
        UNROLL for (int i = 0; i < VL; i++) v[i] = next[i];
    }
}

/* Packs words 0 .. n - 1, a multiple of VL, of 16 rows; adds the range check's bits to *seen. */
INLINE void pack_squares(const words_kind_t k, const char *rows, int64_t row_bytes, int64_t n, uint32_t *panel,
                         words_t *seen) {
    for (int64_t word = 0; word < n; word += VL, panel += VL * LANES)
        for (int row = 0; row < LANES; row += VL) {
            words_t v[VL];
            UNROLL for (int r = 0; r < VL; r++) {
                v[r] = *(const words_t *)(rows + (row + r) * row_bytes + word * 4);
                if (k.kind == MATRIX_INT4) v[r] = gather_even_words(v[r]) | gather_even_words(v[r] >> 4) << 16;
                else *seen |= (v[r] & k.exponents) + k.step;
            }
            transpose(v);
            UNROLL for (int i = 0; i < VL; i++) *(words_t *)(panel + i * LANES + row) = v[i];
        }
}

/* Packs words first .. n_words - 1 one by one: the last columns, and panels with less than 16 rows. */
static void pack_rest(const words_kind_t k, const char *rows, int64_t row_bytes, int64_t n_rows, int64_t first,
                      int64_t n_words, uint32_t *panel, words_t *seen) {
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
    words_t seen = {0};
    uint32_t found = 0;
    for (; rows > 0; rows -= LANES, row += LANES * row_bytes, panels += n_words * LANES) {
        int64_t whole = rows < LANES ? 0 : row_bytes / 4 / VL * VL;
        pack_squares(k, row, row_bytes, whole, panels, &seen);
        pack_rest(k, row, row_bytes, rows < LANES ? rows : LANES, whole, n_words, panels, &seen);
    }
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
