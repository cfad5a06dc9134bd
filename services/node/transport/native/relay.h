/* What Python calls; relay.py has the same in ctypes. Sizes are int64_t, times are seconds on
   CLOCK_MONOTONIC. The constants come from wire.py, pacing.py and their neighbours by -D. */

#include <stddef.h>
#include <stdint.h>

typedef struct hub hub;
typedef struct conn conn;
typedef struct region region;

enum {
    EVENT_FRAME,  /* head: a prefix for Python, a: what its read has; the connection is paused */
    EVENT_LOST,   /* a: errno, 0 if the peer closed it */
    EVENT_CHUNKS, /* a: how many of the next chunks of read `id`, b: whether they are right */
    EVENT_READ,   /* a: bytes, b: wall clock of the first one in ns; the read is over */
    EVENT_SERVED, /* a: bytes sent, began, ended; the region is not touched any more */
};

typedef struct {
    int64_t kind, conn, id, a, b;
    double began, ended;
    uint8_t head[24];
} event;

hub *hub_new(double bytes_per_s, const uint8_t *heartbeat);
void hub_free(hub *h);
void hub_run(hub *h);
void hub_stop(hub *h);
int64_t hub_told(hub *h);
int64_t hub_events(hub *h, event *out, int64_t room);
void hub_charge(hub *h, int64_t out, int64_t nbytes);
void hub_eager(hub *h, int64_t eager);

region *region_new(hub *h, uint8_t *base, int64_t ready);
void region_ready(region *g, int64_t ready);
void region_drop(region *g);

conn *conn_new(hub *h, int fd, int64_t receives, int64_t max_payload, int64_t deep);
int64_t conn_serial(conn *c);
void conn_free(conn *c);
void conn_resume(conn *c);
double conn_silent_since(conn *c, int64_t *in_frame, int64_t any);
void conn_forgive(conn *c, double now);
int64_t conn_post(conn *c, const uint8_t *frame, int64_t nbytes);
double conn_sent_at(conn *c);

int64_t read_begin(conn *c, int64_t id, uint8_t *into, int64_t nbytes, int64_t priority,
                   int64_t chunk_bytes, const uint8_t *digests, region *shows, int64_t offset);
void read_drop(conn *c, int64_t id);
void read_end(conn *c, int64_t id);

int64_t serve_begin(conn *c, int64_t id, region *from, int64_t position, int64_t nbytes,
                    int64_t priority, int64_t flow);
void serve_stop(conn *c, int64_t id);

void encode_data(uint8_t *head, uint32_t id, uint64_t payload);
int64_t decode_data(const uint8_t *head, int64_t *id, int64_t *payload);
