/* What Python calls. Each function runs on several threads at once, which have the same argument
   (`__init__.py` starts them). */

#include <time.h>

#include "kernels.h"

typedef struct {
    int64_t next;
    int64_t rows, width, narrow;
    double eps;
    const void *x, *weight;
    void *out;
} Norm;

void rms_norm(void *argument) {
    Norm *n = argument;
    int narrow = n->narrow != 0;
    norm_rows(n->x, n->weight, n->out, n->rows, n->width, n->eps, narrow, narrow, &n->next);
}

typedef struct {
    int64_t next, threads;
    int64_t rows, narrow, added;
    const Matrix *matrix;
    const void *x;
    void *made;
} Product;

void product(void *argument) {
    Product *p = argument;
    multiply(p->matrix, p->x, p->made, p->rows, p->narrow != 0, p->added != 0, p->threads,
             &p->next);
}

typedef struct {
    int64_t next;
    int64_t narrow;
    const Matrix *matrix;
    const void *weight, *bias;
} Packing;

void pack(void *argument) {
    Packing *p = argument;
    pack_panels(p->matrix, p->weight, p->bias, p->narrow != 0, &p->next);
}

/* --- layers --- */

typedef struct {
    const void *input_norm, *qk_norm, *post_norm;
    const Matrix *qkv, *o, *gate_up, *down; /* no gate_up: the layer ends with its second norm */
    int64_t window;
} Layer;

typedef struct {
    int64_t next, threads;
    int64_t width, narrow;          /* of `hidden` */
    double eps;
    const Attention *attention;
    void *hidden;                   /* [rows, width], is updated */
    void *normed, *qkv, *attended, *gated; /* in between; bfloat16 if the attention's `narrow` */
    const Layer *const *layers;
    char *kv;                       /* of the first layer; that of the next is `kv_step` bytes on */
    int64_t kv_step;
    const int64_t *stops;           /* [n_blocks]: the number of layers up to the end of a block */
    int64_t n_blocks;
    double seconds;                 /* no block is begun later than that after the first */
    int64_t ran;                    /* how many blocks were run */
    int64_t over;                   /* 1: no time is left */
    void (*wait)(void);             /* until all threads came here; NULL: there is one */
    int64_t counters[8];            /* at 0 */
} Layers;

/* Ends a part of a layer. Its counter is not used again before the next layer. */
INLINE int64_t *ended(Layers *s, int64_t thread, int part) {
    if (s->wait) s->wait();
    if (!thread) s->counters[part] = 0;
    return &s->counters[(part + 1) % 8];
}

INLINE double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Runs a layer, up to the wait after its last part. */
INLINE void run_layer(Layers *s, const Layer *l, void *kv, int64_t thread) {
    const Attention *a = s->attention;
    int narrow = s->narrow != 0, inner = a->narrow != 0;
    int64_t rows = a->rows, threads = s->threads, *next = s->counters;
    norm_rows(s->hidden, l->input_norm, s->normed, rows, s->width, s->eps, narrow, inner, next);
    next = ended(s, thread, 0);
    multiply(l->qkv, s->normed, s->qkv, rows, inner, 0, threads, next);
    next = ended(s, thread, 1);
    write_kv(a, s->qkv, l->qk_norm, kv, next);
    next = ended(s, thread, 2);
    attend(a, kv, s->attended, l->window, thread, next);
    next = ended(s, thread, 3);
    multiply(l->o, s->attended, s->hidden, rows, narrow, 1, threads, next);
    next = ended(s, thread, 4);
    norm_rows(s->hidden, l->post_norm, s->normed, rows, s->width, s->eps, narrow, inner, next);
    if (!l->gate_up) return;
    next = ended(s, thread, 5);
    multiply(l->gate_up, s->normed, s->gated, rows, inner, 0, threads, next);
    next = ended(s, thread, 6);
    multiply(l->down, s->gated, s->hidden, rows, narrow, 1, threads, next);
}

void run_layers(void *argument) {
    Layers *s = argument;
    int64_t thread = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED), layer = 0, block = 0;
    double until = thread ? 0 : now() + s->seconds;
    do {
        for (; layer < s->stops[block]; layer++) {
            const Layer *l = s->layers[layer];
            run_layer(s, l, s->kv + layer * s->kv_step, thread);
            if (!thread && layer + 1 == s->stops[block]) s->over = now() >= until;
            ended(s, thread, l->gate_up ? 7 : 5);
        }
        block++;
    } while (block < s->n_blocks && !s->over);
    if (!thread) s->ran = block;
}
