/* BLAKE3 of bytes that come in parts; digest.c says how. For little-endian processors. */

#ifndef RELAY_DIGEST_H
#define RELAY_DIGEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct digest digest;

/* For at most `most` bytes. NULL: out of memory. */
digest *digest_new(int64_t most);
void digest_free(digest *d);
void digest_update(digest *d, const uint8_t *in, size_t nbytes);
/* The digest of all that came; what comes next begins a new one. */
void digest_end(digest *d, uint8_t out[DIGEST_BYTES]);

#endif
