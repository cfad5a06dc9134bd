/* The reader's end: receives the DATA of the reads that are known, and checks and shows chunks. */

#include "internal.h"

#include <arpa/inet.h>

/* Whether the prefix is that of a DATA frame. */
int64_t decode_data(const uint8_t *head, int64_t *id, int64_t *payload) {
    uint32_t id_be, body, high, low;
    memcpy(&id_be, head + 4, 4);
    memcpy(&body, head + 8, 4);
    memcpy(&high, head + 12, 4);
    memcpy(&low, head + 16, 4);
    *id = ntohl(id_be);
    uint64_t bytes = (uint64_t)ntohl(high) << 32 | ntohl(low);
    *payload = (int64_t)bytes;
    return head[0] == KIND_DATA && body == 0 && bytes > 0 && bytes <= INT64_MAX;
}

static void wake_at(conn *c, int64_t nbytes) {
    nbytes = least(nbytes, AT_ONCE);
    if (c->lowat == nbytes) return;
    c->lowat = nbytes;
    int value = (int)nbytes;
    setsockopt(c->fd, SOL_SOCKET, SO_RCVLOWAT, &value, sizeof value);
}

static reading **find(conn *c, int64_t id) {
    reading **at = &c->readings[id % BUCKETS];
    while (*at && (*at)->id != id) at = &(*at)->next;
    return at;
}

static void let_go(reading *r) {
    digest_free(r->digest);
    if (r->shows) region_unref(r->shows);
    free(r->digests);
    r->digest = NULL;
    r->shows = NULL;
    r->digests = NULL;
}

static void forget(conn *c, reading *r) {
    *find(c, r->id) = r->next;
    if (c->current == r) c->current = NULL;
    let_go(r);
    free(r);
}

/* Chunks that come one after the other are told together, if Python has not heard of them yet. */
static void tell_chunk(conn *c, const reading *r, bool right) {
    hub *h = c->hub;
    event *last = h->n_events ? &h->events[h->n_events - 1] : NULL;
    if (last && last->kind == EVENT_CHUNKS && last->conn == c->serial && last->id == r->id && last->b == right) {
        last->a++;
        return;
    }
    event *e = tell(h, EVENT_CHUNKS, c, r->id, h->eager);
    e->a = 1;
    e->b = right;
}

/* The chunk is whole: tells whether it is right, and shows it to others if it is. */
static void chunk_came(conn *c, reading *r) {
    uint8_t found[DIGEST_BYTES];
    digest_end(r->digest, found);
    bool right = memcmp(found, r->digests + DIGEST_BYTES * r->chunk, DIGEST_BYTES) == 0;
    int64_t start = r->offset + r->chunk * r->chunk_bytes;
    tell_chunk(c, r, right);
    r->chunk++;
    r->chunk_come = 0;
    if (right && r->shows && r->shows->ready == start)
        raise_ready(r->shows, r->offset + r->position);
}

static void came(conn *c, reading *r, int64_t nbytes) {
    while (nbytes && r->into) {
        int64_t part = nbytes;
        if (r->chunk_bytes) {
            part = least(part, least(r->chunk_bytes, r->nbytes - r->chunk * r->chunk_bytes) - r->chunk_come);
            digest_update(r->digest, r->into + r->position, (size_t)part);
            r->chunk_come += part;
        }
        r->position += part;
        nbytes -= part;
        if (r->chunk_bytes && (r->chunk_come == r->chunk_bytes || r->position == r->nbytes))
            chunk_came(c, r);
    }
    r->position += nbytes;
}

void run_in(hub *h);

static void frame_came(conn *c) {
    hub *h = c->hub;
    reading *r = c->current;
    c->current = NULL;
    c->state = HEAD;
    if (c->holds) {
        c->holds = false;
        h->in.holding--;
        run_in(h);
    }
    if (r->position == r->nbytes) {
        event *e = tell(h, EVENT_READ, c, r->id, true);
        e->a = r->position;
        e->b = r->first_ns;
        forget(c, r);
    }
}

static void hand_over(conn *c, const reading *r) {
    event *e = tell(c->hub, EVENT_FRAME, c, 0, true);
    e->a = r ? r->position : 0;
    memcpy(e->head, c->head, PREFIX_BYTES);
    c->state = PAUSED;
}

/* A whole prefix has come. */
static void head_came(conn *c) {
    hub *h = c->hub;
    int64_t id, payload;
    c->head_come = 0;
    if (memcmp(c->head, h->heartbeat, PREFIX_BYTES) == 0) return;
    bool data = decode_data(c->head, &id, &payload) && payload <= c->max_payload;
    reading *r = data ? *find(c, id) : NULL;
    if (!r || payload > r->nbytes - r->position) {
        hand_over(c, r);
        return;
    }
    c->current = r;
    c->left = payload;
    if (!r->first_ns) r->first_ns = wall_ns();
    if (h->in.rate <= 0) {
        c->state = BODY;
        return;
    }
    c->state = WAITS;
    c->turn.priority = r->priority;
    c->turn.arrival = r->arrival;
    c->turn.nbytes = payload;
    want(&h->in, &c->turn, true);
    run_in(h);
}

/* Receives what has arrived. */
void receive(conn *c) {
    for (int turn = 0; c->state == HEAD || c->state == BODY; turn++) {
        if (turn == TURN) { /* others get the lock; the kernel tells us again */
            watch(c, true);
            return;
        }
        struct iovec parts[2];
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = 1};
        int64_t asked, wanted;
        if (c->state == HEAD) {
            asked = wanted = (int64_t)(PREFIX_BYTES - c->head_come);
            parts[0] = (struct iovec){c->head + c->head_come, (size_t)asked};
        } else {
            reading *r = c->current;
            wanted = c->left;
            asked = r->into ? least(wanted, AT_ONCE) : least(wanted, SCRATCH);
            parts[0] = (struct iovec){r->into ? r->into + r->position : c->hub->scratch, (size_t)asked};
            if (asked == c->left) { /* with the end of the frame comes the next prefix */
                parts[1] = (struct iovec){c->head, PREFIX_BYTES};
                message.msg_iovlen = 2;
            }
        }
        ssize_t received = recvmsg(c->fd, &message, MSG_DONTWAIT);
        if (received < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN || errno == EWOULDBLOCK) wake_at(c, wanted);
            else lose(c, errno);
            return;
        }
        if (received == 0) {
            lose(c, 0);
            return;
        }
        c->heard_at = now_s();
        if (c->state == HEAD) {
            c->head_come += (size_t)received;
        } else {
            int64_t body = least(received, asked);
            c->head_come = (size_t)(received - body);
            c->left -= body;
            came(c, c->current, body);
            if (c->left == 0) frame_came(c);
        }
        if (c->state == HEAD && c->head_come == PREFIX_BYTES) head_came(c);
        c->go = false;
    }
}

/* Lets those receive whose time has come; `go` has the thread do it. */
void run_in(hub *h) {
    port *p = &h->in;
    for (;;) {
        double now = now_s();
        ticket *best = NULL;
        for (ticket *t = p->tickets; t; t = t->next)
            if (t->wanting && t->lane->state != DEAD && (!best || before(p, t, best))) best = t;
        p->due = INFINITY;
        if (!best) {
            rest(p, now);
            break;
        }
        p->free_at = fmax(p->free_at, now - LATENESS_S);
        if (p->free_at > now) {
            p->due = p->free_at;
            break;
        }
        hold(p, best, best->nbytes);
        want(p, best, false);
        best->lane->state = BODY;
        best->lane->holds = best->lane->go = true;
    }
    set_timer(h);
}

void end_readings(conn *c) {
    unlist(&c->hub->in, &c->turn);
    if (c->holds) c->hub->in.holding--;
    for (int i = 0; i < BUCKETS; i++)
        while (c->readings[i]) forget(c, c->readings[i]);
}

/* Receives on, after Python has dealt with the frame that was handed over. */
void conn_resume(conn *c) {
    hub *h = c->hub;
    enter(h);
    if (c->state == PAUSED) {
        c->state = HEAD;
        c->lowat = -1; /* Python has set it too */
        c->heard_at = now_s();
        c->go = true;
        ring(h->wake);
    }
    leave(h);
}

/* Since when it has waited for bytes, or -1 if it does not; and whether it is within a frame. From
   now on any byte wakes us if `any`. */
double conn_silent_since(conn *c, int64_t *in_frame, int64_t any) {
    hub *h = c->hub;
    enter(h);
    double since = c->state == HEAD || c->state == BODY ? c->heard_at : -1;
    *in_frame = c->state == BODY;
    if (any) wake_at(c, 1);
    leave(h);
    return since;
}

void conn_forgive(conn *c, double now) {
    hub *h = c->hub;
    enter(h);
    c->heard_at = now;
    leave(h);
}

/* `digests`: DIGEST_BYTES for each chunk of `chunk_bytes`, the last maybe shorter. 0: no digests. */
int64_t read_begin(conn *c, int64_t id, uint8_t *into, int64_t nbytes, int64_t priority,
                   int64_t chunk_bytes, const uint8_t *digests, region *shows, int64_t offset) {
    hub *h = c->hub;
    reading *r = calloc(1, sizeof *r);
    if (!r) return 0;
    r->id = id;
    r->into = into;
    r->nbytes = nbytes;
    r->priority = priority;
    enter(h);
    if (chunk_bytes) {
        size_t size = DIGEST_BYTES * (size_t)((nbytes + chunk_bytes - 1) / chunk_bytes);
        r->digests = malloc(size);
        r->digest = digest_new(least(chunk_bytes, nbytes));
        if (!r->digests || !r->digest) {
            let_go(r);
            free(r);
            leave(h);
            return 0;
        }
        memcpy(r->digests, digests, size);
        r->chunk_bytes = chunk_bytes;
        r->offset = offset;
        r->shows = shows;
        if (shows) shows->refs++;
    }
    r->arrival = ++h->in.arrivals;
    reading **bucket = &c->readings[id % BUCKETS];
    r->next = *bucket;
    *bucket = r;
    leave(h);
    return 1;
}

/* Nobody wants the bytes any more. What still comes is dropped. */
void read_drop(conn *c, int64_t id) {
    enter(c->hub);
    reading *r = *find(c, id);
    if (r) {
        r->into = NULL;
        let_go(r);
    }
    leave(c->hub);
}

/* No more bytes come. */
void read_end(conn *c, int64_t id) {
    enter(c->hub);
    reading *r = *find(c, id);
    if (r) forget(c, r);
    leave(c->hub);
}
