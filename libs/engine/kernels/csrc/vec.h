/* Float vectors of the machine's width, in GCC/Clang vector extensions: one source for AVX2, AVX-512, NEON.
 *
 * Everything here works on groups of LANES = 16 floats, held as NV vectors of VL. */
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define VL 16
#elif defined(__AVX__)
#define VL 8
#else
#define VL 4
#endif
#define LANES 16
#define NV (LANES / VL)

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vf __attribute__((vector_size(VL * 4)));
typedef float vf_unaligned __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint32_t vu_unaligned __attribute__((vector_size(VL * 4), aligned(4), may_alias));

INLINE vf load(const float *p) { return *(const vf_unaligned *)p; }
INLINE void store(float *p, vf v) { *(vf_unaligned *)p = v; }
INLINE vu load_u32(const uint32_t *p) { return *(const vu_unaligned *)p; }
INLINE vf splat(float x) { return (vf){0} + x; }
#if VL == 8 /* one instruction each, which the compiler does not generate by itself */
INLINE vf pick(vi mask, vf yes, vf no) { return __builtin_ia32_blendvps256(no, yes, (vf)mask); }
INLINE vf vmax(vf a, vf b) { return __builtin_ia32_maxps256(a, b); }
#else
INLINE vf pick(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
#if VL == 16
INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
#else
INLINE vf vmax(vf a, vf b) { return pick(a > b, a, b); }
#endif
#endif

INLINE float widen_bf16(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

/* Round to nearest even, as torch does; NaN stays NaN. */
INLINE uint16_t narrow_bf16(float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    if (value != value) return (uint16_t)((word >> 16) | 0x40);
    return (uint16_t)((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

#if VL == 16 /* by halves, which the compiler does not do by itself */
INLINE float sum_lanes(vf v) { return _mm512_reduce_add_ps(v); }
INLINE float max_lanes(vf v) { return _mm512_reduce_max_ps(v); }
#else
INLINE float sum_lanes(vf v) {
    float total = 0;
    UNROLL for (int i = 0; i < VL; i++) total += v[i];
    return total;
}

INLINE float max_lanes(vf v) {
    float best = v[0];
    UNROLL for (int i = 1; i < VL; i++) best = v[i] > best ? v[i] : best;
    return best;
}
#endif

/* 2^x within 2 ulp for x <= 127; exactly 0 below -126, so that a masked score of -inf adds nothing. A NaN of
 * arithmetic, or widened from bf16, stays NaN. */
INLINE vf vexp2(vf x) {
#if VL == 16
    vf n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const float round_to_int = 12582912.0f; /* 1.5 * 2^23: adding it leaves the integer in the low bits */
    vf shifted = x + round_to_int, n = shifted - round_to_int;
#endif
    vf r = x - n, p = splat(1.3264727e-3f);
    p = p * r + 9.6715130e-3f;
    p = p * r + 5.5507336e-2f;
    p = p * r + 2.4022242e-1f;
    p = p * r + 6.9314700e-1f;
    p = p * r + 1.0f;
#if VL == 16
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, splat(-126), _CMP_NLT_UQ), p, n);
#else
    vi exponent = ((vi)shifted - (vi)splat(round_to_int)) << 23;
    return pick(x < -126.0f, splat(0), (vf)((vi)p + exponent));
#endif
}

/* e^x within 2 ulp for x <= 88; exactly 0 below -87. */
INLINE vf vexp(vf x) {
    const float round_to_int = 12582912.0f; /* 1.5 * 2^23: adding it leaves the integer in the low bits */
    vf clamped = vmax(x, splat(-87.0f));
    vf shifted = clamped * 1.44269504089f + round_to_int;
    vf n = shifted - round_to_int;
    vf r = clamped - n * 0.693359375f - n * -2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    vi exponent = ((vi)shifted - (vi)splat(round_to_int)) << 23;
    return pick(x < -87.0f, splat(0), (vf)((vi)p + exponent));
}

INLINE vf vsilu(vf x) {
    vf bounded = vmax(x, splat(-80.0f)); /* keeps e^-x finite; silu(-80) is 0 in fp32 anyway */
    return bounded / (1.0f + vexp(-bounded));
}

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

/* Row r, word c -> row c, word r: each round turns the bits of (r, c) by one place. */
INLINE void transpose(vu v[VL]) {
    UNROLL for (int round = 0; round < ROUNDS; round++) {
        vu next[VL];
        UNROLL for (int i = 0; i < VL / 2; i++) {
            next[2 * i] = __builtin_shufflevector(v[i], v[i + VL / 2], ZIP_LOW);
            next[2 * i + 1] = __builtin_shufflevector(v[i], v[i + VL / 2], ZIP_HIGH);
        }
        UNROLL for (int i = 0; i < VL; i++) v[i] = next[i];
    }
}
