/* RMSNorm, and attention.

   A row's result depends on nothing but the row, its position and its sequence's keys and values:
   every sum is taken in one order, anchored at absolute positions. So it has the same bits in every
   batch, however its prompt was cut (attention.py says why). */

#include "kernels.h"

enum { PAGE = 16 };

INLINE int64_t taken(int64_t *next) { return __atomic_fetch_add(next, 1, __ATOMIC_RELAXED); }

/* --- RMSNorm --- */

/* The sum of squares, as 16 partial sums. */
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

INLINE void norm(const void *x, const void *weight, void *out, int64_t rows, int64_t width,
                 float eps, int narrow, int narrow_out, int64_t *next) {
    int64_t row;
    while ((row = taken(next)) < rows) {
        int64_t at = row * width, i = 0;
        float scale = 1.0f / sqrtf(squares(x, at, width, narrow) / (float)width + eps);
        for (; i + 16 <= width; i += 16)
            give(out, at + i, take(x, at + i, narrow) * scale * take(weight, i, narrow),
                 narrow_out);
        for (; i < width; i++)
            put(out, at + i, get(x, at + i, narrow) * scale * get(weight, i, narrow), narrow_out);
    }
}

void norm_rows(const void *x, const void *weight, void *out, int64_t rows, int64_t width,
               double eps, int narrow, int narrow_out, int64_t *next) {
    if (!narrow) norm(x, weight, out, rows, width, (float)eps, 0, 0, next);
    else if (narrow_out) norm(x, weight, out, rows, width, (float)eps, 1, 1, next);
    else norm(x, weight, out, rows, width, (float)eps, 1, 0, next);
}

/* --- attention --- */

/* Keys and values of a page lie together, head by head: keys [head_dim, PAGE], then values
   [PAGE, head_dim]. So both passes below read whole vectors, and never sum over the elements of a vector. */
INLINE void *head_of(const Attention *a, const void *kv, int64_t page, int64_t head) {
    int64_t at = (page * a->page_heads + a->first_head + head) * 2 * PAGE * a->head_dim;
    return (char *)kv + at * (a->narrow_kv ? 2 : 4);
}

INLINE float *queries_of(const Attention *a, int64_t head, int64_t row) {
    return a->queries + (head * a->rows + row) * (a->heads / a->kv_heads) * a->head_dim;
}

/* One head of one row: normed if there is a norm, then rotated. RoPE pairs dimension i with
   i + head_dim / 2. */
INLINE void turned(const Attention *a, const void *qkv, const void *qk_norm, int64_t row,
                   int64_t position, int64_t head, float *out, int narrow, int narrow_kv) {
    int64_t dim = a->head_dim, half = dim / 2;
    int64_t at = (row * (a->heads + 2 * a->kv_heads) + head) * dim;
    const float *cos = a->cos + position * half, *sin = a->sin + position * half;
    float x[dim];
    for (int64_t i = 0; i < dim; i++) x[i] = get(qkv, at + i, narrow);
    if (qk_norm) {
        float scale = 1.0f / sqrtf(squares(x, 0, dim, 0) / (float)dim + (float)a->eps);
        for (int64_t i = 0; i < dim; i++) x[i] *= scale * get(qk_norm, head * dim + i, narrow_kv);
    }
    for (int64_t i = 0; i < half; i++) {
        out[i] = x[i] * cos[i] - x[half + i] * sin[i];
        out[half + i] = x[half + i] * cos[i] + x[i] * sin[i];
    }
}

INLINE void prepare_row(const Attention *a, const void *qkv, const void *qk_norm, void *cache,
                        int64_t row, int64_t position, int64_t page, int narrow, int narrow_kv) {
    int64_t dim = a->head_dim, group = a->heads / a->kv_heads, at = position % PAGE;
    int64_t values = (row * (a->heads + 2 * a->kv_heads) + a->heads + a->kv_heads) * dim;
    float key[dim];
    for (int64_t head = 0; head < a->kv_heads; head++) {
        float *queries = queries_of(a, head, row);
        void *kv = head_of(a, cache, page, head);
        for (int64_t g = 0; g < group; g++)
            turned(a, qkv, qk_norm, row, position, head * group + g, queries + g * dim, narrow,
                   narrow_kv);
        turned(a, qkv, qk_norm, row, position, a->heads + head, key, narrow, narrow_kv);
        for (int64_t i = 0; i < dim; i++) put(kv, i * PAGE + at, key[i], narrow_kv);
        for (int64_t i = 0; i < dim; i++)
            put(kv, (PAGE + at) * dim + i, get(qkv, values + head * dim + i, narrow), narrow_kv);
    }
}

INLINE void prepare(const Attention *a, const void *qkv, const void *qk_norm, void *cache,
                    int64_t *next, int narrow, int narrow_kv) {
    int64_t number;
    while ((number = taken(next)) < a->n_spans) {
        const int32_t *span = a->spans + 4 * number, *pages = a->pages + span[3];
        for (int64_t i = 0; i < span[1]; i++) {
            int64_t position = span[2] + i;
            prepare_row(a, qkv, qk_norm, cache, span[0] + i, position, pages[position / PAGE],
                        narrow, narrow_kv);
        }
    }
}

void write_kv(const Attention *a, const void *qkv, const void *qk_norm, void *kv, int64_t *next) {
    if (!a->narrow_kv) prepare(a, qkv, qk_norm, kv, next, 0, 0);
    else if (a->narrow) prepare(a, qkv, qk_norm, kv, next, 1, 1);
    else prepare(a, qkv, qk_norm, kv, next, 0, 1);
}

/* Scores of n queries against a page's keys. */
INLINE void score(const float *queries, const void *keys, int64_t dim, float scale, float *scores,
                  int64_t stride, int n, int narrow_kv) {
    lanes sums[8];
    for (int r = 0; r < n; r++) sums[r] = (lanes){0};
    for (int64_t i = 0; i < dim; i++) {
        lanes key = take(keys, i * PAGE, narrow_kv);
        for (int r = 0; r < n; r++) sums[r] += queries[r * dim + i] * key;
    }
    for (int r = 0; r < n; r++) store(scores + r * stride, sums[r] * scale);
}

/* The same for any n. */
INLINE void score_all(const float *queries, const void *keys, int64_t dim, float scale,
                      float *scores, int64_t stride, int64_t n, int narrow_kv) {
    int64_t r = 0;
    for (; r + 8 <= n; r += 8)
        score(queries + r * dim, keys, dim, scale, scores + r * stride, stride, 8, narrow_kv);
    for (; r + 3 <= n; r += 3)
        score(queries + r * dim, keys, dim, scale, scores + r * stride, stride, 3, narrow_kv);
    for (; r < n; r++)
        score(queries + r * dim, keys, dim, scale, scores + r * stride, stride, 1, narrow_kv);
}

/* Adds weights x values of a page's first `keys` positions, for n rows and `vectors` x 16
   dimensions. */
INLINE void weigh(const float *weights, int64_t stride, const void *values, int64_t keys,
                  int64_t from, int64_t dim, lanes *sums, int n, int vectors, int narrow_kv) {
    for (int64_t key = 0; key < keys; key++) {
        lanes value[4];
        for (int v = 0; v < vectors; v++) value[v] = take(values, from + key * dim + 16 * v, narrow_kv);
        for (int r = 0; r < n; r++) {
            float weight = weights[r * stride + key];
            for (int v = 0; v < vectors; v++) sums[r * vectors + v] += weight * value[v];
        }
    }
}

/* The weighted sum over all pages, for n rows and a part of a head's dimensions. Of the last page
   only the first `keys` positions are read: after them lies what another sequence left, and that
   may be NaN. */
INLINE void sum_values(const Attention *a, const void *kv, const int32_t *pages, int64_t first,
                       int64_t last, int64_t keys, int64_t head, int64_t from,
                       const float *weights, int64_t stride, float *out, int64_t step, int n,
                       int vectors, int narrow_kv) {
    lanes sums[24];
    int64_t dim = a->head_dim, at = PAGE * dim + from;
    for (int i = 0; i < n * vectors; i++) sums[i] = (lanes){0};
    for (int64_t page = first; page < last; page++, weights += PAGE)
        weigh(weights, stride, head_of(a, kv, pages[page], head), PAGE, at, dim, sums, n, vectors,
              narrow_kv);
    weigh(weights, stride, head_of(a, kv, pages[last], head), keys, at, dim, sums, n, vectors,
          narrow_kv);
    for (int r = 0; r < n; r++)
        for (int v = 0; v < vectors; v++) store(out + r * step + from + 16 * v, sums[r * vectors + v]);
}

/* The same for the last dimensions, which do not fill a vector. Each product is added in one rounding, said
   by fmaf: of a plain sum GCC may vectorise the products of some keys, and which keys depends on how many
   there are. */
INLINE void sum_tail(const Attention *a, const void *kv, const int32_t *pages, int64_t first,
                     int64_t last, int64_t keys, int64_t head, int64_t from, const float *weights,
                     float *out, int narrow_kv) {
    for (int64_t i = from; i < a->head_dim; i++) {
        float sum = 0;
        for (int64_t page = first; page <= last; page++) {
            const void *values = head_of(a, kv, pages[page], head);
            for (int64_t key = 0; key < (page < last ? PAGE : keys); key++)
                sum = fmaf(weights[(page - first) * PAGE + key],
                           get(values, (PAGE + key) * a->head_dim + i, narrow_kv), sum);
        }
        out[i] = sum;
    }
}

/* Turns scores [length] into weights. Positions before `start` and after `last` get no weight. */
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

/* Prefetches a page. Pages lie anywhere, so the processor cannot guess which comes next. */
INLINE void fetch_page(const Attention *a, const char *page, int narrow_kv) {
    int64_t nbytes = 2 * PAGE * a->head_dim * (narrow_kv ? 2 : 4);
    for (int64_t i = 0; i < nbytes; i += 64) __builtin_prefetch(page + i, 0, 2);
}

INLINE void attend_span(const Attention *a, const void *kv, void *attended, int64_t window,
                        const int32_t *span, int64_t head, float *scores, int narrow,
                        int narrow_kv) {
    int64_t row = span[0], count = span[1], position = span[2], dim = a->head_dim;
    const int32_t *pages = a->pages + span[3];
    int64_t group = a->heads / a->kv_heads, n = count * group;
    int64_t seen = window && position + 1 > window ? position + 1 - window : 0;
    int64_t first = seen / PAGE, last = (position + count - 1) / PAGE;
    int64_t length = (last - first + 1) * PAGE, keys = (position + count - 1) % PAGE + 1;
    float *queries = queries_of(a, head, row), sums[n];

    for (int64_t page = first; page <= last; page++) {
        if (page + 1 <= last) fetch_page(a, head_of(a, kv, pages[page + 1], head), narrow_kv);
        score_all(queries, head_of(a, kv, pages[page], head), dim, (float)a->scale,
                  scores + (page - first) * PAGE, length, n, narrow_kv);
    }
    for (int64_t r = 0; r < n; r++) {
        int64_t at = position + r / group;
        int64_t start = window && at + 1 > window ? at + 1 - window : 0;
        start = start > first * PAGE ? start - first * PAGE : 0;
        sums[r] = softmax(scores + r * length, start, at - first * PAGE, length);
    }
    float *out = queries; /* the queries are not needed any more */
    for (int64_t r = 0; r < n;) {
        int64_t from = 0, rows = r + 6 <= n ? 6 : r + 3 <= n ? 3 : 1;
        const float *w = scores + r * length;
        float *o = out + r * dim;
        for (; from + 64 <= dim; from += 64)
            if (rows == 6)
                sum_values(a, kv, pages, first, last, keys, head, from, w, length, o, dim, 6, 4,
                           narrow_kv);
            else if (rows == 3)
                sum_values(a, kv, pages, first, last, keys, head, from, w, length, o, dim, 3, 4,
                           narrow_kv);
            else
                sum_values(a, kv, pages, first, last, keys, head, from, w, length, o, dim, 1, 4,
                           narrow_kv);
        for (; from + 16 <= dim; from += 16)
            for (int64_t i = 0; i < rows; i++)
                sum_values(a, kv, pages, first, last, keys, head, from, w + i * length, length,
                           o + i * dim, dim, 1, 1, narrow_kv);
        for (int64_t i = 0; i < rows; i++)
            sum_tail(a, kv, pages, first, last, keys, head, from, w + i * length, o + i * dim,
                     narrow_kv);
        r += rows;
    }
    for (int64_t r = 0; r < n; r++) {
        int64_t of = (row + r / group) * a->page_heads + a->first_head + head;
        int64_t to = (of * group + r % group) * dim;
        for (int64_t j = 0; j < dim; j++)
            put(attended, to + j, out[r * dim + j] / sums[r], narrow);
    }
}

INLINE void attend_all(const Attention *a, const void *kv, void *attended, int64_t window,
                       int64_t thread, int64_t *next, int narrow, int narrow_kv) {
    int64_t item, items = a->n_spans * a->kv_heads;
    float *scores = a->scratch + thread * a->scratch_size;
    while ((item = taken(next)) < items)
        attend_span(a, kv, attended, window, a->spans + 4 * (item / a->kv_heads),
                    item % a->kv_heads, scores, narrow, narrow_kv);
}

void attend(const Attention *a, const void *kv, void *attended, int64_t window, int64_t thread,
            int64_t *next) {
    if (!a->narrow_kv) attend_all(a, kv, attended, window, thread, next, 0, 0);
    else if (a->narrow) attend_all(a, kv, attended, window, thread, next, 1, 1);
    else attend_all(a, kv, attended, window, thread, next, 0, 1);
}
