/* What the sources share. The structures are Python's too: __init__.py has them field by field. */

#pragma once

#include "numbers.h"

typedef enum { FLOAT32, BFLOAT16, INT8 } Kind;

/* Weights [out, in] in panels: see products.c, which makes them. */
typedef struct {
    int64_t kind;
    int64_t in, out;
    int64_t gated;       /* a panel has WIDTH / 2 gates, then as many that they are for */
    int64_t tiles;       /* multiplied by tiles, with bfloat16 x; else x is float32 */
    void *weight;
    float *scales;       /* [panels, WIDTH], of int8 */
    float *bias;         /* [panels, WIDTH] or NULL */
} Matrix;

/* The attention of one step. */
typedef struct {
    int64_t rows, heads, kv_heads, head_dim;
    int64_t narrow;         /* qkv and attended are bfloat16 */
    int64_t narrow_kv;      /* the cache is, and the norms of queries and keys */
    double eps, scale;
    const float *cos, *sin; /* [rows, head_dim / 2] */
    const int32_t *slots;   /* [rows] */
    float *queries;         /* [kv heads, rows, group x head_dim] */
    const int32_t *spans;   /* [n_spans, 4]: first row, rows, position of the first,
                               where its sequence's pages begin in: */
    const int32_t *pages;
    int64_t n_spans;
    float *scratch;         /* each thread's, for the scores of a span */
    int64_t scratch_size;
} Attention;

/* All threads of a step make the same call of these; `next`, which is 0, counts the items that they
   have taken. Each result is complete when all have returned. */

/* RMSNorm of x [rows, width], `narrow` as the weight is, to `out`, `narrow_out`. */
void norm_rows(const void *x, const void *weight, void *out, int64_t rows, int64_t width,
               double eps, int narrow, int narrow_out, int64_t *next);

/* x [rows, in] times the matrix, to `made` [rows, out], or [rows, out / 2] if it is gated; `added`:
   to what is there. `threads`: how many there are. */
void multiply(const Matrix *m, const void *x, void *made, int64_t rows, int narrow, int added,
              int64_t threads, int64_t *next);

/* Turns queries, and writes keys and values to the layer's cache. qkv: [rows, (heads + 2 kv heads)
   x head_dim]; qk_norm: [heads + kv heads, head_dim] or NULL. */
void write_kv(const Attention *a, const void *qkv, const void *qk_norm, void *kv, int64_t *next);

/* Causal attention over the cache: attended [rows, heads x head_dim]. Overwrites the queries.
   `window`: of keys that a query sees, 0: all. `thread`: which one this is. */
void attend(const Attention *a, const void *kv, void *attended, int64_t window, int64_t thread,
            int64_t *next);

/* Fills a matrix from its weights [out, in] and its bias [out], `narrow` both. */
void pack_panels(const Matrix *m, const void *from, const void *bias, int narrow, int64_t *next);
