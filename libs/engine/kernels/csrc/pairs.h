/* Pairs of bf16 values, two to a word, and their dot products with fp32 sums: AVX512_BF16.
 *
 * A word of two values has the size of a float, so buffers, strides and tiles of both forms are the same. Words are
 * only moved, never computed with, as floats. Processors without the unit never run the emulation. */
#pragma once

#include "vec.h"

#if defined(__AVX512BF16__)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

/* Values of an element: a float, or a pair. */
INLINE int64_t per_element(int is_pairs) { return is_pairs ? 2 : 1; }
INLINE int64_t pairs_of(int64_t n) { return (n + 1) / 2; }

INLINE vf load_words(const void *words) {
    vf value;
    memcpy(&value, words, sizeof value);
    return value;
}
INLINE void store_words(void *words, vf v) { memcpy(words, &v, sizeof v); }

/* Past the caches where a vector is a cache line, which the processor then need not read before. Other threads see
 * the words after `finish_stream`. On AVX-512, words are at a multiple of 64 bytes. */
#if VL == 16
INLINE void stream_words(void *words, vu v) { _mm512_stream_ps(words, (__m512)v); }
INLINE void finish_stream(void) { _mm_sfence(); }
#else
INLINE void stream_words(void *words, vu v) { store_words(words, (vf)v); }
INLINE void finish_stream(void) {}
#endif

INLINE vf even_values(vf words) { return (vf)((vu)words << 16); }
INLINE vf odd_values(vf words) { return (vf)((vu)words & 0xffff0000u); }

#if HAS_PAIRS
/* sum + the dot product of the pair at `a` with the pair of each lane of `words`. */
INLINE vf add_dot(vf sum, const float *a, vf words) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(*a), (__m512bh)words);
}
/* Words of `even` (low halves) and `odd`, rounded to nearest even. */
INLINE vf join_pairs(vf even, vf odd) {
    static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    return (vf)_mm512_permutexvar_epi16(_mm512_loadu_si512(order), both);
}
/* The words of two vectors' values, in order. */
INLINE vf narrow_values(vf low, vf high) { return (vf)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }
#else
INLINE vf add_dot(vf sum, const float *a, vf words) {
    uint32_t word;
    memcpy(&word, a, 4);
    return sum + widen_bf16((uint16_t)word) * even_values(words) + widen_bf16((uint16_t)(word >> 16)) * odd_values(words);
}
INLINE vf join_pairs(vf even, vf odd) {
    vu words;
    UNROLL for (int i = 0; i < VL; i++)
        words[i] = narrow_bf16(even[i]) | (uint32_t)narrow_bf16(odd[i]) << 16;
    return (vf)words;
}
INLINE vf narrow_values(vf low, vf high) {
    vu words;
    UNROLL for (int i = 0; i < VL; i++) {
        const vf of = i < VL / 2 ? low : high;
        words[i] = narrow_bf16(of[2 * i % VL]) | (uint32_t)narrow_bf16(of[(2 * i + 1) % VL]) << 16;
    }
    return (vf)words;
}
#endif

/* n values as pairs_of(n) words; an odd last value has 0 beside it. */
INLINE void narrow_row(const float *x, int64_t n, float *words) {
    int64_t i = 0;
#if HAS_PAIRS
    for (; i + 32 <= n; i += 32)
        store_words(words + i / 2, narrow_values(load(x + i), load(x + i + 16)));
    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256((__m256i *)(words + i / 2), (__m256i)_mm512_cvtneps_pbh((__m512)load(x + i)));
#endif
    for (; i < n; i += 2) {
        uint32_t word = narrow_bf16(x[i]) | (i + 1 < n ? (uint32_t)narrow_bf16(x[i + 1]) << 16 : 0);
        memcpy(words + i / 2, &word, 4);
    }
}

/* n words of the values of two rows: those of `even` in the low halves. */
INLINE void join_bf16(const uint16_t *even, const uint16_t *odd, int64_t n, float *words) {
    int64_t i = 0;
#if HAS_PAIRS
    static const uint16_t order[64] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                       8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47,
                                       16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
                                       24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    __m512i low = _mm512_loadu_si512(order), high = _mm512_loadu_si512(order + 32);
    for (; i + 32 <= n; i += 32) {
        __m512i a = _mm512_loadu_si512(even + i), b = _mm512_loadu_si512(odd + i);
        store_words(words + i, (vf)_mm512_permutex2var_epi16(a, low, b));
        store_words(words + i + 16, (vf)_mm512_permutex2var_epi16(a, high, b));
    }
#endif
    for (; i < n; i++) {
        uint32_t word = even[i] | (uint32_t)odd[i] << 16;
        memcpy(words + i, &word, 4);
    }
}
