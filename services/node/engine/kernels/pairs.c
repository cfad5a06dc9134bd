/* Products in bfloat16 with AVX-512, whose instructions add two products at a time to a sum in
   float32. */

#include "products.h"

#ifdef __AVX512BF16__

enum {
    SUMMED = 12, /* rows whose sums are in registers */
};

/* Adds the products of one pair of a row with the pairs of 16 outputs. */
INLINE lanes add_pair(lanes sum, const uint16_t *x, words pairs) {
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair),
                                   (__m512bh)pairs);
}

/* The pairs of 16 outputs, in bfloat16, which holds whole numbers of up to 8 bits exactly. */
INLINE words pairs_at(const char *weight, int64_t i, int64_t kind) {
    words pairs;
    if (kind == INT8)
        return (words)_mm512_cvtne2ps_pbh((__m512)weights_at(weight, i + 16, INT8),
                                          (__m512)weights_at(weight, i, INT8));
    memcpy(&pairs, weight + 2 * i, sizeof pairs);
    return pairs;
}

INLINE const char *narrowed_part(const char *weight, int64_t depth, uint16_t *room) {
    for (int64_t i = 0; i < depth * WIDTH; i += 32) {
        words pairs = pairs_at(weight, i, INT8);
        fetch(weight + i + AHEAD, 1);
        memcpy(room + i, &pairs, sizeof pairs);
    }
    return (const char *)room;
}

/* Adds a part to the sums of n rows. `depth` is even. */
INLINE void add_part_of_pairs(const uint16_t *x, int64_t in, const char *weight, int64_t kind,
                              int64_t depth, float *sums, int n, const char *following,
                              int64_t nbytes, int passing) {
    lanes s[SUMMED][2];
    for (int r = 0; r < n; r++)
        for (int i = 0; i < 2; i++) s[r][i] = load(sums + r * WIDTH + 16 * i);
    for (int64_t k = 0; k < depth; k += 2) {
        words w[2];
        for (int i = 0; i < 2; i++) w[i] = pairs_at(weight, k * WIDTH + 32 * i, kind);
        if (passing) fetch_once(following + nbytes * k, 2 * WIDTH * size_of(kind) / 64);
        else fetch(following + nbytes * k, (2 * nbytes + 63) / 64);
        for (int r = 0; r < n; r++)
            for (int i = 0; i < 2; i++) s[r][i] = add_pair(s[r][i], x + r * in + k, w[i]);
    }
    for (int r = 0; r < n; r++)
        for (int i = 0; i < 2; i++) store(sums + r * WIDTH + 16 * i, s[r][i]);
}

/* The same for up to SUMMED rows; for up to DIRECT, if weights have to be converted. */
INLINE void add_parts_of_pairs(const uint16_t *x, int64_t in, const char *weight, int64_t kind,
                               int64_t depth, float *sums, int64_t rows, const char *following,
                               int64_t nbytes, int passing) {
#define CASE(n) \
    case n: \
        if (n <= PASSING && passing) \
            add_part_of_pairs(x, in, weight, kind, depth, sums, n, following, nbytes, 1); \
        else if (n <= (kind == BFLOAT16 ? SUMMED : DIRECT)) \
            add_part_of_pairs(x, in, weight, kind, depth, sums, n, following, nbytes, 0); \
        break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11)
        CASE(12)
    }
#undef CASE
}

/* Adds the last number of each row, which is not one of a pair. */
INLINE void add_last(const uint16_t *x, int64_t in, const char *weight, int64_t kind, float *sums,
                     int64_t rows) {
    for (int64_t r = 0; r < rows; r++) {
        uint16_t pair[2] = {x[r * in], 0};
        for (int64_t i = 0; i < WIDTH; i += 16) {
            float *to = sums + r * WIDTH + i;
            store(to, add_pair(load(to), pair, pairs_at(weight, 2 * i, kind)));
        }
    }
}

void with_pairs(const Product *p) {
    const Matrix *m = p->matrix;
    int64_t first, count, size = size_of(m->kind), in = m->in, whole = in / 2 * 2;
    float sums[ROWS * WIDTH] __attribute__((aligned(64)));
    uint16_t room[PART * WIDTH] __attribute__((aligned(64)));
    while ((count = take_items(p->next, items_of(p), p->threads, &first)))
        for (int64_t item = first; item < first + count; item++) {
            Item it = item_of(p, item);
            const uint16_t *x = (const uint16_t *)p->x + it.row * in;
            int64_t converts = m->kind == INT8 && it.rows > DIRECT;
            int64_t passes = least(4, (it.rows + SUMMED - 1) / SUMMED);
            int passing = it.rows <= PASSING && !converts;
            memset(sums, 0, it.rows * WIDTH * sizeof *sums);
            for (int64_t k = 0; k < whole; k += PART) {
                int64_t depth = least(PART, whole - k);
                const char *part = it.weight + k * WIDTH * size, *following = part + (passing ? NEAR : AHEAD);
                if (converts) part = narrowed_part(part, depth, room);
                for (int64_t r = 0; r < it.rows; r += SUMMED) {
                    const uint16_t *own = x + r * in + k;
                    float *to = sums + r * WIDTH;
                    int64_t n = least(SUMMED, it.rows - r);
                    int64_t nbytes = converts || r >= passes * SUMMED ? 0 : WIDTH * size / passes;
                    if (converts || m->kind == BFLOAT16)
                        add_parts_of_pairs(own, in, part, BFLOAT16, depth, to, n, following, nbytes,
                                           passing);
                    else
                        add_parts_of_pairs(own, in, part, INT8, depth, to, n, following, nbytes,
                                           passing);
                    following += nbytes * depth;
                }
            }
            if (whole < in)
                add_last(x + whole, in, it.weight + whole * WIDTH * size, m->kind, sums, it.rows);
            finish(p, it.row, it.rows, it.panel, sums);
        }
}

int has_pairs(void) { return 1; }

#else

void with_pairs(const Product *p) { (void)p; }
int has_pairs(void) { return 0; }

#endif
