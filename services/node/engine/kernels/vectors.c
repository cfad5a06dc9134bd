/* Products in float32, with vectors of any width. */

#include "products.h"

enum {
#ifdef __AVX512F__
    FEW = 8, /* rows whose sums are in registers */
#else
    FEW = 3,
#endif
};

/* A part's weights in float32. What comes next is fetched meanwhile. */
INLINE const char *widened_part(int64_t kind, const char *weight, int64_t depth, float *room) {
    for (int64_t i = 0; i < depth * WIDTH; i += 16) {
        fetch(weight + i * size_of(kind) + AHEAD, 1);
        store(room + i, weights_at(weight, i, kind));
    }
    return (const char *)room;
}

/* Adds a part to the sums of n rows. */
INLINE void add_part(const float *x, int64_t in, const char *weight, int64_t kind, int64_t depth,
                     float *sums, int n, const char *following, int64_t nbytes, int passing) {
    lanes s[FEW][2];
    for (int r = 0; r < n; r++) s[r][0] = s[r][1] = (lanes){0};
    for (int64_t k = 0; k < depth; k++) {
        lanes w[2];
        for (int i = 0; i < 2; i++) w[i] = weights_at(weight, k * WIDTH + 16 * i, kind);
        if (passing) fetch(following + nbytes * k, (WIDTH * size_of(kind) + 63) / 64);
        else fetch(following + nbytes * k, (nbytes + 63) / 64);
        for (int r = 0; r < n; r++)
            for (int i = 0; i < 2; i++) s[r][i] += x[r * in + k] * w[i];
    }
    for (int r = 0; r < n; r++)
        for (int i = 0; i < 2; i++) {
            float *to = sums + r * WIDTH + 16 * i;
            store(to, load(to) + s[r][i]);
        }
}

/* The same for up to FEW rows; for up to DIRECT, if weights have to be converted. */
INLINE void add_parts(const float *x, int64_t in, const char *weight, int64_t kind, int64_t depth,
                      float *sums, int64_t rows, const char *following, int64_t nbytes,
                      int passing) {
#define CASE(n) \
    case n: \
        if (n <= PASSING && passing) \
            add_part(x, in, weight, kind, depth, sums, n, following, nbytes, 1); \
        else if (n <= FEW && (n <= DIRECT || kind == FLOAT32)) \
            add_part(x, in, weight, kind, depth, sums, n, following, nbytes, 0); \
        break;
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
#undef CASE
}

void with_vectors(const Product *p) {
    const Matrix *m = p->matrix;
    int64_t first, count, size = size_of(m->kind), in = m->in;
    int64_t most = m->kind == FLOAT32 ? PART : CONVERTED;
    float sums[ROWS * WIDTH] __attribute__((aligned(64)));
    float room[CONVERTED * WIDTH] __attribute__((aligned(64)));
    while ((count = take_items(p->next, items_of(p), p->threads, &first)))
        for (int64_t item = first; item < first + count; item++) {
            Item it = item_of(p, item);
            const float *x = (const float *)p->x + it.row * in;
            int64_t kind = it.rows > DIRECT ? FLOAT32 : m->kind;
            int64_t converts = kind != m->kind, passes = it.rows > FEW ? 2 : 1;
            int passing = it.rows <= least(PASSING, FEW) && !converts;
            memset(sums, 0, it.rows * WIDTH * sizeof *sums);
            for (int64_t k = 0; k < in; k += most) {
                int64_t depth = least(most, in - k);
                const char *part = it.weight + k * WIDTH * size, *following = part + (passing ? NEAR_VECTORS : AHEAD);
                if (converts) part = widened_part(m->kind, part, depth, room);
                for (int64_t r = 0; r < it.rows; r += FEW) {
                    const float *own = x + r * in + k;
                    float *to = sums + r * WIDTH;
                    /* What comes next is fetched in the first passes. */
                    int64_t nbytes = converts || r >= passes * FEW ? 0 : WIDTH * size / passes;
                    int64_t n = least(FEW, it.rows - r);
                    if (kind == FLOAT32)
                        add_parts(own, in, part, FLOAT32, depth, to, n, following, nbytes, passing);
                    else if (kind == BFLOAT16)
                        add_parts(own, in, part, BFLOAT16, depth, to, n, following, nbytes, passing);
                    else add_parts(own, in, part, INT8, depth, to, n, following, nbytes, passing);
                    following += nbytes * depth;
                }
            }
            finish(p, it.row, it.rows, it.panel, sums);
        }
}
