/* Where the processes of a team (ranks of tensor parallelism) wait for each other. They share the
   memory of a Team, and each runs its share of every product. */

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels.h"

/* Turns of a loop before a rank sleeps: about 50 us. The shares of a product end that close together
   where each rank has a core; where ranks share one, to spin for longer keeps the others from it. */
enum { TURNS = 1000 };

INLINE void pause_for_a_moment(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

void meet(Team *t) {
    /* Nobody can go on to the next meeting before this rank has come, so this is the meeting's own. */
    int32_t round = __atomic_load_n(&t->round, __ATOMIC_ACQUIRE);
    if (__atomic_load_n(&t->lost, __ATOMIC_RELAXED)) return;
    if (__atomic_add_fetch(&t->here, 1, __ATOMIC_ACQ_REL) == t->ranks) {
        __atomic_store_n(&t->here, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&t->round, round + 1, __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&t->asleep, __ATOMIC_SEQ_CST))
            syscall(SYS_futex, &t->round, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
        return;
    }
    for (int turn = 0; turn < TURNS; turn++) {
        if (__atomic_load_n(&t->round, __ATOMIC_ACQUIRE) != round) return;
        pause_for_a_moment();
    }
    __atomic_add_fetch(&t->asleep, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&t->round, __ATOMIC_ACQUIRE) == round)
        syscall(SYS_futex, &t->round, FUTEX_WAIT, round, NULL, NULL, 0);
    __atomic_sub_fetch(&t->asleep, 1, __ATOMIC_SEQ_CST);
}

void lose(Team *t) {
    /* Whoever read `round` before finds that another has begun, and whoever reads it afterwards finds
       `lost`. */
    __atomic_store_n(&t->lost, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&t->round, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &t->round, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}
