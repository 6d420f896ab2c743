/* What lies between the matrix products and attention of a decoder, on the CPU: residual additions and norms, rotary
 * positions with the way into the cache, and the gated activation.
 *
 * Every token is computed by itself, by one order of operations. Results are rounded to bf16 or kept in fp32 where
 * PyTorch's operators do so; within one of them arithmetic is fp32.
 */
#include "vectors.h"

enum { WIDEST = 256 };

#define DEFINE(ELEMENT, TYPE)                                                                                          \
    /* x / rms(x) · weight: Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4. */                                         \
    INLINE void norm_##TYPE(const ELEMENT *x, const ELEMENT *weight, ELEMENT *out, long width, float epsilon) {        \
        vector squares = {};                                                                                           \
        for (long i = 0; i < width; i += LANES) {                                                                      \
            const vector v = some_##TYPE(x + i, width - i);                                                            \
            squares += v * v;                                                                                          \
        }                                                                                                              \
        const float scale = 1 / sqrtf(sum(squares) / (float)width + epsilon);                                          \
        for (long i = 0; i < width; i += LANES)                                                                        \
            put_##TYPE(out + i, some_##TYPE(x + i, width - i) * scale * some_##TYPE(weight + i, width - i),            \
                       width - i);                                                                                     \
    }                                                                                                                  \
    VERSIONS static void residual_norm_token_##TYPE(ELEMENT *x, const ELEMENT *added, const ELEMENT *weight,           \
                                                    ELEMENT *out, long width, float epsilon) {                         \
        for (long i = 0; added && i < width; i += LANES)                                                               \
            put_##TYPE(x + i, some_##TYPE(x + i, width - i) + some_##TYPE(added + i, width - i), width - i);           \
        norm_##TYPE(x, weight, out, width, epsilon);                                                                   \
    }                                                                                                                  \
    VERSIONS static void place_token_##TYPE(const ELEMENT *qkv, const ELEMENT *q_norm, const ELEMENT *k_norm,          \
                                            const ELEMENT *cosine, const ELEMENT *sine, ELEMENT *queries,              \
                                            ELEMENT *keys, ELEMENT *values, long context, int heads, int kv_heads,     \
                                            int width, float epsilon) {                                                \
        for (int h = 0; h < heads + kv_heads; h++, qkv += width) {                                                     \
            const ELEMENT *weight = h < heads ? q_norm : k_norm, *x = qkv;                                             \
            ELEMENT normed[WIDEST];                                                                                    \
            if (weight) {                                                                                              \
                norm_##TYPE(qkv, weight, normed, width, epsilon);                                                      \
                x = normed;                                                                                            \
            }                                                                                                          \
            rotated_##TYPE(x, cosine, sine, h < heads ? queries + h * width : keys + (h - heads) * context * width,    \
                           width / 2, 1);                                                                              \
        }                                                                                                              \
        for (int h = 0; h < kv_heads; h++)                                                                             \
            memcpy(values + h * context * width, qkv + h * width, (size_t)width * sizeof *qkv);                        \
    }                                                                                                                  \
    VERSIONS static void gate_token_##TYPE(const ELEMENT *gate, const ELEMENT *up, ELEMENT *out, long width) {         \
        for (long i = 0; i < width; i += LANES)                                                                        \
            put_##TYPE(out + i,                                                                                        \
                       round_##TYPE(silu(some_##TYPE(gate + i, width - i))) * some_##TYPE(up + i, width - i),          \
                       width - i);                                                                                     \
    }                                                                                                                  \
    /* x += added, unless that is NULL; out = x / rms(x) · weight. x, added, out: (tokens, width). */                  \
    void residual_norm_##TYPE(ELEMENT *x, const ELEMENT *added, const ELEMENT *weight, ELEMENT *out, long tokens,      \
                              long width, float epsilon, int threads) {                                                \
        FOR_TOKENS residual_norm_token_##TYPE(x + t * width, added ? added + t * width : 0, weight, out + t * width,   \
                                              width, epsilon);                                                         \
    }                                                                                                                  \
    /* qkv: (tokens, heads + 2 kv_heads, head) in the order q, k, v. Rotated q goes to queries (tokens, heads, head),  \
     * rotated k and v to (rows, kv_heads, context, head) at rows[t] and positions[t]. q and k are normed before,      \
     * unless their weights are NULL. cosine, sine: (positions, head / 2). head is at most WIDEST. */                  \
    void place_##TYPE(const ELEMENT *qkv, const ELEMENT *q_norm, const ELEMENT *k_norm, const ELEMENT *cosine,         \
                      const ELEMENT *sine, ELEMENT *queries, ELEMENT *keys, ELEMENT *values, const int64_t *rows,      \
                      const int64_t *positions, long tokens, long context, int heads, int kv_heads, int head,          \
                      float epsilon, int threads) {                                                                    \
        const long width = (long)(heads + 2 * kv_heads) * head, half = head / 2;                                       \
        FOR_TOKENS {                                                                                                   \
            const long at = (rows[t] * kv_heads * context + positions[t]) * head, angle = positions[t] * half;         \
            place_token_##TYPE(qkv + t * width, q_norm, k_norm, cosine + angle, sine + angle,                          \
                               queries + t * heads * head, keys + at, values + at, context, heads, kv_heads, head,     \
                               epsilon);                                                                               \
        }                                                                                                              \
    }                                                                                                                  \
    /* out = silu(gate) · up. gate_up: (tokens, 2 · width), gate first; out: (tokens, width). */                       \
    void gated_##TYPE(const ELEMENT *gate_up, ELEMENT *out, long tokens, long width, int threads) {                    \
        FOR_TOKENS gate_token_##TYPE(gate_up + 2 * t * width, gate_up + (2 * t + 1) * width, out + t * width, width);  \
    }

DEFINE(uint16_t, bf16)
DEFINE(float, fp32)
