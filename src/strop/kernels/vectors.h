/* What the kernels share: vectors of 16 fp32 numbers, how bf16 and fp32 become such and back, their
 * sum by one order of additions, exp and what is made of it. Plain C with GCC's vector extension: the compiler makes a version of every
 * VERSIONS function for each level of the processor.
 */
#ifndef STROP_VECTORS_H
#define STROP_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define VERSIONS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VERSIONS
#endif
#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16, SHARED = 1 << 16 };

/* A pass over fewer than SHARED numbers isn't worth the tens of microseconds that it takes to wake a second thread. */
#define FOR_TOKENS                                                                                                     \
    _Pragma("omp parallel for num_threads(threads) if (tokens * width >= SHARED) schedule(static)") for (              \
        long t = 0; t < tokens; t++)

typedef float vector __attribute__((vector_size(4 * LANES)));
typedef int32_t integers __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

INLINE vector load_bf16(const uint16_t *from) {
    halves h;
    memcpy(&h, from, sizeof h);
    return (vector)(__builtin_convertvector(h, words) << 16);
}

INLINE vector load_fp32(const float *from) {
    vector v;
    memcpy(&v, from, sizeof v);
    return v;
}

/* To nearest, ties to even, as PyTorch does. */
INLINE vector round_bf16(vector v) {
    const words w = (words)v;
    return (vector)((w + 0x7fff + ((w >> 16) & 1)) & 0xffff0000);
}

INLINE vector round_fp32(vector v) { return v; }

INLINE void store_bf16(uint16_t *to, vector v) {
    const halves h = __builtin_convertvector((words)round_bf16(v) >> 16, halves);
    memcpy(to, &h, sizeof h);
}

INLINE void store_fp32(float *to, vector v) { memcpy(to, &v, sizeof v); }

INLINE float sum(vector v) {
    float lane[LANES];
    memcpy(lane, &v, sizeof v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}

/* All ones where the sign bit is set. GCC computes comparisons of such vectors one number at a time in VERSIONS. */
INLINE integers negative(vector x) { return (integers)x >> 31; }

INLINE vector choose(integers condition, vector x, vector other) {
    return (vector)((condition & (integers)x) | (~condition & (integers)other));
}

INLINE vector larger(vector x, vector y) { return choose(negative(x - y), y, x); }

/* exp for arguments of at most 0; what is no number stays none. 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2] (Cephes' expf; error under 2 ulp). */
INLINE vector exponential(vector given) {
    const integers no_number = (integers)(0x7f800000 - ((words)given & 0x7fffffff)) >> 31;
    const vector x = larger(given, (vector){} - 87.0f);
    vector scaled = x * 1.44269504088896341f - 0.5f;
    integers n = __builtin_convertvector(scaled, integers); /* towards 0: the nearest integer of x / ln 2, as x <= 0 */
    vector whole = __builtin_convertvector(n, vector);
    vector r = x - whole * 0.693359375f - whole * -2.12194440e-4f;
    vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return choose(no_number, given, p * (vector)((n + 127) << 23));
}

/* x / (1 + exp(-x)). */
INLINE vector silu(vector x) {
    const vector e = exponential((vector)((words)x | 0x80000000));
    return choose(negative(x), x * e, x) / (1 + e);
}

#define PARTS(ELEMENT, TYPE)                                                                                           \
    /* Up to a vector of numbers, `left` of which are there: zeros follow the last ones. */                            \
    INLINE vector some_##TYPE(const ELEMENT *from, long left) {                                                        \
        if (left >= LANES) return load_##TYPE(from);                                                                   \
        ELEMENT last[LANES] = {0};                                                                                     \
        memcpy(last, from, (size_t)left * sizeof *from);                                                               \
        return load_##TYPE(last);                                                                                      \
    }                                                                                                                  \
    INLINE void put_##TYPE(ELEMENT *to, vector v, long left) {                                                         \
        if (left >= LANES) {                                                                                           \
            store_##TYPE(to, v);                                                                                       \
        } else {                                                                                                       \
            ELEMENT last[LANES];                                                                                       \
            store_##TYPE(last, v);                                                                                     \
            memcpy(to, last, (size_t)left * sizeof *to);                                                               \
        }                                                                                                              \
    }                                                                                                                  \
    /* Rotary positions: the first half of x with the second; sign -1 turns back. Su et al. 2021, arXiv:2104.09864,    \
     * eq. 34. */                                                                                                      \
    INLINE void rotated_##TYPE(const ELEMENT *x, const ELEMENT *cosine, const ELEMENT *sine, ELEMENT *out, long half,  \
                               float sign) {                                                                           \
        for (long i = 0, left = half; i < half; i += LANES, left -= LANES) {                                           \
            const vector first = some_##TYPE(x + i, left), second = some_##TYPE(x + half + i, left);                   \
            const vector c = some_##TYPE(cosine + i, left), s = some_##TYPE(sine + i, left) * sign;                    \
            put_##TYPE(out + i, round_##TYPE(first * c) - second * s, left);                                           \
            put_##TYPE(out + half + i, round_##TYPE(second * c) + first * s, left);                                    \
        }                                                                                                              \
    }

PARTS(uint16_t, bf16)
PARTS(float, fp32)

#endif
