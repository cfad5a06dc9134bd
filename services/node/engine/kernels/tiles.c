/* Products in bfloat16 with tiles of 16 rows (AMX), which add 32 products at a time to a sum in
   float32. */

#include "products.h"

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

/* Number `which` of the four signed bytes in each word. */
INLINE lanes number(ints four, int which) {
    return __builtin_convertvector(four << (24 - 8 * which) >> 24, lanes);
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

void with_tiles(const Product *p) {
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

/* Whether this process may use tiles. */
int has_tiles(void) {
    enum { REQUEST = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

#else

void with_tiles(const Product *p) { (void)p; }
int has_tiles(void) { return 0; }

#endif
