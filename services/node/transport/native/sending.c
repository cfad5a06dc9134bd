/* The source's end: sends the parts of reads whose bytes are there, as the port allows. */

#include "internal.h"

#include <arpa/inet.h>
#include <linux/sockios.h>
#include <stddef.h>
#include <sys/ioctl.h>

void encode_data(uint8_t *head, uint32_t id, uint64_t payload) {
    memset(head, 0, PREFIX_BYTES);
    head[0] = KIND_DATA;
    uint32_t id_be = htonl(id), high = htonl((uint32_t)(payload >> 32)), low = htonl((uint32_t)payload);
    memcpy(head + 4, &id_be, 4);
    memcpy(head + 12, &high, 4);
    memcpy(head + 16, &low, 4);
}

static void limit_unsent(conn *c, int64_t nbytes) {
    if (c->notsent == nbytes) return;
    c->notsent = nbytes;
    int value = (int)nbytes;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &value, sizeof value);
}

static void make_room(conn *c, int64_t nbytes) {
    if (nbytes > c->room) {
        c->room = nbytes;
        int value = 0;
        socklen_t size = sizeof value;
        getsockopt(c->fd, SOL_SOCKET, SO_SNDBUF, &value, &size);
        if (c->deep && 2 * nbytes > value) {
            value = (int)nbytes;
            setsockopt(c->fd, SOL_SOCKET, SO_SNDBUF, &value, sizeof value);
        }
    }
    limit_unsent(c, 2 * c->room);
}

/* Whether so little of the last frame is unsent that the next may begin. */
static bool drained(conn *c) {
    if (c->sends != DRAINING) return c->sends == FREE;
    port *p = &c->hub->out;
    int unsent = 0;
    ioctl(c->fd, SIOCOUTQNSD, &unsent);
    if (unsent > ahead_bytes(p)) return false;
    if (c->timed && p->rate <= 0) {
        p->moved = p->moved * MEMORY + (double)c->part_bytes;
        p->moving_s = p->moving_s * MEMORY + (now_s() - c->granted_at);
    }
    c->sends = FREE;
    c->armed = false;
    return true;
}

/* The kernel is to wake us when the last frame is nearly sent. */
static void await_drained(conn *c) {
    if (c->armed || c->sends != DRAINING) return;
    c->armed = true;
    limit_unsent(c, 2 * ahead_bytes(&c->hub->out)); /* it wakes us when half of this is left */
    watch(c, true);
}

static void end_serving(conn *c, serving *s) {
    hub *h = c->hub;
    for (serving **at = &c->servings; *at; at = &(*at)->next)
        if (*at == s) {
            *at = s->next;
            break;
        }
    unlist(&h->out, &s->turn);
    event *e = tell(h, EVENT_SERVED, c, s->id, true);
    e->a = s->position - s->start;
    e->began = s->began;
    e->ended = now_s();
    region_unref(s->from);
    free(s);
}

static void part_sent(conn *c) {
    port *p = &c->hub->out;
    serving *s = c->part;
    double now = now_s();
    c->part = NULL;
    c->sends = DRAINING;
    c->armed = false;
    c->sent_at = now;
    p->holding--;
    s->in_part = false;
    if (s->stopped || s->position == s->end)
        end_serving(c, s);
    else
        want(p, &s->turn, s->from->ready > s->position);
    c->timed = false;
    for (ticket *t = p->tickets; t; t = t->next) c->timed |= t->wanting;
}

/* Sends what is begun, then what is posted. */
void send_some(conn *c) {
    while (c->state != DEAD) {
        struct iovec parts[2];
        struct msghdr message = {.msg_iov = parts};
        bool framed = c->part != NULL;
        if (framed && c->posted_sent == 0) {
            parts[0] = (struct iovec){c->out_head + c->head_sent, PREFIX_BYTES - c->head_sent};
            parts[1] = (struct iovec){c->data, (size_t)c->data_left};
            message.msg_iovlen = 2;
        } else if (c->posted_bytes) {
            framed = false;
            parts[0] = (struct iovec){c->posted + c->posted_sent, c->posted_bytes - c->posted_sent};
            message.msg_iovlen = 1;
        } else
            return;
        ssize_t sent = sendmsg(c->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EINTR) continue;
            if (errno != EAGAIN && errno != EWOULDBLOCK) lose(c, errno);
            else watch(c, true);
            return;
        }
        if (!framed) {
            c->posted_sent += (size_t)sent;
            if (c->posted_sent == c->posted_bytes) {
                c->posted_bytes = c->posted_sent = 0;
                c->posted_frames = 0;
                c->sent_at = now_s();
            }
            continue;
        }
        size_t of_head = (size_t)least(sent, (int64_t)(PREFIX_BYTES - c->head_sent));
        c->head_sent += of_head;
        c->data += sent - (ssize_t)of_head;
        c->data_left -= sent - (ssize_t)of_head;
        if (c->data_left == 0) part_sent(c);
    }
}

static void begin_part(conn *c, serving *s) {
    port *p = &c->hub->out;
    int64_t nbytes = least(grant_bytes(p), least(s->from->ready, s->end) - s->position);
    double now = now_s();
    hold(p, &s->turn, nbytes);
    want(p, &s->turn, false);
    if (s->began == 0) s->began = now;
    s->in_part = true;
    c->part = s;
    c->sends = SENDING;
    c->granted_at = now;
    c->part_bytes = nbytes;
    p->last = c;
    p->last_at = now;
    encode_data(c->out_head, (uint32_t)s->id, (uint64_t)nbytes);
    c->head_sent = 0;
    c->data = s->from->base + s->position;
    c->data_left = nbytes;
    s->position += nbytes;
    make_room(c, nbytes + PREFIX_BYTES);
    send_some(c);
}

static serving *serving_of(ticket *t) { return (serving *)((char *)t - offsetof(serving, turn)); }

/* Begins the frames whose time has come. */
void run_out(hub *h) {
    port *p = &h->out;
    for (int grants = 0;; grants++) {
        double now = now_s();
        ticket *best = NULL;
        bool wanted = false;
        for (ticket *t = p->tickets; t; t = t->next) {
            if (!t->wanting || t->lane->state == DEAD) continue;
            wanted = true;
            if (t->lane->posted_bytes || !drained(t->lane)) await_drained(t->lane);
            else if (!best || before(p, t, best)) best = t;
        }
        p->due = INFINITY;
        if (!best) {
            if (!wanted) rest(p, now);
            break;
        }
        p->free_at = fmax(p->free_at, now - LATENESS_S);
        double at = p->rate > 0 ? p->free_at : now;
        if (p->last && p->last != best->lane && !drained(p->last)) {
            await_drained(p->last);
            at = fmax(at, p->last_at + PATIENCE_S);
        }
        if (at > now || grants == GRANTS_A_TURN) {
            p->due = at;
            break;
        }
        begin_part(best->lane, serving_of(best));
    }
    set_timer(h);
}

/* Those read on who waited for more of the region. */
void serve_on(region *g) {
    port *p = &g->hub->out;
    bool wanted = false;
    for (ticket *t = p->tickets; t; t = t->next) {
        serving *s = serving_of(t);
        if (s->from == g && !s->in_part && s->position < g->ready) {
            want(p, t, true);
            wanted = true;
        }
    }
    if (wanted) run_out(g->hub);
}

void end_servings(conn *c) {
    port *p = &c->hub->out;
    if (c->part) p->holding--;
    if (p->last == c) p->last = NULL;
    while (c->servings) {
        serving *s = c->servings;
        c->servings = s->next;
        unlist(p, &s->turn);
        region_unref(s->from);
        free(s);
    }
    free(c->posted);
}

int64_t serve_begin(conn *c, int64_t id, region *from, int64_t position, int64_t nbytes,
                    int64_t priority, int64_t flow) {
    hub *h = c->hub;
    serving *s = calloc(1, sizeof *s);
    if (!s) return 0;
    enter(h);
    if (!know_flow(&h->out, flow)) {
        free(s);
        leave(h);
        return 0;
    }
    s->id = id;
    s->start = s->position = position;
    s->end = position + nbytes;
    s->from = from;
    from->refs++;
    s->turn.priority = priority;
    s->turn.flow = flow;
    s->turn.arrival = ++h->out.arrivals;
    s->next = c->servings;
    c->servings = s;
    enlist(&h->out, &s->turn, c);
    want(&h->out, &s->turn, from->ready > position);
    run_out(h);
    leave(h);
    return 1;
}

/* Ends it, after the frame that is begun. */
void serve_stop(conn *c, int64_t id) {
    hub *h = c->hub;
    enter(h);
    for (serving *s = c->servings; s; s = s->next)
        if (s->id == id) {
            s->stopped = true;
            if (!s->in_part) end_serving(c, s);
            break;
        }
    run_out(h);
    leave(h);
}

/* Sends a frame after what is begun and posted. Returns how many posted frames wait. */
int64_t conn_post(conn *c, const uint8_t *frame, int64_t nbytes) {
    hub *h = c->hub;
    enter(h);
    if (nbytes) {
        size_t size = c->posted_bytes + (size_t)nbytes;
        if (size > c->posted_room) {
            size_t room = size > 2 * c->posted_room ? size : 2 * c->posted_room;
            uint8_t *grown = realloc(c->posted, room);
            if (!grown) abort();
            c->posted = grown;
            c->posted_room = room;
        }
        memcpy(c->posted + c->posted_bytes, frame, (size_t)nbytes);
        c->posted_bytes = size;
        c->posted_frames++;
        send_some(c);
    }
    int64_t waiting = c->posted_frames;
    leave(h);
    return waiting;
}

double conn_sent_at(conn *c) {
    enter(c->hub);
    double at = c->part || c->posted_bytes ? now_s() : c->sent_at;
    leave(c->hub);
    return at;
}
