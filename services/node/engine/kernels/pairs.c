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

/* A pair of each output of a panel: 64 weights of 8 bits in bfloat16, which holds whole numbers of up
   to 8 bits exactly. */
#ifdef __AVX512VBMI__
static uint8_t upper_bytes[128] __attribute__((aligned(64)));
static uint8_t lower_bytes[128] __attribute__((aligned(64)));

__attribute__((constructor)) static void fill_bytes(void) {
    for (int size = 0; size < 128; size++) {
        upper_bytes[size] = (uint8_t)(narrowed((float)size) >> 8);
        lower_bytes[size] = (uint8_t)narrowed((float)size);
    }
}

/* The bytes of each number are looked up by its size; products.h says how they lie (SIGNED_SIZES).
   Converting them by way of int32 and float32 takes twice as many instructions. */
INLINE void small_pairs(const char *weight, words *pairs) {
    __m512i coded = _mm512_loadu_si512(weight), sign = _mm512_set1_epi8((char)0x80);
    __m512i upper = _mm512_permutex2var_epi8(_mm512_load_si512(upper_bytes), coded,
                                             _mm512_load_si512(upper_bytes + 64));
    __m512i lower = _mm512_permutex2var_epi8(_mm512_load_si512(lower_bytes), coded,
                                             _mm512_load_si512(lower_bytes + 64));
    upper = _mm512_ternarylogic_epi32(upper, coded, sign, 0xf8); /* upper | (coded & sign) */
    pairs[0] = (words)_mm512_unpacklo_epi8(lower, upper);
    pairs[1] = (words)_mm512_unpackhi_epi8(lower, upper);
}
#else
INLINE void small_pairs(const char *weight, words *pairs) {
    for (int i = 0; i < 2; i++)
        pairs[i] = (words)_mm512_cvtne2ps_pbh((__m512)weights_at(weight, 32 * i + 16, INT8),
                                              (__m512)weights_at(weight, 32 * i, INT8));
}
#endif

/* The pairs of a panel's outputs that begin with weight i, as two vectors. */
INLINE void pairs_at(const char *weight, int64_t i, int64_t kind, words *pairs) {
    if (kind == INT8) small_pairs(weight + i, pairs);
    else memcpy(pairs, weight + 2 * i, 2 * sizeof *pairs);
}

INLINE const char *narrowed_part(const char *weight, int64_t depth, uint16_t *room) {
    for (int64_t i = 0; i < depth * WIDTH; i += 2 * WIDTH) {
        words pairs[2];
        pairs_at(weight, i, INT8, pairs);
        fetch(weight + i + AHEAD, 1);
        memcpy(room + i, pairs, sizeof pairs);
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
        pairs_at(weight, k * WIDTH, kind, w);
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
    words w[2];
    pairs_at(weight, 0, kind, w);
    for (int64_t r = 0; r < rows; r++) {
        uint16_t pair[2] = {x[r * in], 0};
        for (int i = 0; i < 2; i++) {
            float *to = sums + r * WIDTH + 16 * i;
            store(to, add_pair(load(to), pair, w[i]));
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
