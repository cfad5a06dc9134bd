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

/* Adds what the row's adapter adds to a panel's outputs. */
INLINE void expand(const Adapting *adapting, int64_t row, int64_t panel, lanes *v) {
    const LowRank *l = low_rank_of(adapting, row);
    if (!l) return;
    for (int i = 0; i < 2; i++) {
        const int32_t *window = l->windows + (2 * panel + i) * 3;
        const float *low = adapting->low + row * adapting->stride + window[0];
        const float *b = l->b + (int64_t)window[2] * 16;
        for (int64_t k = 0; k < window[1]; k++) v[i] += low[k] * load(b + 16 * k);
    }
}

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
        if (p->adapting) expand(p->adapting, row + r, panel, v);
        if (m->gated) v[0] = silu(v[0]) * v[1];
        int64_t to = (row + r) * m->pitch + m->first + from;
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
              const Adapting *adapting, int64_t threads, int64_t *next) {
    Product p = {m, x, made, rows, narrow, added, adapting, threads, next};
    if (m->way == TILES) with_tiles(&p);
    else if (m->way == PAIRS) with_pairs(&p);
    else with_vectors(&p);
}

/* --- adapters --- */

/* The products of x [in] with TOGETHER rows of `a`. */
INLINE void dot(const void *x, int64_t at, const float *a, int64_t in, float *low, int narrow) {
    lanes sums[TOGETHER] = {{0}};
    int64_t i = 0;
    for (; i + 16 <= in; i += 16) {
        lanes v = take(x, at + i, narrow);
        for (int k = 0; k < TOGETHER; k++) sums[k] += v * load(a + k * in + i);
    }
    for (int k = 0; k < TOGETHER; k++) {
        float sum = sum_of(sums[k]);
        for (int64_t rest = i; rest < in; rest++) sum += get(x, at + rest, narrow) * a[k * in + rest];
        low[k] = sum;
    }
}

void shrink(const Adapting *adapting, const void *x, int64_t rows, int64_t in, int narrow,
            int64_t *next) {
    int64_t parts = adapting->stride / TOGETHER, item;
    while ((item = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < rows * parts) {
        int64_t row = item / parts, first = item % parts * TOGETHER;
        const LowRank *l = low_rank_of(adapting, row);
        if (!l || first >= l->rank) continue;
        float *low = adapting->low + row * adapting->stride + first;
        if (narrow) dot(x, row * in, l->a + first * in, in, low, 1);
        else dot(x, row * in, l->a + first * in, in, low, 0);
    }
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

/* The row of the matrix that is output i of a panel; -1: none is. */
INLINE int64_t row_of(const Matrix *m, int64_t panel, int64_t i) {
    if (!m->gated) return panel * WIDTH + i < m->out ? panel * WIDTH + i : -1;
    int64_t half = m->out / 2, row = panel * (WIDTH / 2) + i % (WIDTH / 2);
    return row < half ? row + (i < WIDTH / 2 ? 0 : half) : -1;
}

/* The scale of an output in 8 bits; NaN, unless all its weights are finite. */
INLINE float scale_of(const void *from, int64_t at, int64_t in, int narrow) {
    float most = 0, nothing = 0;
    for (int64_t k = 0; k < in; k++) {
        float size = fabsf(get(from, at + k, narrow));
        most = size > most ? size : most;
        nothing += 0 * size;
    }
    return (most > 0 ? most / 127 : 1) + nothing;
}

INLINE int8_t rounded(const Matrix *m, float value) {
    int number = (int)rintf(value);
    return (int8_t)(is_coded(m) && number < 0 ? -number - 128 : number);
}

/* The weights of an output from `at` on, as the matrix holds them, and zeros up to PAIRED. */
INLINE void convert(const Matrix *m, const void *from, int64_t at, int64_t count, float scale,
                    void *to, int narrow) {
    if (m->kind == INT8)
        for (int64_t k = 0; k < count; k++)
            ((int8_t *)to)[k] = scale == scale ? rounded(m, get(from, at + k, narrow) / scale) : 0;
    else if (narrow) memcpy(to, (const uint16_t *)from + at, count * sizeof(uint16_t));
    else memcpy(to, (const float *)from + at, count * sizeof(float));
    if (count < PAIRED)
        memset((char *)to + count * size_of(m->kind), 0, (PAIRED - count) * size_of(m->kind));
}

/* Puts what a panel's outputs [WIDTH, count] have at one place side by side: [count, WIDTH]. `size`:
   the bytes of each. */
INLINE void turn(const char *from, char *to, int64_t count, int64_t size) {
    for (int64_t k = 0; k < count; k++)
        for (int64_t i = 0; i < WIDTH; i++)
            memcpy(to + (k * WIDTH + i) * size, from + (i * count + k) * size, size);
}

/* A panel is packed in pieces that stay in the first cache: one line is read of each output, and all
   lines that are written are written whole. */
INLINE void pack_panel(const Matrix *m, const void *from, const void *bias, int64_t panel,
                       int narrow) {
    int64_t in = m->in, size = size_of(m->kind), together = numbers_together(m);
    int64_t rows[WIDTH];
    float scales[WIDTH];
    char piece[WIDTH * PAIRED * sizeof(float)] __attribute__((aligned(64)));
    char *to = (char *)m->weight + panel * deep(in) * WIDTH * size;
    for (int64_t i = 0; i < WIDTH; i++) {
        int64_t row = rows[i] = row_of(m, panel, i);
        scales[i] = m->kind == INT8 && row >= 0 ? scale_of(from, row * in, in, narrow) : 1;
        if (m->scales) m->scales[panel * WIDTH + i] = scales[i];
        if (m->bias) m->bias[panel * WIDTH + i] = row >= 0 ? get(bias, row, narrow) : 0;
    }
    for (int64_t k = 0; k < in; k += PAIRED, to += PAIRED * WIDTH * size) {
        for (int64_t i = 0; i < WIDTH; i++) {
            char *own = piece + place_of(m, i) * PAIRED * size;
            int64_t count = rows[i] < 0 ? 0 : least(PAIRED, in - k), at = rows[i] * in + k;
            if (count == PAIRED) convert(m, from, at, PAIRED, scales[i], own, narrow);
            else convert(m, from, at, count, scales[i], own, narrow);
        }
        switch (together * size) {
            case 1: turn(piece, to, PAIRED, 1); break;
            case 2: turn(piece, to, PAIRED * size / 2, 2); break;
            case 4: turn(piece, to, PAIRED * size / 4, 4); break;
        }
    }
}

void pack_panels(const Matrix *m, const void *from, const void *bias, int narrow, int64_t *next) {
    int64_t panel;
    while ((panel = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < panels_of(m))
        if (narrow) pack_panel(m, from, bias, panel, 1);
        else pack_panel(m, from, bias, panel, 0);
}
