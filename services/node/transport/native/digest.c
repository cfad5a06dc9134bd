/* BLAKE3 (its specification, sections 2.1 to 2.6) of bytes that come in parts.

   A leaf of the tree is 1,024 bytes. LANES leaves, or parents, are computed at a time, each in its
   lane of vectors of 32-bit words; the compiler makes of these vectors what the processor has. The
   hashes of all leaves are kept until the end. Then each level of the tree is computed from the one
   below: neighbours in pairs, and one without a neighbour goes up as it is. */

#include "digest.h"

#include <stdlib.h>
#include <string.h>

#define LANES 16
#define LEAF 1024
#define BLOCK 64
#define WORDS 16
#define BATCH (LANES * LEAF)
enum { START = 1, END = 2, PARENT = 4, ROOT = 8 };

#if defined(__x86_64__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define ALWAYS_INLINE static inline __attribute__((always_inline))

typedef uint32_t lanes __attribute__((vector_size(4 * LANES), may_alias, aligned(4)));
typedef uint32_t hash[8];

struct digest {
    int64_t room, leaves; /* of `hashes` */
    size_t waiting;       /* bytes in `tail` */
    uint8_t tail[BATCH];
    hash hashes[];
};

static const uint32_t IV[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                               0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};
/* Which word of the block each round takes in which place: the permutation, applied again and again. */
static const uint8_t ORDER[7][WORDS] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
    {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1},
    {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
    {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4},
    {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
    {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13},
};

#define ROTATE(x, n) ((x) >> (n) | (x) << (32 - (n)))
#define MIX(v, a, b, c, d, x, y)        \
    do {                                \
        v[a] += v[b] + (x);             \
        v[d] = ROTATE(v[d] ^ v[a], 16); \
        v[c] += v[d];                   \
        v[b] = ROTATE(v[b] ^ v[c], 12); \
        v[a] += v[b] + (y);             \
        v[d] = ROTATE(v[d] ^ v[a], 8);  \
        v[c] += v[d];                   \
        v[b] = ROTATE(v[b] ^ v[c], 7);  \
    } while (0)
/* Works on words and on vectors of words. */
#define ROUNDS(v, m)                                            \
    _Pragma("GCC unroll 7") for (int r = 0; r < 7; r++) {       \
        const uint8_t *o = ORDER[r];                            \
        MIX(v, 0, 4, 8, 12, m[o[0]], m[o[1]]);                  \
        MIX(v, 1, 5, 9, 13, m[o[2]], m[o[3]]);                  \
        MIX(v, 2, 6, 10, 14, m[o[4]], m[o[5]]);                 \
        MIX(v, 3, 7, 11, 15, m[o[6]], m[o[7]]);                 \
        MIX(v, 0, 5, 10, 15, m[o[8]], m[o[9]]);                 \
        MIX(v, 1, 6, 11, 12, m[o[10]], m[o[11]]);               \
        MIX(v, 2, 7, 8, 13, m[o[12]], m[o[13]]);                \
        MIX(v, 3, 4, 9, 14, m[o[14]], m[o[15]]);                \
    }

/* One block of one leaf or parent; `chain` becomes its hash. */
static void compress(hash chain, const uint8_t *block, uint32_t nbytes, uint64_t counter, uint32_t flags) {
    uint32_t m[WORDS], v[16];
    memcpy(m, block, BLOCK);
    memcpy(v, chain, sizeof(hash));
    memcpy(v + 8, IV, 16);
    v[12] = (uint32_t)counter;
    v[13] = (uint32_t)(counter >> 32);
    v[14] = nbytes;
    v[15] = flags;
    ROUNDS(v, m)
    for (int i = 0; i < 8; i++) chain[i] = v[i] ^ v[i + 8];
}

/* A leaf of up to LEAF bytes. */
static void leaf(const uint8_t *in, size_t nbytes, uint64_t counter, uint32_t flags, hash out) {
    memcpy(out, IV, sizeof(hash));
    for (size_t at = 0;; at += BLOCK) {
        uint8_t block[BLOCK] = {0};
        size_t here = nbytes - at < BLOCK ? nbytes - at : BLOCK;
        bool last = at + BLOCK >= nbytes;
        memcpy(block, in + at, here);
        compress(out, block, (uint32_t)here, counter, (at ? 0 : START) | (last ? END | flags : 0));
        if (last) return;
    }
}

/* Words of LANES blocks that lie `stride` bytes apart: m[i] is the i-th word of each. */
ALWAYS_INLINE void load(const uint8_t *in, size_t stride, lanes m[WORDS]) {
    lanes other[WORDS];
    _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++)
        memcpy(&other[i], in + (size_t)i * stride, BLOCK);
    /* Four steps of a transposition: halves of 8, 4, 2, 1 rows change places. */
    const lanes low8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    const lanes low4 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
    const lanes low2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
    const lanes low1 = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
#define STEP(from, to, low, apart)                                                            \
    _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++)                                  \
        if (!(i & (apart))) {                                                                 \
            to[i] = __builtin_shuffle(from[i], from[i + (apart)], low);                       \
            to[i + (apart)] = __builtin_shuffle(from[i], from[i + (apart)], low + (apart));   \
        }
    STEP(other, m, low8, 8)
    STEP(m, other, low4, 4)
    STEP(other, m, low2, 2)
    STEP(m, other, low1, 1)
    memcpy(m, other, sizeof other);
}

/* LANES leaves or parents of `blocks` blocks each. Their hashes go to `out`, which may overlap what
   was read: all is read before. */
FOR_EACH_PROCESSOR
static void many(const uint8_t *in, size_t stride, int blocks, uint64_t counter, uint32_t flags, hash *out) {
    lanes chain[8], low, high;
    bool counts = flags != PARENT;
    for (int i = 0; i < LANES; i++) {
        uint64_t here = counts ? counter + (uint64_t)i : 0;
        low[i] = (uint32_t)here;
        high[i] = (uint32_t)(here >> 32);
    }
    for (int i = 0; i < 8; i++) chain[i] = IV[i] - (lanes){0};
    for (int b = 0; b < blocks; b++) {
        lanes m[WORDS], v[16];
        load(in + b * BLOCK, stride, m);
        uint32_t now = flags | (counts && b == 0 ? START : 0) | (counts && b == blocks - 1 ? END : 0);
        for (int i = 0; i < 8; i++) v[i] = chain[i];
        for (int i = 0; i < 4; i++) v[8 + i] = IV[i] - (lanes){0};
        v[12] = low;
        v[13] = high;
        v[14] = BLOCK - (lanes){0};
        v[15] = now - (lanes){0};
        ROUNDS(v, m)
        for (int i = 0; i < 8; i++) chain[i] = v[i] ^ v[i + 8];
    }
    for (int i = 0; i < LANES; i++)
        for (int w = 0; w < 8; w++) out[i][w] = chain[w][i];
}

digest *digest_new(int64_t most) {
    int64_t leaves = (most + LEAF - 1) / LEAF;
    /* `many` reads LANES pairs and writes LANES hashes, however few are meant. */
    digest *d = calloc(1, sizeof *d + sizeof(hash) * (size_t)(leaves + 3 * LANES));
    if (d) d->room = leaves;
    return d;
}

void digest_free(digest *d) { free(d); }

static void batch(digest *d, const uint8_t *in) {
    many(in, LEAF, LEAF / BLOCK, (uint64_t)d->leaves, 0, d->hashes + d->leaves);
    d->leaves += LANES;
}

void digest_update(digest *d, const uint8_t *in, size_t nbytes) {
    while (nbytes) {
        if (d->waiting == BATCH) {
            batch(d, d->tail);
            d->waiting = 0;
        }
        if (!d->waiting && nbytes > BATCH) {
            batch(d, in);
            in += BATCH;
            nbytes -= BATCH;
            continue;
        }
        size_t part = BATCH - d->waiting < nbytes ? BATCH - d->waiting : nbytes;
        memcpy(d->tail + d->waiting, in, part);
        d->waiting += part;
        in += part;
        nbytes -= part;
    }
}

void digest_end(digest *d, uint8_t out[DIGEST_BYTES]) {
    int64_t whole = (int64_t)(d->waiting / LEAF);
    size_t rest = d->waiting % LEAF;
    if (d->leaves + whole + (rest > 0) <= 1) {
        leaf(d->tail, d->waiting, 0, ROOT, d->hashes[0]);
    } else {
        int64_t begun = d->leaves;
        if (whole) many(d->tail, LEAF, LEAF / BLOCK, (uint64_t)begun, 0, d->hashes + begun);
        d->leaves += whole;
        if (rest) {
            leaf(d->tail + whole * LEAF, rest, (uint64_t)d->leaves, 0, d->hashes[d->leaves]);
            d->leaves++;
        }
        int64_t n = d->leaves;
        while (n > 2) {
            int64_t pairs = n / 2;
            hash alone;
            memcpy(alone, d->hashes[n - 1], sizeof alone);
            for (int64_t i = 0; i < pairs; i += LANES)
                many((const uint8_t *)d->hashes[2 * i], BLOCK, 1, 0, PARENT, d->hashes + i);
            if (n % 2) memcpy(d->hashes[pairs], alone, sizeof alone);
            n = pairs + n % 2;
        }
        hash root;
        memcpy(root, IV, sizeof root);
        compress(root, (const uint8_t *)d->hashes, BLOCK, 0, PARENT | ROOT);
        memcpy(d->hashes[0], root, sizeof root);
    }
    memcpy(out, d->hashes[0], DIGEST_BYTES);
    d->leaves = 0;
    d->waiting = 0;
}
