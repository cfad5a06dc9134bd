/* What a decoder computes besides products with weights, for processors.

   Each function runs on several threads at once (`__init__.py` starts them): they take items from a
   counter until none is left. A row's result depends on nothing but the row, its position and its
   sequence's keys and values: every sum is taken in one order, anchored at absolute positions. So it
   has the same bits in every batch, however its prompt was cut (attention.py says why). */

#include "numbers.h"

enum { PAGE = 16 };

/* --- RMSNorm --- */

typedef struct {
    int64_t next;
    int64_t rows, width, narrow;
    const void *x, *weight;
    void *out;
    double eps;
} Norm;

/* The sum of squares: 16 partial sums. */
INLINE float squares(const void *x, int64_t at, int64_t width, int narrow) {
    lanes sums = {0};
    int64_t i = 0;
    for (; i + 16 <= width; i += 16) {
        lanes v = take(x, at + i, narrow);
        sums += v * v;
    }
    float total = sum_of(sums);
    for (; i < width; i++) {
        float v = get(x, at + i, narrow);
        total += v * v;
    }
    return total;
}

INLINE void norm(Norm *n, int narrow) {
    int64_t row, width = n->width;
    while ((row = __atomic_fetch_add(&n->next, 1, __ATOMIC_RELAXED)) < n->rows) {
        int64_t at = row * width;
        float mean = squares(n->x, at, width, narrow) / (float)width;
        float scale = 1.0f / sqrtf(mean + (float)n->eps);
        int64_t i = 0;
        for (; i + 16 <= width; i += 16)
            give(n->out, at + i, take(n->x, at + i, narrow) * scale * take(n->weight, i, narrow),
                 narrow);
        for (; i < width; i++)
            put(n->out, at + i, get(n->x, at + i, narrow) * scale * get(n->weight, i, narrow),
                narrow);
    }
}

void rms_norm(void *argument) {
    Norm *n = argument;
    if (n->narrow) norm(n, 1);
    else norm(n, 0);
}

/* --- attention --- */

/* Keys and values of a page lie together, head by head: keys [head_dim, PAGE], then values
   [PAGE, head_dim]. So both passes below read vectors, and sum over nothing inside one. */
typedef struct {
    int64_t next, workers;
    int64_t narrow;
    int64_t rows, heads, kv_heads, head_dim, window;
    const void *qkv; /* [rows, (heads + 2 kv heads) x head_dim] */
    const void *qk_norm; /* [heads + kv heads, head_dim] or NULL */
    double eps, scale;
    const float *cos, *sin; /* [rows, head_dim / 2] */
    const int32_t *slots;   /* [rows] */
    float *kv;              /* the layer's */
    float *queries;         /* [kv heads, rows, group x head_dim] */
    void *attended;         /* [rows, heads x head_dim] */
    const int32_t *spans;   /* [n_spans, 4]: first row, rows, position of the first,
                               where its sequence's pages begin in: */
    const int32_t *pages;
    int64_t n_spans;
    float *scratch; /* each worker's, for the scores of a span */
    int64_t scratch_size;
} Attention;

INLINE float *head_of(const Attention *a, int64_t page, int64_t head) {
    return a->kv + (page * a->kv_heads + head) * 2 * PAGE * a->head_dim;
}

INLINE float *queries_of(const Attention *a, int64_t head, int64_t row) {
    return a->queries + (head * a->rows + row) * (a->heads / a->kv_heads) * a->head_dim;
}

/* One head of one row, normed if it is to be, and turned (RoPE pairs i with i + head_dim / 2). */
INLINE void turned(const Attention *a, int64_t row, int64_t head, float *out, int narrow) {
    int64_t dim = a->head_dim, half = dim / 2;
    int64_t at = (row * (a->heads + 2 * a->kv_heads) + head) * dim;
    const float *cos = a->cos + row * half, *sin = a->sin + row * half;
    float x[dim];
    for (int64_t i = 0; i < dim; i++) x[i] = get(a->qkv, at + i, narrow);
    if (a->qk_norm) {
        float scale = 1.0f / sqrtf(squares(x, 0, dim, 0) / (float)dim + (float)a->eps);
        for (int64_t i = 0; i < dim; i++) x[i] *= scale * get(a->qk_norm, head * dim + i, narrow);
    }
    for (int64_t i = 0; i < half; i++) {
        out[i] = x[i] * cos[i] - x[half + i] * sin[i];
        out[half + i] = x[half + i] * cos[i] + x[i] * sin[i];
    }
}

INLINE void prepare(Attention *a, int narrow) {
    int64_t row, dim = a->head_dim, group = a->heads / a->kv_heads;
    float key[dim];
    while ((row = __atomic_fetch_add(&a->next, 1, __ATOMIC_RELAXED)) < a->rows) {
        int64_t page = a->slots[row] / PAGE, at = a->slots[row] % PAGE;
        int64_t values = (row * (a->heads + 2 * a->kv_heads) + a->heads + a->kv_heads) * dim;
        for (int64_t head = 0; head < a->kv_heads; head++) {
            float *queries = queries_of(a, head, row), *kv = head_of(a, page, head);
            for (int64_t g = 0; g < group; g++)
                turned(a, row, head * group + g, queries + g * dim, narrow);
            turned(a, row, a->heads + head, key, narrow);
            for (int64_t i = 0; i < dim; i++) kv[i * PAGE + at] = key[i];
            kv += PAGE * dim + at * dim;
            for (int64_t i = 0; i < dim; i++) kv[i] = get(a->qkv, values + head * dim + i, narrow);
        }
    }
}

/* Turns queries, and writes keys and values to the cache. */
void write_kv(void *argument) {
    Attention *a = argument;
    if (a->narrow) prepare(a, 1);
    else prepare(a, 0);
}

/* Scores of n queries with a page's keys. */
INLINE void score(const float *queries, const float *keys, int64_t dim, float scale, float *scores,
                  int64_t stride, int n) {
    lanes sums[8];
    for (int r = 0; r < n; r++) sums[r] = (lanes){0};
    for (int64_t i = 0; i < dim; i++) {
        lanes key = load(keys + i * PAGE);
        for (int r = 0; r < n; r++) sums[r] += queries[r * dim + i] * key;
    }
    for (int r = 0; r < n; r++) store(scores + r * stride, sums[r] * scale);
}

/* The same for any n. */
INLINE void score_all(const float *queries, const float *keys, int64_t dim, float scale,
                      float *scores, int64_t stride, int64_t n) {
    int64_t r = 0;
    for (; r + 8 <= n; r += 8)
        score(queries + r * dim, keys, dim, scale, scores + r * stride, stride, 8);
    for (; r + 3 <= n; r += 3)
        score(queries + r * dim, keys, dim, scale, scores + r * stride, stride, 3);
    for (; r < n; r++)
        score(queries + r * dim, keys, dim, scale, scores + r * stride, stride, 1);
}

/* Adds weights x values of a page for n rows and `vectors` x 16 dimensions. */
INLINE void weigh(const float *weights, int64_t stride, const float *values, int64_t dim,
                  lanes *sums, int n, int vectors) {
    for (int64_t key = 0; key < PAGE; key++) {
        lanes value[4];
        for (int v = 0; v < vectors; v++) value[v] = load(values + key * dim + 16 * v);
        for (int r = 0; r < n; r++) {
            float weight = weights[r * stride + key];
            for (int v = 0; v < vectors; v++) sums[r * vectors + v] += weight * value[v];
        }
    }
}

/* A part of a head's dimensions, of n rows: the weighted sum over all pages. */
INLINE void sum_values(const Attention *a, const int32_t *pages, int64_t first, int64_t last,
                       int64_t head, int64_t from, const float *weights, int64_t stride,
                       float *out, int64_t step, int n, int vectors) {
    lanes sums[24];
    for (int i = 0; i < n * vectors; i++) sums[i] = (lanes){0};
    for (int64_t page = first; page <= last; page++) {
        const float *values = head_of(a, pages[page], head) + PAGE * a->head_dim + from;
        weigh(weights + (page - first) * PAGE, stride, values, a->head_dim, sums, n, vectors);
    }
    for (int r = 0; r < n; r++)
        for (int v = 0; v < vectors; v++) store(out + r * step + from + 16 * v, sums[r * vectors + v]);
}

/* Those that fill no vector. */
INLINE void sum_tail(const Attention *a, const int32_t *pages, int64_t first, int64_t last,
                     int64_t head, int64_t from, const float *weights, float *out) {
    for (int64_t i = from; i < a->head_dim; i++) {
        float sum = 0;
        for (int64_t page = first; page <= last; page++) {
            const float *values = head_of(a, pages[page], head) + PAGE * a->head_dim + i;
            for (int64_t key = 0; key < PAGE; key++)
                sum += weights[(page - first) * PAGE + key] * values[key * a->head_dim];
        }
        out[i] = sum;
    }
}

/* Scores [length] to weights; positions before `start` and after `last` weigh nothing. */
INLINE float softmax(float *scores, int64_t start, int64_t last, int64_t length) {
    for (int64_t i = 0; i < start; i++) scores[i] = -INFINITY;
    for (int64_t i = last + 1; i < length; i++) scores[i] = -INFINITY;
    lanes most = load(scores);
    for (int64_t i = 16; i < length; i += 16) {
        lanes v = load(scores + i);
        most = pick(v > most, v, most);
    }
    lanes top = all(max_of(most)), sums = {0};
    for (int64_t i = 0; i < length; i += 16) {
        lanes v = load(scores + i), weight = exp_of(v - top);
        weight = pick(v == v, weight, v); /* NaN stays */
        store(scores + i, weight);
        sums += weight;
    }
    return sum_of(sums);
}

INLINE void attend_span(const Attention *a, const int32_t *span, int64_t head, float *scores,
                        int narrow) {
    int64_t row = span[0], count = span[1], position = span[2], dim = a->head_dim;
    const int32_t *pages = a->pages + span[3];
    int64_t group = a->heads / a->kv_heads, n = count * group;
    int64_t seen = a->window && position + 1 > a->window ? position + 1 - a->window : 0;
    int64_t first = seen / PAGE, last = (position + count - 1) / PAGE;
    int64_t length = (last - first + 1) * PAGE;
    float *queries = queries_of(a, head, row), sums[n];

    for (int64_t page = first; page <= last; page++)
        score_all(queries, head_of(a, pages[page], head), dim, (float)a->scale,
                  scores + (page - first) * PAGE, length, n);
    for (int64_t r = 0; r < n; r++) {
        int64_t at = position + r / group;
        int64_t start = a->window && at + 1 > a->window ? at + 1 - a->window : 0;
        start = start > first * PAGE ? start - first * PAGE : 0;
        sums[r] = softmax(scores + r * length, start, at - first * PAGE, length);
    }
    float *out = queries; /* they are not needed any more */
    for (int64_t r = 0; r < n;) {
        int64_t from = 0, rows = r + 6 <= n ? 6 : r + 3 <= n ? 3 : 1;
        const float *w = scores + r * length;
        float *o = out + r * dim;
        for (; from + 64 <= dim; from += 64)
            if (rows == 6)
                sum_values(a, pages, first, last, head, from, w, length, o, dim, 6, 4);
            else if (rows == 3)
                sum_values(a, pages, first, last, head, from, w, length, o, dim, 3, 4);
            else
                sum_values(a, pages, first, last, head, from, w, length, o, dim, 1, 4);
        for (; from + 16 <= dim; from += 16)
            for (int64_t i = 0; i < rows; i++)
                sum_values(a, pages, first, last, head, from, w + i * length, length, o + i * dim,
                           dim, 1, 1);
        for (int64_t i = 0; i < rows; i++)
            sum_tail(a, pages, first, last, head, from, w + i * length, o + i * dim);
        r += rows;
    }
    for (int64_t r = 0; r < n; r++) {
        int64_t to = ((row + r / group) * a->heads + head * group + r % group) * dim;
        for (int64_t j = 0; j < dim; j++)
            put(a->attended, to + j, out[r * dim + j] / sums[r], narrow);
    }
}

INLINE void attend_all(Attention *a, int narrow) {
    int64_t item, items = a->n_spans * a->kv_heads;
    int64_t worker = __atomic_fetch_add(&a->workers, 1, __ATOMIC_RELAXED);
    float *scores = a->scratch + worker * a->scratch_size;
    while ((item = __atomic_fetch_add(&a->next, 1, __ATOMIC_RELAXED)) < items)
        attend_span(a, a->spans + 4 * (item / a->kv_heads), item % a->kv_heads, scores, narrow);
}

/* Causal attention over the cache. Overwrites the queries. */
void attend(void *argument) {
    Attention *a = argument;
    if (a->narrow) attend_all(a, 1);
    else attend_all(a, 0);
}
