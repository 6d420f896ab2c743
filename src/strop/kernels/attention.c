/* Attention of decoding and prefill over a key-value cache, on the CPU.
 *
 * Every query token is computed by itself, by one order of operations that depends on its position alone: what is
 * beside it, in which row it lies and how many threads run change no bit of the result. Arithmetic is fp32; keys,
 * values, queries and results are bf16 or fp32. Softmax as usual: subtract the maximum, exponentiate, divide at last.
 */
#include <stdlib.h>

#include "vectors.h"

#ifdef _OPENMP
#include <omp.h>
#define THREAD omp_get_thread_num()
#else
#define THREAD 0
#endif

enum { KEYS = 8, MOST_HEADS = 16, MOST_CHUNKS = 16 }; /* query heads that share keys; head_dim up to 256 */

/* Neighbouring lanes added: those of a, then those of b. */
INLINE vector fold(vector a, vector b) {
    const integers even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + 1);
}

/* The sums of eight vectors, in the first eight lanes. */
INLINE vector sums(const vector v[KEYS]) {
    const vector low = fold(fold(v[0], v[1]), fold(v[2], v[3])), high = fold(fold(v[4], v[5]), fold(v[6], v[7]));
    const vector two = fold(low, high);
    return fold(two, two);
}

#define DEFINE(NAME, ELEMENT, LOAD, STORE)                                                                             \
    /* One query token: `heads` query heads over the keys 0 … keys - 1 of each key head. */                            \
    INLINE void NAME##_token(const ELEMENT *query, const ELEMENT *key, const ELEMENT *value, ELEMENT *out, int keys,   \
                             long head_stride, int kv_heads, int heads, int chunks, float scale, float *scores) {      \
        const int width = chunks * LANES, padded = (keys + LANES - 1) / LANES * LANES;                                 \
        for (int kv = 0; kv < kv_heads; kv++, key += head_stride, value += head_stride) {                              \
            vector q[MOST_HEADS][MOST_CHUNKS], mixed[MOST_HEADS][MOST_CHUNKS];                                         \
            float total[MOST_HEADS];                                                                                   \
            for (int h = 0; h < heads; h++)                                                                            \
                for (int c = 0; c < chunks; c++) {                                                                     \
                    q[h][c] = LOAD(query + (kv * heads + h) * width + c * LANES) * scale;                              \
                    mixed[h][c] = (vector){};                                                                          \
                }                                                                                                      \
            for (int j = 0; j < keys; j += KEYS) { /* up to 7 keys more: never seen, their scores are overwritten */   \
                vector k[KEYS][MOST_CHUNKS];                                                                           \
                for (int i = 0; i < KEYS; i++)                                                                         \
                    for (int c = 0; c < chunks; c++) k[i][c] = LOAD(key + (long)(j + i) * width + c * LANES);          \
                for (int h = 0; h < heads; h++) {                                                                      \
                    vector dot[KEYS];                                                                                  \
                    for (int i = 0; i < KEYS; i++) {                                                                   \
                        dot[i] = q[h][0] * k[i][0];                                                                    \
                        for (int c = 1; c < chunks; c++) dot[i] += q[h][c] * k[i][c];                                  \
                    }                                                                                                  \
                    const vector score = sums(dot);                                                                    \
                    memcpy(scores + h * padded + j, &score, KEYS * sizeof(float));                                     \
                }                                                                                                      \
            }                                                                                                          \
            for (int h = 0; h < heads; h++) {                                                                          \
                float *row = scores + h * padded, most = row[0];                                                       \
                for (int j = 1; j < keys; j++) most = row[j] > most ? row[j] : most;                                   \
                for (int j = keys; j < padded; j++) row[j] = -INFINITY;                                                \
                vector all = {};                                                                                       \
                for (int j = 0; j < padded; j += LANES) {                                                              \
                    vector e = exponential(load_fp32(row + j) - most);                                                 \
                    if (j + LANES > keys)                                                                              \
                        for (int i = 0; i < LANES; i++) e[i] = j + i < keys ? e[i] : 0;                                \
                    store_fp32(row + j, e);                                                                            \
                    all += e;                                                                                          \
                }                                                                                                      \
                total[h] = sum(all);                                                                                   \
            }                                                                                                          \
            for (int j = 0; j < keys; j++)                                                                             \
                for (int c = 0; c < chunks; c++) {                                                                     \
                    vector v = LOAD(value + (long)j * width + c * LANES);                                              \
                    for (int h = 0; h < heads; h++) mixed[h][c] += scores[h * padded + j] * v;                         \
                }                                                                                                      \
            for (int h = 0; h < heads; h++)                                                                            \
                for (int c = 0; c < chunks; c++)                                                                       \
                    STORE(out + (kv * heads + h) * width + c * LANES, mixed[h][c] / total[h]);                         \
        }                                                                                                              \
    }                                                                                                                  \
    VERSIONS static void NAME##_range(const ELEMENT *queries, const ELEMENT *keys, const ELEMENT *values,              \
                                      ELEMENT *out, const int64_t *rows, const int64_t *positions, long first,         \
                                      long last, long context, long stride, int kv_heads, int heads, int chunks, float scale,\
                                      float *scores) {                                                                 \
        const long width = chunks * LANES, token = kv_heads * heads * width, row = kv_heads * context * width;         \
        for (long t = first; t < last; t++) {                                                                          \
            const ELEMENT *k = keys + rows[t] * row, *v = values + rows[t] * row;                                      \
            const int count = (int)positions[t] + 1;                                                                   \
            if (chunks == 4 && heads == 3) /* constants let the compiler keep everything in registers */               \
                NAME##_token(queries + t * stride, k, v, out + t * token, count, context * 64, kv_heads, 3, 4, scale,  \
                             scores);                                                                                  \
            else if (chunks == 4 && heads == 1)                                                                        \
                NAME##_token(queries + t * stride, k, v, out + t * token, count, context * 64, kv_heads, 1, 4, scale,  \
                             scores);                                                                                  \
            else if (chunks == 8 && heads == 2)                                                                        \
                NAME##_token(queries + t * stride, k, v, out + t * token, count, context * 128, kv_heads, 2, 8, scale, \
                             scores);                                                                                  \
            else                                                                                                       \
                NAME##_token(queries + t * stride, k, v, out + t * token, count, context * width, kv_heads, heads,     \
                             chunks, scale, scores);                                                                   \
        }                                                                                                              \
    }                                                                                                                  \
    /* queries: (tokens, kv_heads * heads, width), tokens `stride` elements apart; out: the same, contiguous; keys,    \
     * values: (rows, kv_heads, context, width), contiguous, where context is a multiple of LANES.                     \
     * Token t sees the keys 0 … positions[t] of row rows[t]. Returns 0, or -1 if memory ran out or a size is not      \
     * supported. */                                                                                                   \
    int NAME(const ELEMENT *queries, const ELEMENT *keys, const ELEMENT *values, ELEMENT *out, const int64_t *rows,    \
             const int64_t *positions, long tokens, long context, long stride, int kv_heads, int heads, int width,     \
             float scale, int threads) {                                                                               \
        if (heads > MOST_HEADS || width % LANES || width > LANES * MOST_CHUNKS) return -1;                             \
        const long size = (context + LANES) * (long)heads;                                                             \
        float *scores = aligned_alloc(64, (size_t)((size * threads * 4 + 63) / 64 * 64));                              \
        if (!scores) return -1;                                                                                        \
        const long piece = 4; /* tokens handed out at once: lengths differ */                                          \
        _Pragma("omp parallel for num_threads(threads) schedule(dynamic)") for (long first = 0; first < tokens;        \
                                                                                first += piece) {                      \
            const long last = first + piece < tokens ? first + piece : tokens;                                         \
            NAME##_range(queries, keys, values, out, rows, positions, first, last, context, stride, kv_heads, heads,   \
                         width / LANES, scale, scores + size * THREAD);                                                \
        }                                                                                                              \
        free(scores);                                                                                                  \
        return 0;                                                                                                      \
    }

DEFINE(attention_bf16, uint16_t, load_bf16, store_bf16)
DEFINE(attention_fp32, float, load_fp32, store_fp32)
