/* What a decoder computes besides products with weights, for processors.

   Each function runs on several threads at once (`__init__.py` starts them): they take items from a
   counter until none is left. A row's result depends on nothing but the row, its position and its
   sequence's keys and values: every sum is taken in one order, anchored at absolute positions. So it
   has the same bits in every batch, however its prompt was cut (attention.py says why).

   Activations are float32 or bfloat16, computed with in float32. Vectors are GCC's, of any width that
   the processor has. */

#include <stdint.h>
#include <stddef.h>
#include <string.h>
#include <math.h>

enum { PAGE = 16, BLOCK = 16 };

typedef float lanes __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));

#define INLINE static inline __attribute__((always_inline))

/* --- numbers --- */

INLINE lanes load(const float *p) { lanes v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, lanes v) { memcpy(p, &v, sizeof v); }
INLINE lanes all(float x) { return x - (lanes){0}; }
INLINE lanes pick(ints which, lanes yes, lanes no) {
    ints a, b;
    lanes v;
    memcpy(&a, &yes, sizeof a);
    memcpy(&b, &no, sizeof b);
    a = (which & a) | (~which & b);
    memcpy(&v, &a, sizeof v);
    return v;
}

INLINE float widened(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* To the nearest, ties to even; NaN stays NaN. */
INLINE uint16_t narrowed(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* Element i of an array of either type. */
INLINE float get(const void *x, int64_t i, int narrow) {
    return narrow ? widened(((const uint16_t *)x)[i]) : ((const float *)x)[i];
}
INLINE void put(void *x, int64_t i, float value, int narrow) {
    if (narrow) ((uint16_t *)x)[i] = narrowed(value);
    else ((float *)x)[i] = value;
}
INLINE float sum_of(lanes v) {
    float total = 0;
    for (int i = 0; i < 16; i++) total += v[i];
    return total;
}
INLINE float max_of(lanes v) {
    float most = v[0];
    for (int i = 1; i < 16; i++) most = v[i] > most ? v[i] : most;
    return most;
}

/* e^x for x <= 0, 0 below -87 (Cephes' expf: within 2 units in the last place). */
INLINE lanes exp_of(lanes x) {
    ints far = x < all(-87.0f);
    x = pick(far, all(-87.0f), x);
    lanes shifted = x * 1.44269504f + 12582912.0f; /* rounds to a whole number */
    lanes n = shifted - 12582912.0f;
    lanes r = x - n * 0.693359375f + n * 2.12194440e-4f;
    lanes y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    ints exponent = (__builtin_convertvector(n, ints) + 127) << 23;
    lanes power;
    memcpy(&power, &exponent, sizeof power);
    y = y * power;
    return pick(far, (lanes){0}, y);
}

/* --- RMSNorm and the gated activation --- */

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
        lanes v;
        for (int j = 0; j < 16; j++) v[j] = get(x, at + i + j, narrow);
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
        for (int64_t i = 0; i < width; i++) {
            float normed = get(n->x, at + i, narrow) * scale;
            put(n->out, at + i, normed * get(n->weight, i, narrow), narrow);
        }
    }
}

void rms_norm(void *argument) {
    Norm *n = argument;
    if (n->narrow) norm(n, 1);
    else norm(n, 0);
}

typedef struct {
    int64_t next;
    int64_t rows, width, narrow;
    const void *gate_up; /* [rows, 2 x width] */
    void *out;           /* [rows, width] */
} Gated;

INLINE void gated(Gated *g, int narrow) {
    int64_t row, width = g->width;
    while ((row = __atomic_fetch_add(&g->next, 1, __ATOMIC_RELAXED)) < g->rows) {
        int64_t at = row * width, from = 2 * at;
        for (int64_t i = 0; i < width; i += 16) {
            int64_t n = width - i < 16 ? width - i : 16;
            lanes x = {0}, small;
            for (int j = 0; j < n; j++) x[j] = get(g->gate_up, from + i + j, narrow);
            ints below = x < 0.0f;
            small = exp_of(pick(below, x, -x)); /* silu(x) = x / (1 + e^-x), without overflow */
            lanes active = pick(below, x * small, x) / (1.0f + small);
            for (int j = 0; j < n; j++) {
                float up = get(g->gate_up, from + width + i + j, narrow);
                put(g->out, at + i + j, active[j] * up, narrow);
            }
        }
    }
}

void silu_times(void *argument) {
    Gated *g = argument;
    if (g->narrow) gated(g, 1);
    else gated(g, 0);
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
    float *queries;         /* [rows, heads x head_dim] */
    void *attended;         /* [rows, heads x head_dim] */
    const int32_t *spans;   /* [n_spans, 4]: first row, rows (at most BLOCK), position of the first,
                               where its sequence's pages begin in: */
    const int32_t *pages;
    int64_t n_spans;
    float *scratch; /* each worker's [BLOCK x group, longest] */
    int64_t scratch_size;
} Attention;

INLINE float *head_of(const Attention *a, int64_t page, int64_t head) {
    return a->kv + (page * a->kv_heads + head) * 2 * PAGE * a->head_dim;
}

/* One head of one row, normed if it is to be, and turned (RoPE pairs i with i + head_dim / 2). */
INLINE void turned(const Attention *a, int64_t row, int64_t head, float *out, int narrow) {
    int64_t dim = a->head_dim, half = dim / 2;
    int64_t at = (row * (a->heads + 2 * a->kv_heads) + head) * dim;
    const float *cos = a->cos + row * half, *sin = a->sin + row * half;
    float scale = 1;
    if (a->qk_norm)
        scale = 1.0f / sqrtf(squares(a->qkv, at, dim, narrow) / (float)dim + (float)a->eps);
    for (int64_t i = 0; i < half; i++) {
        float low = get(a->qkv, at + i, narrow), high = get(a->qkv, at + half + i, narrow);
        if (a->qk_norm) {
            low = low * scale * get(a->qk_norm, head * dim + i, narrow);
            high = high * scale * get(a->qk_norm, head * dim + half + i, narrow);
        }
        out[i] = low * cos[i] - high * sin[i];
        out[half + i] = high * cos[i] + low * sin[i];
    }
}

INLINE void prepare(Attention *a, int narrow) {
    int64_t row, dim = a->head_dim;
    float key[dim];
    while ((row = __atomic_fetch_add(&a->next, 1, __ATOMIC_RELAXED)) < a->rows) {
        for (int64_t head = 0; head < a->heads; head++)
            turned(a, row, head, a->queries + (row * a->heads + head) * dim, narrow);
        int64_t page = a->slots[row] / PAGE, at = a->slots[row] % PAGE;
        int64_t values = (row * (a->heads + 2 * a->kv_heads) + a->heads + a->kv_heads) * dim;
        for (int64_t head = 0; head < a->kv_heads; head++) {
            float *kv = head_of(a, page, head);
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

/* Scores of n queries, `step` apart, with a page's keys. */
INLINE void score(const float *queries, int64_t step, const float *keys, int64_t dim, float scale,
                  float *scores, int64_t stride, int n) {
    lanes sums[8];
    for (int r = 0; r < n; r++) sums[r] = (lanes){0};
    for (int64_t i = 0; i < dim; i++) {
        lanes key = load(keys + i * PAGE);
        for (int r = 0; r < n; r++) sums[r] += queries[r * step + i] * key;
    }
    for (int r = 0; r < n; r++) store(scores + r * stride, sums[r] * scale);
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
    lanes sums[12];
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
    int64_t group = a->heads / a->kv_heads, n = count * group, width = a->heads * dim;
    int64_t seen = a->window && position + 1 > a->window ? position + 1 - a->window : 0;
    int64_t first = seen / PAGE, last = (position + count - 1) / PAGE;
    int64_t length = (last - first + 1) * PAGE;
    float *queries = a->queries + row * width + head * group * dim;

    for (int64_t page = first; page <= last; page++) {
        const float *keys = head_of(a, pages[page], head);
        float *to = scores + (page - first) * PAGE;
        for (int64_t i = 0; i < count; i++) {
            const float *q = queries + i * width;
            float *s = to + i * group * length;
            int64_t g = 0;
            for (; g + 8 <= group; g += 8)
                score(q + g * dim, dim, keys, dim, (float)a->scale, s + g * length, length, 8);
            for (; g + 4 <= group; g += 4)
                score(q + g * dim, dim, keys, dim, (float)a->scale, s + g * length, length, 4);
            if (group - g == 3)
                score(q + g * dim, dim, keys, dim, (float)a->scale, s + g * length, length, 3);
            else if (group - g == 2)
                score(q + g * dim, dim, keys, dim, (float)a->scale, s + g * length, length, 2);
            else if (group - g == 1)
                score(q + g * dim, dim, keys, dim, (float)a->scale, s + g * length, length, 1);
        }
    }
    float sums[n];
    for (int64_t r = 0; r < n; r++) {
        int64_t at = position + r / group;
        int64_t start = a->window && at + 1 > a->window ? at + 1 - a->window : 0;
        start = start > first * PAGE ? start - first * PAGE : 0;
        sums[r] = softmax(scores + r * length, start, at - first * PAGE, length);
    }
    for (int64_t i = 0; i < count; i++) {
        float *out = queries + i * width; /* they are not needed any more */
        const float *weights = scores + i * group * length;
        for (int64_t g = 0; g < group; g++) {
            int64_t from = 0;
            const float *w = weights + g * length;
            float *o = out + g * dim;
            if (g + 3 <= group) {
                for (; from + 64 <= dim; from += 64)
                    sum_values(a, pages, first, last, head, from, w, length, o, dim, 3, 4);
                for (; from + 16 <= dim; from += 16)
                    sum_values(a, pages, first, last, head, from, w, length, o, dim, 3, 1);
                for (int r = 0; r < 3; r++)
                    sum_tail(a, pages, first, last, head, from, w + r * length, o + r * dim);
                g += 2;
                continue;
            }
            for (; from + 64 <= dim; from += 64)
                sum_values(a, pages, first, last, head, from, w, length, o, dim, 1, 4);
            for (; from + 16 <= dim; from += 16)
                sum_values(a, pages, first, last, head, from, w, length, o, dim, 1, 1);
            sum_tail(a, pages, first, last, head, from, w, o);
        }
        for (int64_t g = 0; g < group; g++)
            for (int64_t j = 0; j < dim; j++)
                put(a->attended, (row + i) * width + (head * group + g) * dim + j,
                    out[g * dim + j] / sums[i * group + g], narrow);
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
