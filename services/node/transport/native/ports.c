/* Who comes next, and when. pacing.py says why; a port here differs in nothing that its users can
   tell. */

#include "internal.h"

static double measured(const port *p) {
    return p->rate > 0 ? p->rate : p->moving_s > 0 ? p->moved / p->moving_s : 0;
}

static int64_t in_limits(double nbytes) {
    return least(most(MIN_GRANT, (int64_t)nbytes), MAX_GRANT);
}

int64_t grant_bytes(const port *p) { return in_limits(measured(p) * GRANT_S); }
int64_t ahead_bytes(const port *p) { return in_limits(measured(p) * AHEAD_S); }

void enlist(port *p, ticket *t, conn *lane) {
    t->lane = lane;
    t->next = p->tickets;
    p->tickets = t;
}

void unlist(port *p, ticket *t) {
    for (ticket **at = &p->tickets; *at; at = &(*at)->next)
        if (*at == t) {
            *at = t->next;
            return;
        }
}

void give_up_quiet_time(port *p, double now) {
    if (p->quiet_since >= 0 && now - p->quiet_since > QUIET_S) p->free_at = fmax(p->free_at, now);
}

void want(port *p, ticket *t, bool wanting) {
    if (t->wanting == wanting) return;
    if (wanting) {
        bool flows = false;
        for (ticket *other = p->tickets; other; other = other->next)
            flows |= other->wanting && other->flow == t->flow;
        if (!flows) p->served[t->flow] = most(p->served[t->flow], p->now_served);
        give_up_quiet_time(p, now_s());
        p->quiet_since = -1;
    }
    t->wanting = wanting;
}

bool before(const port *p, const ticket *a, const ticket *b) {
    int64_t x = p->served[a->flow], y = p->served[b->flow];
    if (x != y) return x < y;
    if (a->priority != b->priority) return a->priority < b->priority;
    return a->arrival < b->arrival;
}

void hold(port *p, ticket *t, int64_t nbytes) {
    p->now_served = p->served[t->flow];
    p->served[t->flow] += t->flow == SERVING_FLOW ? nbytes : nbytes * SERVING_PARTS;
    if (p->rate > 0) p->free_at += (double)nbytes / p->rate;
    p->holding++;
}

void rest(port *p, double now) {
    if (p->holding || p->quiet_since >= 0) return;
    p->quiet_since = now;
    memset(p->served, 0, (size_t)p->flows * sizeof *p->served);
    p->now_served = 0;
}

bool know_flow(port *p, int64_t flow) {
    if (flow >= p->flows) {
        int64_t flows = most(2 * p->flows, flow + 1);
        int64_t *grown = realloc(p->served, (size_t)flows * sizeof *grown);
        if (!grown) return false;
        memset(grown + p->flows, 0, (size_t)(flows - p->flows) * sizeof *grown);
        p->served = grown;
        p->flows = flows;
    }
    return true;
}

