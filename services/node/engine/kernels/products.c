/* Products of activations with weights: x [rows, in] times a matrix [out, in].

   Weights lie in panels of WIDTH outputs. A panel is one piece of memory, read from its beginning
   to its end, once for up to ROWS rows: a step with few rows takes as long as reading the weights.
   The bytes that come next are fetched meanwhile. A panel goes through the first cache part by part,
   while the sums of all rows wait in `sums` (as in Goto and van de Geijn, "Anatomy of
   High-Performance Matrix Multiplication", 2008, but with the roles of the operands exchanged).

   Sums are taken in float32, in order of `in`, whatever the number of rows: a row has the same bits
   in every batch. Where the processor multiplies bfloat16 itself, it adds two (AVX-512) or 32 (AMX)
   products at a time, in an order that does not depend on the batch either. */

#include "products.h"

INLINE void finish_as(const Product *p, int64_t row, int64_t rows, int64_t panel,
                      const float *sums, int narrow, int added) {
    const Matrix *m = p->matrix;
    int64_t width = m->gated ? WIDTH / 2 : WIDTH, all_of = m->gated ? m->out / 2 : m->out;
    int64_t from = panel * width, filled = least(width, all_of - from);
    for (int64_t r = 0; r < rows; r++, sums += WIDTH) {
        lanes v[2] = {load(sums), load(sums + 16)};
        for (int i = 0; i < 2; i++) {
            int64_t at = panel * WIDTH + 16 * i;
            if (m->scales) v[i] *= load(m->scales + at);
            if (m->bias) v[i] += load(m->bias + at);
        }
        if (m->gated) v[0] = silu(v[0]) * v[1];
        int64_t to = (row + r) * all_of + from;
        if (filled == width) {
            for (int64_t i = 0; i < width / 16; i++) {
                if (added) v[i] += take(p->made, to + 16 * i, narrow);
                give(p->made, to + 16 * i, v[i], narrow);
            }
        } else {
            for (int64_t i = 0; i < filled; i++) {
                float sum = v[i / 16][i % 16];
                put(p->made, to + i, added ? sum + get(p->made, to + i, narrow) : sum, narrow);
            }
        }
    }
}

/* Applies scales, bias and gate to a panel's sums [rows, WIDTH], and writes them out. */
void finish(const Product *p, int64_t row, int64_t rows, int64_t panel,
                   const float *sums) {
    if (p->narrow && p->added) finish_as(p, row, rows, panel, sums, 1, 1);
    else if (p->narrow) finish_as(p, row, rows, panel, sums, 1, 0);
    else if (p->added) finish_as(p, row, rows, panel, sums, 0, 1);
    else finish_as(p, row, rows, panel, sums, 0, 0);
}

int64_t best_way(void) { return has_tiles() ? TILES : has_pairs() ? PAIRS : VECTORS; }

void multiply(const Matrix *m, const void *x, void *made, int64_t rows, int narrow, int added,
              int64_t threads, int64_t *next) {
    Product p = {m, x, made, rows, narrow, added, threads, next};
    if (m->way == TILES) with_tiles(&p);
    else if (m->way == PAIRS) with_pairs(&p);
    else with_vectors(&p);
}

/* --- packing --- */

/* How many numbers of an output lie next to each other. */
INLINE int64_t numbers_together(const Matrix *m) {
    return m->way == VECTORS ? 1 : m->way == TILES && m->kind == INT8 ? 4 : 2;
}

/* Whether weights lie as pairs.c unpacks them: see SIGNED_SIZES. */
INLINE int is_coded(const Matrix *m) {
    return SIGNED_SIZES && m->way == PAIRS && m->kind == INT8;
}

/* Where output i of a panel lies among the others. An unpacking takes 4 outputs from each quarter of
   a vector, first from the lower halves, then from the upper ones. */
INLINE int64_t place_of(const Matrix *m, int64_t i) {
    return is_coded(m) ? i % 16 / 4 * 8 + i / 16 * 4 + i % 4 : i;
}

INLINE int8_t rounded(const Matrix *m, float value) {
    int number = (int)rintf(value);
    return (int8_t)(is_coded(m) && number < 0 ? -number - 128 : number);
}

INLINE void pack_panel(const Matrix *m, const void *from, const void *bias, int64_t panel,
                       int narrow) {
    int64_t in = m->in, together = numbers_together(m);
    char *to = (char *)m->weight + panel * deep(in) * WIDTH * size_of(m->kind);
    for (int64_t i = 0; i < WIDTH; i++) {
        int64_t output = panel * WIDTH + i, last = m->out;
        if (m->gated) {
            int64_t half = m->out / 2, upper = i >= WIDTH / 2;
            output = panel * (WIDTH / 2) + i % (WIDTH / 2) + upper * half;
            last = upper ? m->out : half;
        }
        int64_t at = output * in, there = output < last;
        float most = 0, scale = 1, nothing = 0;
        if (m->bias) m->bias[panel * WIDTH + i] = there ? get(bias, output, narrow) : 0;
        if (m->kind == INT8) {
            for (int64_t k = 0; k < in && there; k++) {
                float size = fabsf(get(from, at + k, narrow));
                most = size > most ? size : most;
                nothing += 0 * size; /* NaN, unless all are finite */
            }
            scale = most > 0 ? most / 127 : 1;
            m->scales[panel * WIDTH + i] = scale + nothing;
        }
        for (int64_t k = 0; k < deep(in); k++) {
            float value = there && k < in ? get(from, at + k, narrow) : 0;
            int64_t at = (k / together * WIDTH + place_of(m, i)) * together + k % together;
            if (m->kind == FLOAT32) ((float *)to)[at] = value;
            else if (m->kind == BFLOAT16) ((uint16_t *)to)[at] = narrowed(value);
            else ((int8_t *)to)[at] = nothing == 0 ? rounded(m, value / scale) : 0;
        }
    }
}

void pack_panels(const Matrix *m, const void *from, const void *bias, int narrow, int64_t *next) {
    int64_t panel;
    while ((panel = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < panels_of(m))
        if (narrow) pack_panel(m, from, bias, panel, 1);
        else pack_panel(m, from, bias, panel, 0);
}
