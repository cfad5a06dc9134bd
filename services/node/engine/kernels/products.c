/* Products of activations with weights: x [rows, in] times a matrix [out, in].

   Weights lie in panels of WIDTH outputs. A panel is one piece of memory, read from its beginning
   to its end, once for up to ROWS rows: a step with few rows takes as long as reading the weights.
   The bytes that come next are fetched meanwhile. A panel goes through the first cache part by part,
   while the sums of all rows wait in `sums` (as in Goto and van de Geijn, "Anatomy of
   High-Performance Matrix Multiplication", 2008, but with the roles of the operands exchanged).

   Sums are taken in float32, part by part in order of `in`, whatever the number of rows: a row has
   the same bits in every batch. Where the processor has tiles (AMX), they multiply bfloat16 in an
   order of their own, which does not depend on the batch either. */

#include "kernels.h"

enum {
    WIDTH = 32,  /* outputs of a panel */
    ROWS = 256,  /* rows that a panel is read for at a time */
    FEW = 8,     /* rows whose sums are in registers */
    PART = 256,  /* inputs whose weights are in the first cache */
    CONVERTED = 64, /* the same, for weights that are converted first */
    AHEAD = 32 << 10, /* bytes that are fetched before they are read */
    PAIRED = 32, /* panels are padded with zeros to a multiple of this many inputs */
};

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t deep(int64_t in) { return (in + PAIRED - 1) / PAIRED * PAIRED; }
INLINE int64_t size_of(int64_t kind) { return kind == FLOAT32 ? 4 : kind == BFLOAT16 ? 2 : 1; }

/* Takes the next items and returns their number, 0 at the end. The first takes are long runs of
   neighbours, the last ones single items, so that all threads end together. */
INLINE int64_t take_items(int64_t *next, int64_t total, int64_t threads, int64_t *first) {
    int64_t from = __atomic_load_n(next, __ATOMIC_RELAXED), count;
    do {
        if (from >= total) return 0;
        count = (total - from + 2 * threads - 1) / (2 * threads);
    } while (!__atomic_compare_exchange_n(next, &from, from + count, 1, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
    *first = from;
    return count;
}

/* The arguments of one product, shared by its threads. */
typedef struct {
    const Matrix *matrix;
    const void *x;
    void *made;
    int64_t rows;
    int narrow, added;
    int64_t threads, *next;
} Product;

INLINE void finish_as(const Product *p, int64_t row, int64_t rows, int64_t panel,
                      const float *sums, int narrow, int added) {
    const Matrix *m = p->matrix;
    int64_t width = m->gated ? WIDTH / 2 : WIDTH, all_of = m->gated ? m->out / 2 : m->out;
    int64_t from = panel * width, filled = least(width, all_of - from);
    for (int64_t r = 0; r < rows; r++, sums += WIDTH) {
        lanes v[2] = {load(sums), load(sums + 16)};
        for (int i = 0; i < 2; i++) {
            int64_t at = panel * WIDTH + 16 * i;
            if (m->scales) v[i] *= load(m->scales + at);
            if (m->bias) v[i] += load(m->bias + at);
        }
        if (m->gated) v[0] = silu(v[0]) * v[1];
        int64_t to = (row + r) * all_of + from;
        if (filled == width) {
            for (int64_t i = 0; i < width / 16; i++) {
                if (added) v[i] += take(p->made, to + 16 * i, narrow);
                give(p->made, to + 16 * i, v[i], narrow);
            }
        } else {
            for (int64_t i = 0; i < filled; i++) {
                float sum = v[i / 16][i % 16];
                put(p->made, to + i, added ? sum + get(p->made, to + i, narrow) : sum, narrow);
            }
        }
    }
}

/* One item of work: up to ROWS rows times a panel. */
typedef struct {
    int64_t panel, row, rows;
    const char *weight;
} Item;

INLINE int64_t panels_of(const Matrix *m) { return (m->out + WIDTH - 1) / WIDTH; }
INLINE int64_t items_of(const Product *p) {
    return panels_of(p->matrix) * ((p->rows + ROWS - 1) / ROWS);
}
INLINE Item item_of(const Product *p, int64_t number) {
    const Matrix *m = p->matrix;
    int64_t panel = number % panels_of(m), row = number / panels_of(m) * ROWS;
    int64_t at = panel * deep(m->in) * WIDTH * size_of(m->kind);
    return (Item){panel, row, least(ROWS, p->rows - row), (const char *)m->weight + at};
}

/* Applies scales, bias and gate to a panel's sums [rows, WIDTH], and writes them out. */
static void finish(const Product *p, int64_t row, int64_t rows, int64_t panel,
                   const float *sums) {
    if (p->narrow && p->added) finish_as(p, row, rows, panel, sums, 1, 1);
    else if (p->narrow) finish_as(p, row, rows, panel, sums, 1, 0);
    else if (p->added) finish_as(p, row, rows, panel, sums, 0, 1);
    else finish_as(p, row, rows, panel, sums, 0, 0);
}

/* Number `which` of the four signed bytes in each word. */
INLINE lanes number(ints four, int which) {
    return __builtin_convertvector(four << (24 - 8 * which) >> 24, lanes);
}

/* Prefetches `lines` cache lines. */
INLINE void fetch(const char *from, int64_t lines) {
    for (int64_t i = 0; i < lines; i++) __builtin_prefetch(from + 64 * i, 0, 2);
}

/* --- with vectors --- */

/* A part's weights in float32. Weights that need converting are prefetched here, others in
   `add_part`. */
INLINE const float *part_of(int64_t kind, const char *weight, int64_t depth, float *room) {
    if (kind == FLOAT32) return (const float *)weight;
    int64_t together = kind == BFLOAT16 ? 2 : 4; /* numbers in a word */
    for (int64_t k = 0; k < depth; k += together)
        for (int64_t i = 0; i < WIDTH; i += 16) {
            ints word;
            const char *from = weight + (k / together * WIDTH + i) * 4;
            memcpy(&word, from, sizeof word);
            fetch(from + AHEAD, 1);
            float *to = room + k * WIDTH + i;
            if (kind == BFLOAT16) {
                ints pair[2] = {word << 16, word & (int32_t)0xffff0000};
                for (int j = 0; j < 2; j++) memcpy(to + j * WIDTH, pair + j, sizeof *pair);
            } else {
                for (int j = 0; j < 4; j++) store(to + j * WIDTH, number(word, j));
            }
        }
    return room;
}

/* Adds a part to the sums of n rows. */
INLINE void add_part(const float *x, int64_t in, const float *weight, int64_t depth, float *sums,
                     int n, const char *following, int64_t lines) {
    lanes s[FEW][2];
    for (int r = 0; r < n; r++) s[r][0] = s[r][1] = (lanes){0};
    for (int64_t k = 0; k < depth; k++) {
        lanes w[2] = {load(weight + k * WIDTH), load(weight + k * WIDTH + 16)};
        fetch(following + 64 * lines * k, lines);
        for (int r = 0; r < n; r++)
            for (int i = 0; i < 2; i++) s[r][i] += x[r * in + k] * w[i];
    }
    for (int r = 0; r < n; r++)
        for (int i = 0; i < 2; i++) {
            float *to = sums + r * WIDTH + 16 * i;
            store(to, load(to) + s[r][i]);
        }
}

static void with_vectors(const Product *p) {
    const Matrix *m = p->matrix;
    int64_t first, count, size = size_of(m->kind), in = m->in;
    int64_t most = m->kind == FLOAT32 ? PART : CONVERTED;
    float sums[ROWS * WIDTH] __attribute__((aligned(64)));
    float room[CONVERTED * WIDTH] __attribute__((aligned(64)));
    while ((count = take_items(p->next, items_of(p), p->threads, &first)))
        for (int64_t item = first; item < first + count; item++) {
            Item it = item_of(p, item);
            const float *x = (const float *)p->x + it.row * in;
            memset(sums, 0, it.rows * WIDTH * sizeof *sums);
            for (int64_t k = 0; k < in; k += most) {
                int64_t depth = least(most, in - k);
                const char *from = it.weight + k * WIDTH * size;
                const char *following = from + AHEAD;
                const float *part = part_of(m->kind, from, depth, room);
                for (int64_t r = 0; r < it.rows; r += FEW) {
                    const float *own = x + r * in + k;
                    float *to = sums + r * WIDTH;
                    int64_t lines = r > FEW || part == room ? 0 : it.rows <= FEW ? 2 : 1;
#define CASE(n) \
    case n: add_part(own, in, part, depth, to, n, following, lines); break;
                    switch (least(FEW, it.rows - r)) {
                        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
                    }
#undef CASE
                    following += 64 * lines * depth;
                }
            }
            finish(p, it.row, it.rows, it.panel, sums);
        }
}

/* --- with tiles --- */

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    TILE = 16,
    DEEP = 768, /* inputs between two visits to a panel's sums */
    SOME = 64,  /* with this many rows, visits matter even if weights are converted */
};

typedef struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} Tiles;

/* A compiler barrier: GCC's tile intrinsics do not tell it what memory they read. */
INLINE void written(const void *what) { __asm__ volatile("" : : "r"(what) : "memory"); }

/* Tiles 0 to 3 hold sums [rows, WIDTH], 4 and 5 activations, 6 and 7 weights. */
static void set_tiles(int64_t rows) {
    int64_t upper = least(rows, TILE), lower = rows > TILE ? rows - TILE : TILE;
    Tiles tiles = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        tiles.bytes[i] = 64;
        tiles.rows[i] = i > 5 ? TILE : i == 2 || i == 3 || i == 5 ? lower : upper;
    }
    written(&tiles);
    _tile_loadconfig(&tiles);
}

/* Adds a part to the sums of up to 2 TILE rows. */
INLINE void add_tiles(const uint16_t *x, int64_t in, const char *weight, int64_t depth,
                      float *sums, int two, const char *following, int64_t lines) {
    enum { STEP = 4 * WIDTH };
    written(x);
    written(weight);
    written(sums);
    _tile_loadd(0, sums, STEP);
    _tile_loadd(1, sums + TILE, STEP);
    if (two) {
        _tile_loadd(2, sums + TILE * WIDTH, STEP);
        _tile_loadd(3, sums + TILE * WIDTH + TILE, STEP);
    }
    for (int64_t k = 0; k < depth; k += PAIRED) {
        _tile_loadd(6, weight + k * WIDTH * 2, STEP);
        _tile_loadd(7, weight + k * WIDTH * 2 + 64, STEP);
        _tile_loadd(4, x + k, 2 * in);
        fetch(following + 2 * lines * k, lines);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, x + TILE * in + k, 2 * in);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, STEP);
    _tile_stored(1, sums + TILE, STEP);
    if (two) {
        _tile_stored(2, sums + TILE * WIDTH, STEP);
        _tile_stored(3, sums + TILE * WIDTH + TILE, STEP);
    }
}

/* The last numbers of each row, which do not fill a tile's row, padded with zeros. */
INLINE void filled(const uint16_t *x, int64_t in, int64_t rows, int64_t count, uint16_t *room) {
    memset(room, 0, rows * PAIRED * sizeof *room);
    for (int64_t r = 0; r < rows; r++)
        memcpy(room + r * PAIRED, x + r * in, count * sizeof *room);
}

/* A part's weights in bfloat16, which holds whole numbers of up to 8 bits exactly. */
INLINE const char *pairs_of(int64_t kind, const char *weight, int64_t depth, uint16_t *room) {
    if (kind == BFLOAT16) return weight;
    for (int64_t k = 0; k < depth; k += 4)
        for (int64_t i = 0; i < WIDTH; i += 16) {
            ints word;
            words bits[4];
            memcpy(&word, weight + k * WIDTH + i * 4, sizeof word);
            for (int j = 0; j < 4; j++) {
                lanes v = number(word, j);
                memcpy(bits + j, &v, sizeof v);
            }
            for (int j = 0; j < 4; j += 2) {
                words pair = bits[j] >> 16 | bits[j + 1];
                memcpy(room + (k + j) * WIDTH + 2 * i, &pair, sizeof pair);
            }
        }
    return (const char *)room;
}

static void with_tiles(const Product *p) {
    const Matrix *m = p->matrix;
    int64_t first, count, size = size_of(m->kind), in = m->in, whole = in / PAIRED * PAIRED;
    int64_t set = 0, most = m->kind == INT8 && p->rows <= SOME ? CONVERTED : DEEP;
    float sums[ROWS * WIDTH] __attribute__((aligned(64)));
    uint16_t room[DEEP * WIDTH] __attribute__((aligned(64)));
    uint16_t tail[2 * TILE * PAIRED] __attribute__((aligned(64)));
    while ((count = take_items(p->next, items_of(p), p->threads, &first)))
        for (int64_t item = first; item < first + count; item++) {
            Item it = item_of(p, item);
            const uint16_t *x = (const uint16_t *)p->x + it.row * in;
            memset(sums, 0, it.rows * WIDTH * sizeof *sums);
            for (int64_t k = 0; k < in; k += most) {
                int64_t depth = least(most, deep(in) - k), full = least(most, whole - k);
                const char *from = it.weight + k * WIDTH * size;
                const char *following = from + AHEAD;
                const char *part = pairs_of(m->kind, from, depth, room);
                for (int64_t r = 0; r < it.rows; r += 2 * TILE) {
                    int64_t n = least(2 * TILE, it.rows - r), lines = 0;
                    if (r <= 2 * TILE) lines = (it.rows <= 2 * TILE ? 16 : 8) * size;
                    float *to = sums + r * WIDTH;
                    const uint16_t *own = x + r * in + k;
                    if (n != set) set_tiles(set = n);
                    if (n > TILE) add_tiles(own, in, part, full, to, 1, following, lines);
                    else add_tiles(own, in, part, full, to, 0, following, lines);
                    if (full < depth) {
                        filled(own + full, in, n, in - k - full, tail);
                        const char *rest = part + full * WIDTH * 2;
                        if (n > TILE) add_tiles(tail, PAIRED, rest, PAIRED, to, 1, rest, 0);
                        else add_tiles(tail, PAIRED, rest, PAIRED, to, 0, rest, 0);
                    }
                    following += 2 * lines * full;
                }
            }
            finish(p, it.row, it.rows, it.panel, sums);
        }
    _tile_release();
}

/* 1 if this process may use tiles. */
int64_t has_tiles(void) {
    enum { REQUEST = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

#else

static void with_tiles(const Product *p) { (void)p; }
int64_t has_tiles(void) { return 0; }

#endif

void multiply(const Matrix *m, const void *x, void *made, int64_t rows, int narrow, int added,
              int64_t threads, int64_t *next) {
    Product p = {m, x, made, rows, narrow, added, threads, next};
    if (m->tiles) with_tiles(&p);
    else with_vectors(&p);
}

/* --- packing --- */

INLINE void pack_panel(const Matrix *m, const void *from, const void *bias, int64_t panel,
                       int narrow) {
    int64_t in = m->in;
    char *to = (char *)m->weight + panel * deep(in) * WIDTH * size_of(m->kind);
    for (int64_t i = 0; i < WIDTH; i++) {
        int64_t output = panel * WIDTH + i, last = m->out;
        if (m->gated) {
            int64_t half = m->out / 2, upper = i >= WIDTH / 2;
            output = panel * (WIDTH / 2) + i % (WIDTH / 2) + upper * half;
            last = upper ? m->out : half;
        }
        int64_t at = output * in, there = output < last;
        float most = 0, scale = 1, nothing = 0;
        if (m->bias) m->bias[panel * WIDTH + i] = there ? get(bias, output, narrow) : 0;
        if (m->kind == INT8) {
            for (int64_t k = 0; k < in && there; k++) {
                float size = fabsf(get(from, at + k, narrow));
                most = size > most ? size : most;
                nothing += 0 * size; /* NaN, unless all are finite */
            }
            scale = most > 0 ? most / 127 : 1;
            m->scales[panel * WIDTH + i] = scale + nothing;
        }
        for (int64_t k = 0; k < deep(in); k++) {
            float value = there && k < in ? get(from, at + k, narrow) : 0;
            if (m->kind == FLOAT32) ((float *)to)[k * WIDTH + i] = value;
            else if (m->kind == BFLOAT16)
                ((uint16_t *)to)[(k / 2 * WIDTH + i) * 2 + k % 2] = narrowed(value);
            else if (nothing == 0)
                ((int8_t *)to)[(k / 4 * WIDTH + i) * 4 + k % 4] = (int8_t)rintf(value / scale);
            else ((int8_t *)to)[(k / 4 * WIDTH + i) * 4 + k % 4] = 0;
        }
    }
}

void pack_panels(const Matrix *m, const void *from, const void *bias, int narrow, int64_t *next) {
    int64_t panel;
    while ((panel = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < panels_of(m))
        if (narrow) pack_panel(m, from, bias, panel, 1);
        else pack_panel(m, from, bias, panel, 0);
}
