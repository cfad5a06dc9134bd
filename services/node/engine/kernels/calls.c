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
    multiply(p->matrix, p->x, p->made, p->rows, p->narrow != 0, p->added != 0, NULL,
             p->threads, &p->next);
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

typedef struct {
    int64_t next;
    int64_t rows, nbytes;
    const char *table;      /* rows of `nbytes` */
    const int64_t *ids;     /* [rows] */
    char *out;
} Lookup;

void look_up(void *argument) {
    Lookup *l = argument;
    int64_t row;
    while ((row = __atomic_fetch_add(&l->next, 1, __ATOMIC_RELAXED)) < l->rows)
        memcpy(l->out + row * l->nbytes, l->table + l->ids[row] * l->nbytes, (size_t)l->nbytes);
}

typedef struct {
    int64_t next;
    int64_t rows, width;
    const float *x;
    int64_t *ids;
} Largest;

/* Where the largest of x [width] is, the first of equals. -1: it is not finite, or some are NaN. */
INLINE int64_t largest_of(const float *x, int64_t width) {
    lanes most = all(-INFINITY);
    ints at = {0}, wrong = {0};
    int64_t i = 0, found = 0;
    for (; i + 16 <= width; i += 16) {
        lanes v = load(x + i);
        ints above = v > most;
        most = pick(above, v, most);
        at = (above & (int32_t)i) | (~above & at);
        wrong |= v != v;
    }
    float top = -INFINITY;
    int is_wrong = 0;
    for (int lane = 0; lane < 16; lane++) {
        int64_t place = at[lane] + lane;
        if (most[lane] > top || (most[lane] == top && place < found)) top = most[lane], found = place;
        is_wrong |= wrong[lane] != 0;
    }
    for (; i < width; i++) {
        if (x[i] > top) top = x[i], found = i;
        is_wrong |= x[i] != x[i];
    }
    return is_wrong || !isfinite(top) ? -1 : found;
}

void largest(void *argument) {
    Largest *l = argument;
    int64_t row;
    while ((row = __atomic_fetch_add(&l->next, 1, __ATOMIC_RELAXED)) < l->rows)
        l->ids[row] = largest_of(l->x + row * l->width, l->width);
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
    double seconds;                 /* so long after the first block, none is begun if `rung` */
    const int64_t *rung;            /* not 0: somebody waits; NULL: so as if */
    int64_t ran;                    /* how many blocks were run */
    void (*wait)(void);             /* until all threads came here; NULL: there is one */
    Team *team;                     /* the ranks that share `hidden`, `attended` and `gated`; NULL: none */
    int64_t rank;
    int64_t over;                   /* 1: no further block; of a team, as rank 0 said when they met */
    const int32_t *whose;           /* see Adapting; NULL: no row has an adapter */
    const LowRank *const *adapters; /* [layers, n_adapters] */
    int64_t n_adapters;
    float *low;
    int64_t stride;
    int64_t counters[8];            /* at 0 */
    int64_t shrunk[PLACES];         /* the same */
} Layers;

/* Ends a part of a layer. Its counter is not used again before the next layer. */
INLINE int64_t *ended(Layers *s, int64_t thread, int part) {
    if (s->wait) s->wait();
    if (!thread) s->counters[part] = 0;
    return &s->counters[(part + 1) % 8];
}

/* The same, of a part that other ranks go on from. */
INLINE int64_t *gathered(Layers *s, int64_t thread, int part) {
    int64_t *next = ended(s, thread, part);
    if (s->team) {
        if (!thread) {
            meet(s->team);
            s->over = s->team->over; /* all threads go by one look: others may not wait for this rank */
        }
        if (s->wait) s->wait();
    }
    return next;
}

/* The waits of `n_blocks` layers, with nothing between them: what they cost (rehearsal.py). */
void wait_layers(void *argument) {
    Layers *s = argument;
    int64_t thread = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED);
    for (int64_t layer = 0; layer < s->n_blocks; layer++)
        for (int part = 0; part < 8; part++)
            (void)(part == 3 || part == 4 || part == 6 || part == 7 ? gathered(s, thread, part)
                                                                  : ended(s, thread, part));
}

INLINE double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

INLINE int is_called(const Layers *s) {
    return !s->rung || __atomic_load_n(s->rung, __ATOMIC_RELAXED);
}

/* Multiplies, with what adapters add at this place of the layer. */
INLINE void multiply_at(Layers *s, Place place, const Matrix *m, const void *x, int narrow_x,
                        void *made, int narrow, int added, const LowRank *const *adapters,
                        int64_t thread, int64_t *next) {
    Adapting adapting = {s->whose, adapters, place, s->low, s->stride};
    int64_t rows = s->attention->rows;
    if (adapters) {
        shrink(&adapting, x, rows, m->in, narrow_x, &s->shrunk[place]);
        if (s->wait) s->wait();
        if (!thread) s->shrunk[place] = 0; /* it is not used again before the next layer */
    }
    multiply(m, x, made, rows, narrow, added, adapters ? &adapting : NULL, s->threads, next);
}

/* Runs a layer, up to the wait after its last part. */
INLINE void run_layer(Layers *s, const Layer *l, void *kv, const LowRank *const *adapters,
                      int64_t thread) {
    const Attention *a = s->attention;
    int narrow = s->narrow != 0, inner = a->narrow != 0;
    int64_t rows = a->rows, *next = s->counters;
    norm_rows(s->hidden, l->input_norm, s->normed, rows, s->width, s->eps, narrow, inner, next);
    next = ended(s, thread, 0);
    multiply_at(s, QKV, l->qkv, s->normed, inner, s->qkv, inner, 0, adapters, thread, next);
    next = ended(s, thread, 1);
    write_kv(a, s->qkv, l->qk_norm, kv, next);
    next = ended(s, thread, 2);
    attend(a, kv, s->attended, l->window, thread, next);
    next = gathered(s, thread, 3);
    multiply_at(s, O, l->o, s->attended, inner, s->hidden, narrow, 1, adapters, thread, next);
    next = gathered(s, thread, 4);
    norm_rows(s->hidden, l->post_norm, s->normed, rows, s->width, s->eps, narrow, inner, next);
    if (!l->gate_up) return;
    next = ended(s, thread, 5);
    multiply_at(s, GATE_UP, l->gate_up, s->normed, inner, s->gated, inner, 0, adapters, thread, next);
    next = gathered(s, thread, 6);
    multiply_at(s, DOWN, l->down, s->gated, inner, s->hidden, narrow, 1, adapters, thread, next);
}

void run_layers(void *argument) {
    Layers *s = argument;
    int64_t thread = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED), layer = 0, block = 0;
    double until = thread ? 0 : now() + s->seconds;
    do {
        for (; layer < s->stops[block]; layer++) {
            const Layer *l = s->layers[layer];
            const LowRank *const *adapters =
                s->whose ? s->adapters + layer * s->n_adapters : NULL;
            run_layer(s, l, s->kv + layer * s->kv_step, adapters, thread);
            if (!thread && !s->rank && layer + 1 == s->stops[block]) {
                int over = is_called(s) && now() >= until;
                if (s->team) s->team->over = over;
                else s->over = over;
            }
            gathered(s, thread, l->gate_up ? 7 : 5);
        }
        block++;
    } while (block < s->n_blocks && !s->over);
    if (!thread) s->ran = block;
}
