/* Numbers and vectors. Activations are float32 or bfloat16, and are computed with in float32.
   Vectors are GCC's, which compiles them for any width that the processor has. */

#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef float lanes __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));
typedef int8_t bytes __attribute__((vector_size(16)));

#define INLINE static inline __attribute__((always_inline))

INLINE lanes load(const float *p) { lanes v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, lanes v) { memcpy(p, &v, sizeof v); }
INLINE lanes all(float x) { return x - (lanes){0}; }
INLINE lanes pick(ints which, lanes yes, lanes no) {
    ints a, b;
    lanes v;
    memcpy(&a, &yes, sizeof a);
    memcpy(&b, &no, sizeof b);
    a = (which & a) | (~which & b);
    memcpy(&v, &a, sizeof v);
    return v;
}

INLINE float widened(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Rounds to the nearest, ties to even. NaN stays NaN. */
INLINE uint16_t narrowed(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* Element i of an array of either type. */
INLINE float get(const void *x, int64_t i, int narrow) {
    return narrow ? widened(((const uint16_t *)x)[i]) : ((const float *)x)[i];
}
INLINE void put(void *x, int64_t i, float value, int narrow) {
    if (narrow) ((uint16_t *)x)[i] = narrowed(value);
    else ((float *)x)[i] = value;
}
INLINE words widened_all(halves x) {
#ifdef __AVX512F__ /* in one instruction, which not all versions of GCC see */
    return (words)_mm512_cvtepu16_epi32((__m256i)x);
#else
    return __builtin_convertvector(x, words);
#endif
}
INLINE ints signed_all(bytes x) {
#ifdef __AVX512F__
    return (ints)_mm512_cvtepi8_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, ints);
#endif
}
/* 16 elements from i on. */
INLINE lanes take(const void *x, int64_t i, int narrow) {
    if (!narrow) return load((const float *)x + i);
    halves small;
    memcpy(&small, (const uint16_t *)x + i, sizeof small);
    words bits = widened_all(small) << 16;
    lanes v;
    memcpy(&v, &bits, sizeof v);
    return v;
}
INLINE void give(void *x, int64_t i, lanes v, int narrow) {
    if (!narrow) {
        store((float *)x + i, v);
        return;
    }
    words bits;
    memcpy(&bits, &v, sizeof bits);
    words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words is_number = (words)(v == v);
    halves small =
        __builtin_convertvector((is_number & rounded) | (~is_number & 0x7fc0), halves);
    memcpy((uint16_t *)x + i, &small, sizeof small);
}

INLINE float sum_of(lanes v) {
    float total = 0;
    for (int i = 0; i < 16; i++) total += v[i];
    return total;
}
INLINE float max_of(lanes v) {
    float most = v[0];
    for (int i = 1; i < 16; i++) most = v[i] > most ? v[i] : most;
    return most;
}

/* e^x for x <= 0, 0 below -87 (Cephes' expf: within 2 units in the last place). */
INLINE lanes exp_of(lanes x) {
    ints far = x < all(-87.0f);
    x = pick(far, all(-87.0f), x);
    lanes shifted = x * 1.44269504f + 12582912.0f; /* rounds to a whole number */
    lanes n = shifted - 12582912.0f;
    lanes r = x - n * 0.693359375f + n * 2.12194440e-4f;
    lanes y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    ints exponent = (__builtin_convertvector(n, ints) + 127) << 23;
    lanes power;
    memcpy(&power, &exponent, sizeof power);
    y = y * power;
    return pick(far, (lanes){0}, y);
}

/* x / (1 + e^-x), without overflow. */
INLINE lanes silu(lanes x) {
    ints below = x < 0.0f;
    lanes small = exp_of(pick(below, x, -x));
    return pick(below, x * small, x) / (1.0f + small);
}
