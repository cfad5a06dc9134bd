/* What the files of the relay loop share. */

#ifndef RELAY_INTERNAL_H
#define RELAY_INTERNAL_H

#include <errno.h>
#include <math.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "digest.h"
#include "relay.h"

#define BUCKETS 64
#define TURN 16
#define GRANTS_A_TURN 8


struct region {
    hub *hub;
    uint8_t *base;
    int64_t ready;
    int refs;
};

/* What waits for a port, or may. */
typedef struct ticket {
    struct ticket *next;
    conn *lane;
    int64_t priority, arrival, flow, nbytes;
    bool wanting;
} ticket;

typedef struct {
    double rate, free_at, quiet_since, due, moved, moving_s;
    int64_t arrivals, *served, flows, now_served;
    int holding;
    conn *last;      /* whose frame was sent last, out only */
    double last_at;
    ticket *tickets;
} port;

typedef struct reading {
    struct reading *next;
    int64_t id, nbytes, position, priority, arrival;
    uint8_t *into; /* NULL: nobody wants the bytes any more */
    int64_t first_ns;
    int64_t chunk_bytes, chunk, chunk_come; /* chunk_bytes 0: nothing is checked */
    uint8_t *digests;
    digest *digest; /* of the chunk that is coming */
    region *shows; /* may be NULL */
    int64_t offset; /* of the read in that region */
} reading;

typedef struct serving {
    struct serving *next;
    ticket turn;
    int64_t id, start, position, end;
    region *from;
    double began;
    bool in_part, stopped;
} serving;

enum { HEAD, WAITS, BODY, PAUSED, DEAD };      /* receiving */
enum { FREE, SENDING, DRAINING };              /* sending */

struct conn {
    conn *next;
    hub *hub;
    int fd;
    int64_t serial; /* also its epoll tag: a connection may be freed while its event is on its way */
    bool receives, deep;
    /* receiving */
    int state;
    uint8_t head[PREFIX_BYTES];
    size_t head_come;
    reading *readings[BUCKETS], *current;
    int64_t left, max_payload, lowat;
    double heard_at;
    ticket turn;
    bool holds, go;
    /* sending */
    int sends;
    bool armed, timed;
    uint8_t out_head[PREFIX_BYTES];
    size_t head_sent;
    uint8_t *data;
    int64_t data_left, room, notsent;
    serving *servings, *part;
    uint8_t *posted;
    size_t posted_bytes, posted_sent, posted_room;
    int64_t posted_frames;
    double sent_at, granted_at;
    int64_t part_bytes;
};

struct hub {
    pthread_mutex_t lock;
    atomic_int callers;
    int epoll, wake, timer, told;
    double timer_at;
    port in, out;
    conn *conns;
    int64_t serials;
    event *events;
    size_t n_events, room;
    bool eager, stopping;
    uint8_t heartbeat[PREFIX_BYTES];
    uint8_t scratch[SCRATCH];
};

/* hub.c */
event *tell(hub *h, int64_t kind, conn *c, int64_t id, bool wake);
void set_timer(hub *h);
void watch(conn *c, bool again);
void lose(conn *c, int why);
void region_unref(region *g);
void raise_ready(region *g, int64_t ready);

/* ports.c */
int64_t grant_bytes(const port *p);
int64_t ahead_bytes(const port *p);
void enlist(port *p, ticket *t, conn *lane);
void unlist(port *p, ticket *t);
void give_up_quiet_time(port *p, double now);
void want(port *p, ticket *t, bool wanting);
bool before(const port *p, const ticket *a, const ticket *b);
void hold(port *p, ticket *t, int64_t nbytes);
void rest(port *p, double now);
bool know_flow(port *p, int64_t flow);

/* sending.c */
void send_some(conn *c);
void run_out(hub *h);
void end_servings(conn *c);
void serve_on(region *g);

/* receiving.c */
void receive(conn *c);
void run_in(hub *h);
void end_readings(conn *c);

static inline double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static inline int64_t wall_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static inline void enter(hub *h) {
    atomic_fetch_add(&h->callers, 1);
    pthread_mutex_lock(&h->lock);
    atomic_fetch_sub(&h->callers, 1);
}

static inline void leave(hub *h) { pthread_mutex_unlock(&h->lock); }

static inline void ring(int fd) {
    uint64_t once = 1;
    ssize_t done = write(fd, &once, sizeof once); /* fails only if it rings already */
    (void)done;
}

static inline void quieten(int fd) {
    uint64_t rings;
    ssize_t done = read(fd, &rings, sizeof rings);
    (void)done;
}

#endif
