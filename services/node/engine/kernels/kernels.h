/* Declarations that the sources share. __init__.py has the same structures, field by field. */

#pragma once

#include "numbers.h"

typedef enum { FLOAT32, BFLOAT16, INT8 } Kind;

/* How a matrix is multiplied: in float32, or with instructions for pairs (AVX-512) or tiles (AMX) of
   bfloat16. */
typedef enum { VECTORS, PAIRS, TILES } Way;

/* Weights [out, in] in panels; products.c makes them. */
typedef struct {
    int64_t kind;
    int64_t in, out;
    int64_t gated;       /* a panel has WIDTH / 2 gates, then the WIDTH / 2 outputs they gate */
    int64_t way;         /* x is float32 for VECTORS, else bfloat16 */
    void *weight;
    float *scales;       /* [panels, WIDTH], for int8 only */
    float *bias;         /* [panels, WIDTH] or NULL */
    int64_t pitch;       /* outputs of a row of the result; other ranks make the others */
    int64_t first;       /* where in the row these outputs begin */
} Matrix;

/* The attention of one step. */
typedef struct {
    int64_t rows, heads, kv_heads, head_dim;
    int64_t page_heads;     /* kv heads of a page, with those of other ranks */
    int64_t first_head;     /* the first of them that is this rank's */
    int64_t narrow;         /* qkv and attended are bfloat16 */
    int64_t narrow_kv;      /* the cache is bfloat16, and the norms of queries and keys are */
    double eps, scale;
    const float *cos, *sin; /* [positions, head_dim / 2] */
    float *queries;         /* [kv heads, rows, group x head_dim] */
    const int32_t *spans;   /* [n_spans, 4]: first row, number of rows, position of the first
                               row, where its sequence's pages begin in `pages` */
    const int32_t *pages;
    int64_t n_spans;
    float *scratch;         /* for the scores of a span; each thread has its own part */
    int64_t scratch_size;
} Attention;

/* What the ranks of a team share. Each runs the same calls. */
typedef struct {
    int32_t ranks;
    int32_t over;        /* rank 0 says, before they meet: no further block */
    int32_t here __attribute__((aligned(64)));  /* how many have come to the meeting */
    int32_t round __attribute__((aligned(64))); /* meetings that are over */
    int32_t asleep;      /* how many sleep until one is */
    int32_t lost;        /* a rank has ended: nobody waits for the others any more */
} Team;

/* Returns when every rank has called it. What each wrote before, all see afterwards. Of a team that is
   lost it returns at once: what the ranks compute then is worth nothing. */
void meet(Team *t);

/* Says that the team is lost, also to those who wait for the others. */
void lose(Team *t);

/* What an adapter adds to the product of a matrix: b (a x) (LoRA; Hu et al. 2021). */
typedef struct {
    int64_t rank;        /* a multiple of TOGETHER; 0: it adds nothing */
    const float *a;      /* [rank, in] */
    const float *b;      /* scaled, without the ranks that the outputs do not have */
    const int32_t *windows; /* [panels, 2, 3]: for 16 outputs of a panel of the matrix the first
                               rank, how many, and how many there are before these in `b` */
} LowRank;

/* The places in a layer where adapters add something. */
typedef enum { QKV, O, GATE_UP, DOWN, PLACES } Place;

/* What adapters add to one product. */
typedef struct {
    const int32_t *whose;               /* [rows]: the number of the row's adapter; -1: it has none */
    const LowRank *const *adapters;     /* of each its PLACES at this layer; NULL: nothing */
    Place place;
    float *low;                         /* [rows, stride]: a x of each row */
    int64_t stride;
} Adapting;

/* All threads of a step make the same calls of the functions below. `next` counts the items of work
   that threads have taken; it is 0 at first. A result is complete when all threads have returned. */

/* Writes the RMSNorm of x [rows, width] to `out`. `narrow`: x and weight are bfloat16; `narrow_out`:
   out is. */
void norm_rows(const void *x, const void *weight, void *out, int64_t rows, int64_t width,
               double eps, int narrow, int narrow_out, int64_t *next);

/* The best way here to multiply bfloat16. */
int64_t best_way(void);

/* Writes x [rows, in] times the matrix to `made` [rows, out], or [rows, out / 2] if it is gated.
   `added`: adds to what is there. `adapting`: what adapters add before gating, after `shrink`; NULL:
   nothing. `threads`: how many make this call. */
void multiply(const Matrix *m, const void *x, void *made, int64_t rows, int narrow, int added,
              const Adapting *adapting, int64_t threads, int64_t *next);

/* Writes a x to `low` for the rows of x [rows, in] that have adapters. */
void shrink(const Adapting *adapting, const void *x, int64_t rows, int64_t in, int narrow,
            int64_t *next);

/* Rotates the queries, and writes keys and values to the layer's cache. qkv: [rows, (heads + 2 kv
   heads) x head_dim]; qk_norm: [heads + kv heads, head_dim] or NULL. */
void write_kv(const Attention *a, const void *qkv, const void *qk_norm, void *kv, int64_t *next);

/* Causal attention over the cache: attended [rows, heads of all ranks x head_dim]. Overwrites the
   queries.
   `window`: how many keys a query sees, 0: all. `thread`: this thread's number. */
void attend(const Attention *a, const void *kv, void *attended, int64_t window, int64_t thread,
            int64_t *next);

/* Fills a matrix from weights [out, in] and bias [out]. `narrow`: both are bfloat16. */
void pack_panels(const Matrix *m, const void *from, const void *bias, int narrow, int64_t *next);
