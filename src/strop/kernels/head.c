/* Softmax over a vocabulary, for a learner on the CPU: the logarithm of its normaliser, and the slope of chosen tokens'
 * log-probabilities, each in one or two passes over a row of logits, which stays in cache. Arithmetic is fp32, but for
 * the sum over a row. Logits are divided by the temperature, as samplers do; at 1 the compiler leaves that out.
 */
#include "vectors.h"

enum { STRETCH = 1024 }; /* numbers whose sum is kept by itself: bounds the rounding error of a long sum */

#define DEFINE(ELEMENT, TYPE)                                                                                          \
    INLINE float normaliser_##TYPE(const ELEMENT *logits, long width, float temperature) {                             \
        vector most = (vector){} - INFINITY;                                                                           \
        long i = 0;                                                                                                    \
        for (; i + LANES <= width; i += LANES) most = larger(most, load_##TYPE(logits + i));                           \
        float top = -INFINITY;                                                                                         \
        for (int lane = 0; lane < LANES; lane++) top = most[lane] > top ? most[lane] : top;                            \
        for (long j = i; j < width; j++) top = fmaxf(top, some_##TYPE(logits + j, 1)[0]);                              \
        top /= temperature;                                                                                            \
        double total = 0;                                                                                              \
        for (long start = 0; start < i; start += STRETCH) {                                                            \
            vector part = {};                                                                                          \
            for (long j = start; j < i && j < start + STRETCH; j += LANES)                                             \
                part += exponential(load_##TYPE(logits + j) / temperature - top);                                      \
            total += sum(part);                                                                                        \
        }                                                                                                              \
        for (long j = i; j < width; j++) total += expf(some_##TYPE(logits + j, 1)[0] / temperature - top);             \
        return top + (float)log(total);                                                                                \
    }                                                                                                                  \
    INLINE void softmax_##TYPE(ELEMENT *logits, long width, float temperature, float normaliser, float factor) {       \
        for (long i = 0; i < width; i += LANES) {                                                                      \
            const vector z = some_##TYPE(logits + i, width - i) / temperature - normaliser;                            \
            put_##TYPE(logits + i, exponential(z) * factor, width - i);                                                \
        }                                                                                                              \
    }                                                                                                                  \
    VERSIONS static float normaliser_row_##TYPE(const ELEMENT *logits, long width, float temperature) {                \
        return temperature == 1 ? normaliser_##TYPE(logits, width, 1)                                                  \
                                : normaliser_##TYPE(logits, width, temperature);                                       \
    }                                                                                                                  \
    VERSIONS static void softmax_row_##TYPE(ELEMENT *logits, long width, float temperature, float normaliser,          \
                                            float factor) {                                                            \
        if (temperature == 1)                                                                                          \
            softmax_##TYPE(logits, width, 1, normaliser, factor);                                                      \
        else                                                                                                           \
            softmax_##TYPE(logits, width, temperature, normaliser, factor);                                            \
    }                                                                                                                  \
    /* out[t] = log Σ exp(logits[t] / temperature). logits: (tokens, width). */                                        \
    void logsumexp_##TYPE(const ELEMENT *logits, float *out, long tokens, long width, float temperature,               \
                          int threads) {                                                                               \
        FOR_TOKENS out[t] = normaliser_row_##TYPE(logits + t * width, width, temperature);                             \
    }                                                                                                                  \
    /* logits[t] becomes factors[t] · softmax(logits[t] / temperature), and slopes of a row's pairs are added where    \
     * their tokens are. logits: (tokens, width); normalisers, factors: (tokens,). Pairs starts[t] … starts[t + 1] - 1 \
     * are row t's: chosen and slopes: (pairs,). The sum is rounded once. */                                           \
    void softmax_slope_##TYPE(ELEMENT *logits, const float *normalisers, const float *factors, const int64_t *starts,  \
                              const int64_t *chosen, const float *slopes, float *sums, long tokens, long width,        \
                              float temperature, int threads) {                                                        \
        FOR_TOKENS {                                                                                                   \
            ELEMENT *row = logits + t * width;                                                                         \
            for (long p = starts[t]; p < starts[t + 1]; p++) {                                                         \
                sums[p] = expf(some_##TYPE(row + chosen[p], 1)[0] / temperature - normalisers[t]) * factors[t];        \
                for (long other = starts[t]; other < starts[t + 1]; other++)                                           \
                    if (chosen[other] == chosen[p]) sums[p] += slopes[other];                                          \
            }                                                                                                          \
            softmax_row_##TYPE(row, width, temperature, normalisers[t], factors[t]);                                   \
            for (long p = starts[t]; p < starts[t + 1]; p++)                                                           \
                put_##TYPE(row + chosen[p], (vector){} + sums[p], 1);                                                  \
        }                                                                                                              \
    }

DEFINE(uint16_t, bf16)
DEFINE(float, fp32)
