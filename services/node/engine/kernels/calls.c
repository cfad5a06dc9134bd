/* What Python calls. Each function runs on several threads at once, which have the same argument
   (`__init__.py` starts them). */

#include "kernels.h"

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
    void *kv;
    int64_t window;
} Layer;

typedef struct {
    int64_t next, threads;
    int64_t width, narrow;          /* of `hidden` */
    double eps;
    const Attention *attention;
    void *hidden;                   /* [rows, width], is updated */
    void *normed, *qkv, *attended, *gated; /* in between; bfloat16 if the attention's `narrow` */
    const Layer *layers;
    int64_t n_layers;
    void (*wait)(void);             /* until all threads came here; NULL: there is one */
    int64_t counters[8];            /* at 0 */
} Layers;

/* Ends a part of a layer. Its counter is not used again before the next layer. */
INLINE int64_t *ended(Layers *s, int64_t thread, int part) {
    if (s->wait) s->wait();
    if (!thread) s->counters[part] = 0;
    return &s->counters[(part + 1) % 8];
}

void run_layers(void *argument) {
    Layers *s = argument;
    const Attention *a = s->attention;
    int narrow = s->narrow != 0, inner = a->narrow != 0;
    int64_t rows = a->rows, threads = s->threads, *next = s->counters;
    int64_t thread = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED);
    for (const Layer *l = s->layers; l < s->layers + s->n_layers; l++) {
        norm_rows(s->hidden, l->input_norm, s->normed, rows, s->width, s->eps, narrow, inner, next);
        next = ended(s, thread, 0);
        multiply(l->qkv, s->normed, s->qkv, rows, inner, 0, threads, next);
        next = ended(s, thread, 1);
        write_kv(a, s->qkv, l->qk_norm, l->kv, next);
        next = ended(s, thread, 2);
        attend(a, l->kv, s->attended, l->window, thread, next);
        next = ended(s, thread, 3);
        multiply(l->o, s->attended, s->hidden, rows, narrow, 1, threads, next);
        next = ended(s, thread, 4);
        norm_rows(s->hidden, l->post_norm, s->normed, rows, s->width, s->eps, narrow, inner, next);
        next = ended(s, thread, 5);
        if (l->gate_up) {
            multiply(l->gate_up, s->normed, s->gated, rows, inner, 0, threads, next);
            next = ended(s, thread, 6);
            multiply(l->down, s->gated, s->hidden, rows, narrow, 1, threads, next);
            next = ended(s, thread, 7);
        } else {
            next = s->counters;
        }
    }
}
