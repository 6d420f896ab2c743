/* Softmax over a vocabulary, for a learner on the CPU: the logarithm of its normaliser, and the slope of chosen tokens'
 * log-probabilities, each in one or two passes over logits that stay in cache. Arithmetic is fp32.
 */
#include "vectors.h"

enum { STRETCH = 1024 }; /* numbers whose sum is kept by itself: bounds the rounding error of a long sum */

#define DEFINE(ELEMENT, TYPE)                                                                                          \
    VERSIONS static float logsumexp_row_##TYPE(const ELEMENT *logits, long width, float inverse) {                     \
        vector most = (vector){} - INFINITY, zeros = {};                                                               \
        long i = 0;                                                                                                    \
        for (; i + LANES <= width; i += LANES) {                                                                       \
            const vector v = load_##TYPE(logits + i);                                                                  \
            most = larger(most, v);                                                                                    \
            zeros += v * 0; /* NaN as soon as a number is not finite */                                                \
        }                                                                                                              \
        float top = -INFINITY, others = sum(zeros);                                                                    \
        for (int lane = 0; lane < LANES; lane++) top = most[lane] > top ? most[lane] : top;                            \
        for (long j = i; j < width; j++) {                                                                             \
            const float v = some_##TYPE(logits + j, 1)[0];                                                             \
            top = v > top ? v : top;                                                                                   \
            others += v * 0;                                                                                           \
        }                                                                                                              \
        if (others != 0)                                                                                               \
            for (long j = 0; j < width; j++) { /* minus infinity is a probability of 0; nothing else is */             \
                const float v = some_##TYPE(logits + j, 1)[0];                                                         \
                if (v != v || v == INFINITY) return v;                                                                 \
                top = j == 0 || v > top ? v : top;                                                                     \
            }                                                                                                          \
        if (top == -INFINITY) return top;                                                                              \
        double total = 0;                                                                                              \
        for (long start = 0; start < i; start += STRETCH) {                                                            \
            vector part = {};                                                                                          \
            for (long j = start; j < i && j < start + STRETCH; j += LANES)                                             \
                part += exponential((load_##TYPE(logits + j) - top) * inverse);                                        \
            total += sum(part);                                                                                        \
        }                                                                                                              \
        for (long j = i; j < width; j++) total += expf((some_##TYPE(logits + j, 1)[0] - top) * inverse);               \
        return top * inverse + (float)log(total);                                                                      \
    }                                                                                                                  \
    VERSIONS static void softmax_row_##TYPE(ELEMENT *logits, long width, float inverse, float normaliser,              \
                                            float factor) {                                                            \
        if (!(normaliser - normaliser == 0)) factor = NAN; /* exponential would hide it */                             \
        for (long i = 0; i < width; i += LANES) {                                                                      \
            const vector z = some_##TYPE(logits + i, width - i) * inverse - normaliser;                                \
            put_##TYPE(logits + i, exponential(z) * factor, width - i);                                                \
        }                                                                                                              \
    }                                                                                                                  \
    /* out[t] = log Σ exp(logits[t] · inverse). logits: (tokens, width). */                                            \
    void logsumexp_##TYPE(const ELEMENT *logits, float *out, long tokens, long width, float inverse, int threads) {    \
        FOR_TOKENS out[t] = logsumexp_row_##TYPE(logits + t * width, width, inverse);                                  \
    }                                                                                                                  \
    /* logits[t] becomes factors[t] · softmax(logits[t] · inverse), and slopes of a row's pairs are added where their  \
     * tokens are. logits: (tokens, width); normalisers, factors: (tokens,). Pairs starts[t] … starts[t + 1] - 1 are   \
     * row t's: chosen and slopes: (pairs,). The sum is rounded once. */                                               \
    void softmax_slope_##TYPE(ELEMENT *logits, const float *normalisers, const float *factors, const int64_t *starts,  \
                              const int64_t *chosen, const float *slopes, float *sums, long tokens, long width,        \
                              float inverse, int threads) {                                                            \
        FOR_TOKENS {                                                                                                   \
            ELEMENT *row = logits + t * width;                                                                         \
            for (long p = starts[t]; p < starts[t + 1]; p++) {                                                         \
                const float z = some_##TYPE(row + chosen[p], 1)[0] * inverse - normalisers[t];                         \
                sums[p] = expf(z) * factors[t];                                                                        \
                for (long other = starts[t]; other < starts[t + 1]; other++)                                           \
                    if (chosen[other] == chosen[p]) sums[p] += slopes[other];                                          \
            }                                                                                                          \
            softmax_row_##TYPE(row, width, inverse, normalisers[t], factors[t]);                                       \
            for (long p = starts[t]; p < starts[t + 1]; p++)                                                           \
                put_##TYPE(row + chosen[p], (vector){} + sums[p], 1);                                                  \
        }                                                                                                              \
    }

DEFINE(uint16_t, bf16)
DEFINE(float, fp32)
