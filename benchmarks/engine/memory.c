/* Reads memory as fast as it can be read: in order, and asking for it ahead. */

#include <stddef.h>
#include <stdint.h>

typedef uint64_t words __attribute__((vector_size(64)));

uint64_t read_all(const char *from, size_t nbytes) {
    words found[4] = {{0}};
    for (size_t i = 0; i + 256 <= nbytes; i += 256)
        for (size_t j = 0; j < 4; j++) {
            __builtin_prefetch(from + i + 64 * j + 4096, 0, 2);
            found[j] |= *(const words *)(from + i + 64 * j);
        }
    found[0] |= found[1] | found[2] | found[3];
    return found[0][0];
}
