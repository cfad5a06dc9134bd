/* What the ways of multiplying share: products.c says how a product is made. */

#pragma once

#include "kernels.h"

enum {
    WIDTH = 32,  /* outputs of a panel */
    ROWS = 256,  /* rows that a panel is read for at a time */
    DIRECT = 4,  /* with more rows, weights are converted before they are multiplied */
    PART = 256,  /* inputs whose weights are in the first cache */
    CONVERTED = 64, /* the same, for weights that are converted first */
    AHEAD = 32 << 10, /* bytes that are fetched before they are read */
    TOGETHER = 4, /* rows of an adapter's first matrix that are multiplied together */
    PAIRED = 32, /* panels are padded with zeros to a multiple of this many inputs */
    /* With up to this many rows, a product waits for memory. Its panels are then read past the
       caches, and what else a step needs stays there: between two steps, Python takes two thirds of
       the time (Zen 4). Processors with AMX (0) have not been measured with this. */
#ifdef __AMX_TILE__
    PASSING = 0,
#else
    PASSING = 6,
#endif
    /* As AHEAD, for such panels: more hinders the processor's own prefetching. Vectors read twice the
       bytes of pairs for each output, and so want them earlier, in the second cache (Zen 4: 12 % more
       bytes a second than with 512 past the caches; for pairs 512 is the best). */
    NEAR = 512,
    NEAR_VECTORS = 2 << 10,
    /* Whether weights of 8 bits that are multiplied in pairs are packed as sign and size, in the
       order in which pairs.c unpacks them. */
#ifdef __AVX512VBMI__
    SIGNED_SIZES = 1,
#else
    SIGNED_SIZES = 0,
#endif
};

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t deep(int64_t in) { return (in + PAIRED - 1) / PAIRED * PAIRED; }
INLINE int64_t size_of(int64_t kind) { return kind == FLOAT32 ? 4 : kind == BFLOAT16 ? 2 : 1; }

/* Takes the next items and returns their number, 0 at the end. The first takes are long runs of
   neighbours, the last ones single items, so that all threads end together. */
INLINE int64_t take_items(int64_t *next, int64_t total, int64_t threads, int64_t *first) {
    int64_t from = __atomic_load_n(next, __ATOMIC_RELAXED), count;
    do {
        if (from >= total) return 0;
        count = (total - from + 2 * threads - 1) / (2 * threads);
    } while (!__atomic_compare_exchange_n(next, &from, from + count, 1, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
    *first = from;
    return count;
}

/* The arguments of one product, shared by its threads. */
typedef struct {
    const Matrix *matrix;
    const void *x;
    void *made;
    int64_t rows;
    int narrow, added;
    const Adapting *adapting;
    int64_t threads, *next;
} Product;

/* One item of work: up to ROWS rows times a panel. */
typedef struct {
    int64_t panel, row, rows;
    const char *weight;
} Item;

INLINE int64_t panels_of(const Matrix *m) { return (m->out + WIDTH - 1) / WIDTH; }
INLINE int64_t items_of(const Product *p) {
    return panels_of(p->matrix) * ((p->rows + ROWS - 1) / ROWS);
}
INLINE Item item_of(const Product *p, int64_t number) {
    const Matrix *m = p->matrix;
    int64_t panel = number % panels_of(m), row = number / panels_of(m) * ROWS;
    int64_t at = panel * deep(m->in) * WIDTH * size_of(m->kind);
    return (Item){panel, row, least(ROWS, p->rows - row), (const char *)m->weight + at};
}

/* What the row's adapter adds to the product; NULL: nothing. */
INLINE const LowRank *low_rank_of(const Adapting *adapting, int64_t row) {
    int32_t whose = adapting->whose[row];
    const LowRank *places = whose < 0 ? NULL : adapting->adapters[whose];
    return places && places[adapting->place].rank ? places + adapting->place : NULL;
}

/* Applies scales, bias, adapters and gate to a panel's sums [rows, WIDTH], and writes them out. */
void finish(const Product *p, int64_t row, int64_t rows, int64_t panel, const float *sums);

/* 16 weights, where those of an output lie apart. */
INLINE lanes weights_at(const char *weight, int64_t i, int64_t kind) {
    if (kind != INT8) return take(weight, i, kind == BFLOAT16);
    bytes small;
    memcpy(&small, weight + i, sizeof small);
    return __builtin_convertvector(signed_all(small), lanes);
}

/* Prefetches `lines` cache lines. */
INLINE void fetch(const char *from, int64_t lines) {
    for (int64_t i = 0; i < lines; i++) __builtin_prefetch(from + 64 * i, 0, 2);
}
/* The same, for lines that are used once. */
INLINE void fetch_once(const char *from, int64_t lines) {
    for (int64_t i = 0; i < lines; i++) __builtin_prefetch(from + 64 * i, 0, 0);
}

/* Each makes a product in its own way. All threads call it. */
void with_vectors(const Product *p);
void with_pairs(const Product *p);
void with_tiles(const Product *p);

/* Whether this process can multiply in this way. */
int has_pairs(void);
int has_tiles(void);
