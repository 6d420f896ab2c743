/* The backward passes of what elementwise.c computes, for a learner on the CPU; and rotations by themselves.
 *
 * Arithmetic is fp32 from the first load to the one rounding of a result. Gradients of a norm's weight are summed up
 * over blocks of tokens of one size, and these in order, so that the number of threads changes no bit.
 */
#include <stdlib.h>

#include "vectors.h"

enum { BLOCK = 64 };          /* tokens whose share of a weight's gradient is summed up together */
enum { SEEN_MOST = 1 << 15 }; /* keys of a query, at most */

#define DEFINE(ELEMENT, TYPE)                                                                                          \
    /* With n = x / rms(x): slope = (weight · dy - n · mean(weight · dy · n)) / rms(x); gradient += dy · n. */         \
    VERSIONS static void norm_slope_##TYPE(const ELEMENT *x, const ELEMENT *upstream, const ELEMENT *weight,           \
                                           ELEMENT *slope, float *gradient, long width, float epsilon) {               \
        vector squares = {}, products = {};                                                                            \
        for (long i = 0; i < width; i += LANES) {                                                                      \
            const vector v = some_##TYPE(x + i, width - i);                                                            \
            squares += v * v;                                                                                          \
            products += v * some_##TYPE(upstream + i, width - i) * some_##TYPE(weight + i, width - i);                 \
        }                                                                                                              \
        const float inverse = 1 / sqrtf(sum(squares) / (float)width + epsilon);                                        \
        const float shared = sum(products) * inverse / (float)width;                                                   \
        for (long i = 0; i < width; i += LANES) {                                                                      \
            const vector n = some_##TYPE(x + i, width - i) * inverse, dy = some_##TYPE(upstream + i, width - i);       \
            put_##TYPE(slope + i, (dy * some_##TYPE(weight + i, width - i) - n * shared) * inverse, width - i);        \
            if (gradient) put_fp32(gradient + i, some_fp32(gradient + i, width - i) + n * dy, width - i);              \
        }                                                                                                              \
    }                                                                                                                  \
    VERSIONS static void gate_slopes_##TYPE(const ELEMENT *gate, const ELEMENT *up, const ELEMENT *upstream,           \
                                            ELEMENT *d_gate, ELEMENT *d_up, ELEMENT *product, long width) {            \
        for (long i = 0, left = width; i < width; i += LANES, left -= LANES) {                                         \
            const vector g = some_##TYPE(gate + i, left), u = some_##TYPE(up + i, left);                               \
            const vector dy = some_##TYPE(upstream + i, left), one = (vector){} + 1;                                   \
            const vector e = exponential((vector)((words)g | 0x80000000)), s = silu(g);                                \
            const vector sigmoid = choose(negative(g), e, one) / (1 + e);                                              \
            const vector other = choose(negative(g), one, e) / (1 + e); /* 1 - sigmoid */                              \
            put_##TYPE(product + i, round_##TYPE(s) * u, left); /* as the forward pass rounds it */                    \
            put_##TYPE(d_up + i, s * dy, left);                                                                        \
            put_##TYPE(d_gate + i, dy * u * sigmoid * (1 + g * other), left);                                          \
        }                                                                                                              \
    }                                                                                                                  \
    VERSIONS static void rotate_token_##TYPE(const ELEMENT *x, const ELEMENT *cosine, const ELEMENT *sine,             \
                                             ELEMENT *out, int heads, long half, float sign) {                         \
        for (int h = 0; h < heads; h++, x += 2 * half, out += 2 * half)                                                \
            rotated_##TYPE(x, cosine, sine, out, half, sign);                                                          \
    }                                                                                                                  \
    /* In place: the first `seen` numbers become softmax(scale · x) over themselves, the others 0. */                  \
    VERSIONS static void seen_softmax_##TYPE(ELEMENT *x, long seen, long length, float scale) {                        \
        vector most = (vector){} - INFINITY, all = {};                                                                 \
        float kept[SEEN_MOST], top = -INFINITY;                                                                        \
        for (long i = 0; i < seen; i += LANES) {                                                                       \
            vector v = load_##TYPE(x + i) * scale;                                                                     \
            if (i + LANES > seen)                                                                                      \
                for (int lane = 0; lane < LANES; lane++) v[lane] = i + lane < seen ? v[lane] : -INFINITY;              \
            store_fp32(kept + i, v);                                                                                   \
            most = larger(most, v);                                                                                    \
        }                                                                                                              \
        for (int lane = 0; lane < LANES; lane++) top = most[lane] > top ? most[lane] : top;                            \
        for (long i = 0; i < seen; i += LANES) {                                                                       \
            vector e = exponential(load_fp32(kept + i) - top);                                                         \
            if (i + LANES > seen)                                                                                      \
                for (int lane = 0; lane < LANES; lane++) e[lane] = i + lane < seen ? e[lane] : 0;                      \
            store_fp32(kept + i, e);                                                                                   \
            all += e;                                                                                                  \
        }                                                                                                              \
        const float inverse = 1 / sum(all);                                                                            \
        for (long i = 0; i < length; i += LANES)                                                                       \
            store_##TYPE(x + i, i < seen ? load_fp32(kept + i) * inverse : (vector){});                                \
    }                                                                                                                  \
    /* x, upstream, slope: (tokens, width); weight: (width,). gradient: (width,) fp32, added to, or NULL.              \
     * Returns -1 if there is no memory. */                                                                            \
    int norm_backward_##TYPE(const ELEMENT *x, const ELEMENT *upstream, const ELEMENT *weight, ELEMENT *slope,         \
                             float *gradient, long tokens, long width, float epsilon, int threads) {                   \
        const long blocks = (tokens + BLOCK - 1) / BLOCK;                                                              \
        float *parts = gradient ? calloc((size_t)(blocks * width), sizeof *parts) : 0;                                 \
        if (gradient && !parts) return -1;                                                                             \
        _Pragma("omp parallel for num_threads(threads) if (tokens * width >= SHARED) schedule(static)") for (          \
            long b = 0; b < blocks; b++) for (long t = b * BLOCK; t < tokens && t < (b + 1) * BLOCK; t++)              \
            norm_slope_##TYPE(x + t * width, upstream + t * width, weight, slope + t * width,                          \
                              parts ? parts + b * width : 0, width, epsilon);                                          \
        for (long b = 0; parts && b < blocks; b++)                                                                     \
            for (long i = 0; i < width; i++) gradient[i] += parts[b * width + i];                                      \
        free(parts);                                                                                                   \
        return 0;                                                                                                      \
    }                                                                                                                  \
    /* Of silu(gate) · up, with dy = upstream: (tokens, width). gate_up and slopes: (tokens, 2 · width), gate first;   \
     * product: (tokens, width), what the forward pass gave. */                                                        \
    void gated_backward_##TYPE(const ELEMENT *gate_up, const ELEMENT *upstream, ELEMENT *slopes, ELEMENT *product,     \
                               long tokens, long width, int threads) {                                                 \
        FOR_TOKENS gate_slopes_##TYPE(gate_up + 2 * t * width, gate_up + (2 * t + 1) * width, upstream + t * width,    \
                                      slopes + 2 * t * width, slopes + (2 * t + 1) * width, product + t * width,       \
                                      width);                                                                          \
    }                                                                                                                  \
    /* x: (tokens, heads, 2 · half), tokens `stride` elements apart; out: the same, contiguous; cosine, sine: (tokens, \
     * half). sign is 1, or -1 to turn back. Su et al. 2021, arXiv:2104.09864, eq. 34. */                              \
    void rotate_##TYPE(const ELEMENT *x, const ELEMENT *cosine, const ELEMENT *sine, ELEMENT *out, long tokens,        \
                       long stride, int heads, int half, float sign, int threads) {                                    \
        const long width = 2L * heads * half;                                                                          \
        FOR_TOKENS rotate_token_##TYPE(x + t * stride, cosine + t * half, sine + t * half, out + t * width, heads,     \
                                       half, sign);                                                                    \
    }                                                                                                                  \
    /* Weights of attention, in place. scores: (pieces, heads, queries, length), length a multiple of LANES;           \
     * seen: (pieces, queries), how many of the keys each query sees, from the first on. */                            \
    void attention_weights_##TYPE(ELEMENT *scores, const int64_t *seen, long pieces, long heads, long queries,         \
                                 long length, float scale, int threads) {                                              \
        const long tokens = pieces * heads * queries, width = length;                                                  \
        FOR_TOKENS seen_softmax_##TYPE(scores + t * length, seen[t / (heads * queries) * queries + t % queries],       \
                                       length, scale);                                                                 \
    }

DEFINE(uint16_t, bf16)

DEFINE(float, fp32)
