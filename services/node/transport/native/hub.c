/* Moves runs of DATA frames on plain TCP connections, in a thread that never needs the GIL.

   Python owns the protocol and its checks. C knows one frame, DATA, and only if it belongs
   to a read that it was told of and fits into it. It owns the direction in which blocks flow:

       the reader's end     receives. Any frame but a good DATA frame or a heartbeat pauses the
                            connection, and Python gets its prefix, judges it and resumes.
       the source's end     sends. Python receives the requests, and posts all other frames here.

   A read's bytes go straight to their place. Each chunk is compared with its digest, and if it is
   right and the next of its region, others may read it at once: that is a relay. Ports pace both
   directions as pacing.py does, which says why.

   Everything is behind one lock. So once read_drop, serve_stop's event or conn_free is there,
   nobody here touches the buffer any more. No call blocks but hub_run. */

#include "internal.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>

/* Tells Python, which is woken at once unless the event can wait for another. */
event *tell(hub *h, int64_t kind, conn *c, int64_t id, bool wake) {
    if (h->n_events == h->room) {
        size_t room = h->room ? 2 * h->room : 256;
        event *grown = realloc(h->events, room * sizeof(event));
        if (!grown) abort(); /* as malloc's failure ends a Python process */
        h->events = grown;
        h->room = room;
    }
    event *e = &h->events[h->n_events++];
    memset(e, 0, sizeof *e);
    e->kind = kind;
    e->conn = c->serial;
    e->id = id;
    if (wake) ring(h->told);
    return e;
}

void set_timer(hub *h) {
    double at = fmin(h->in.due, h->out.due);
    if (at == h->timer_at) return;
    h->timer_at = at;
    struct itimerspec spec = {0};
    if (isfinite(at)) {
        double whole = floor(at);
        spec.it_value.tv_sec = (time_t)whole;
        spec.it_value.tv_nsec = (long)((at - whole) * 1e9) + 1;
        if (spec.it_value.tv_nsec >= 1000000000) spec.it_value.tv_nsec = 999999999;
    }
    timerfd_settime(h->timer, TFD_TIMER_ABSTIME, &spec, NULL);
}

/* Has the kernel tell us what happens from now on, and what is the case already. That there is room
   to send it tells once: mostly nobody waits for it. */
void watch(conn *c, bool again) {
    struct epoll_event wish = {.events = EPOLLET, .data.u64 = (uint64_t)c->serial};
    wish.events |= c->receives ? EPOLLIN | EPOLLRDHUP : EPOLLOUT | EPOLLONESHOT;
    epoll_ctl(c->hub->epoll, again ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, c->fd, &wish);
}

void lose(conn *c, int why) {
    if (c->state == DEAD) return;
    c->state = DEAD;
    epoll_ctl(c->hub->epoll, EPOLL_CTL_DEL, c->fd, NULL);
    tell(c->hub, EVENT_LOST, c, 0, true)->a = why;
}

region *region_new(hub *h, uint8_t *base, int64_t ready) {
    region *g = calloc(1, sizeof *g);
    if (!g) return NULL;
    *g = (region){h, base, ready, 1};
    return g;
}

void region_unref(region *g) {
    if (--g->refs == 0) free(g);
}

void raise_ready(region *g, int64_t ready) {
    if (ready <= g->ready) return;
    g->ready = ready;
    serve_on(g);
}

void region_ready(region *g, int64_t ready) {
    hub *h = g->hub;
    enter(h);
    raise_ready(g, ready);
    leave(h);
}

void region_drop(region *g) {
    hub *h = g->hub;
    enter(h);
    region_unref(g);
    leave(h);
}

conn *conn_new(hub *h, int fd, int64_t receives, int64_t max_payload, int64_t deep) {
    conn *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->hub = h;
    c->receives = receives;
    c->deep = deep;
    c->max_payload = max_payload;
    c->heard_at = c->sent_at = now_s();
    c->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (c->fd < 0) {
        free(c);
        return NULL;
    }
    enter(h);
    c->serial = ++h->serials;
    c->next = h->conns;
    h->conns = c;
    if (receives) enlist(&h->in, &c->turn, c);
    watch(c, false);
    leave(h);
    return c;
}

int64_t conn_serial(conn *c) { return c->serial; }

/* Ends all that is under way; nothing touches its buffers any more. */
void conn_free(conn *c) {
    hub *h = c->hub;
    enter(h);
    epoll_ctl(h->epoll, EPOLL_CTL_DEL, c->fd, NULL);
    close(c->fd);
    for (conn **at = &h->conns; *at; at = &(*at)->next)
        if (*at == c) {
            *at = c->next;
            break;
        }
    if (c->receives) end_readings(c);
    else end_servings(c);
    free(c);
    ring(h->wake);
    leave(h);
}

enum { WAKE = 0, TIMER = -1 };

hub *hub_new(double bytes_per_s, const uint8_t *heartbeat) {
    hub *h = calloc(1, sizeof *h);
    if (!h) return NULL;
    pthread_mutex_init(&h->lock, NULL);
    memcpy(h->heartbeat, heartbeat, PREFIX_BYTES);
    h->in.rate = h->out.rate = bytes_per_s;
    h->in.due = h->out.due = h->timer_at = INFINITY;
    h->epoll = epoll_create1(EPOLL_CLOEXEC);
    h->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    h->told = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    h->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    bool failed = h->epoll < 0 || h->wake < 0 || h->told < 0 || h->timer < 0;
    if (failed || !know_flow(&h->in, 0) || !know_flow(&h->out, 0)) {
        hub_free(h);
        return NULL;
    }
    struct epoll_event wake = {.events = EPOLLIN, .data.u64 = (uint64_t)WAKE};
    struct epoll_event timer = {.events = EPOLLIN, .data.u64 = (uint64_t)TIMER};
    epoll_ctl(h->epoll, EPOLL_CTL_ADD, h->wake, &wake);
    epoll_ctl(h->epoll, EPOLL_CTL_ADD, h->timer, &timer);
    return h;
}

/* After hub_run has returned and every connection and region is freed. */
void hub_free(hub *h) {
    int fds[] = {h->epoll, h->wake, h->told, h->timer};
    for (int i = 0; i < 4; i++)
        if (fds[i] >= 0) close(fds[i]);
    free(h->in.served);
    free(h->out.served);
    free(h->events);
    pthread_mutex_destroy(&h->lock);
    free(h);
}

int64_t hub_told(hub *h) { return h->told; }

static void happened(hub *h, int64_t tag) {
    if (tag == WAKE) quieten(h->wake);
    else if (tag == TIMER) {
        quieten(h->timer);
        h->timer_at = INFINITY;
    } else
        for (conn *c = h->conns; c; c = c->next)
            if (c->serial == tag && c->state != DEAD) {
                if (c->receives) receive(c);
                else {
                    c->armed = false;
                    send_some(c);
                }
                return;
            }
}

/* The thread. Returns after hub_stop. */
void hub_run(hub *h) {
    for (;;) {
        struct epoll_event events[32];
        int count = epoll_wait(h->epoll, events, 32, -1);
        pthread_mutex_lock(&h->lock);
        if (h->stopping) break;
        for (int i = 0; i < count; i++) happened(h, (int64_t)events[i].data.u64);
        run_in(h);
        for (conn *c = h->conns; c; c = c->next)
            if (c->go) {
                c->go = false;
                receive(c);
            }
        run_out(h);
        leave(h);
        if (atomic_load(&h->callers)) sched_yield();
    }
    leave(h);
}

void hub_stop(hub *h) {
    enter(h);
    h->stopping = true;
    ring(h->wake);
    leave(h);
}

/* Moves up to `room` events, in order. Returns how many. */
int64_t hub_events(hub *h, event *out, int64_t room) {
    enter(h);
    size_t count = (size_t)least(room, (int64_t)h->n_events);
    if (count) {
        memcpy(out, h->events, count * sizeof *out);
        h->n_events -= count;
        memmove(h->events, h->events + count, h->n_events * sizeof *out);
    }
    if (!h->n_events) quieten(h->told);
    leave(h);
    return (int64_t)count;
}

/* Bytes that bypass the queue of a direction: later grants wait for them. */
void hub_charge(hub *h, int64_t out, int64_t nbytes) {
    port *p = out ? &h->out : &h->in;
    if (p->rate <= 0) return;
    enter(h);
    give_up_quiet_time(p, now_s());
    p->free_at += (double)nbytes / p->rate;
    leave(h);
}

/* Whether Python hears of each chunk at once. */
void hub_eager(hub *h, int64_t eager) {
    enter(h);
    h->eager = eager;
    leave(h);
}
