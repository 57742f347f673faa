#include "pool.h"

#include "amx.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#define SPIN_NS 50000 /* how long an idle helper polls for the next job before it sleeps */
#define PAUSES 64     /* pauses between two reads of the clock, and between two yields of the core */

struct pool {
    int n_threads, n_started;
    pthread_t *helpers;
    job_t job;
    void *arguments;
    int64_t n_items;
    _Alignas(64) atomic_int_fast64_t next;       /* first item not taken */
    _Alignas(64) atomic_int_fast64_t generation; /* counts jobs; a helper joins each at most once */
    _Alignas(64) atomic_int open;                /* 1 while helpers may join the job */
    _Alignas(64) atomic_int inside;              /* helpers that may still touch the job */
    atomic_int stopping, sleeping;
    pthread_mutex_t lock;
    pthread_cond_t wake;
};

typedef struct {
    pool_t *pool;
    int thread;
} helper_t;

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void take_items(pool_t *p, int thread) {
    for (int64_t item; (item = atomic_fetch_add(&p->next, 1)) < p->n_items;) p->job(p->arguments, item, thread);
}

static int has_new_job(pool_t *p, int64_t seen) {
    return atomic_load(&p->generation) != seen || atomic_load(&p->stopping);
}

/* Returns once there is a job after `seen`, or the pool stops. */
static void await_new_job(pool_t *p, int64_t seen) {
    for (int64_t end = now_ns() + SPIN_NS; now_ns() < end; sched_yield())
        for (int i = 0; i < PAUSES; i++) {
            if (has_new_job(p, seen)) return;
            relax();
        }
    release_unit();
    pthread_mutex_lock(&p->lock);
    atomic_fetch_add(&p->sleeping, 1);
    while (!has_new_job(p, seen)) pthread_cond_wait(&p->wake, &p->lock);
    atomic_fetch_sub(&p->sleeping, 1);
    pthread_mutex_unlock(&p->lock);
}

static void *help(void *argument) {
    helper_t self = *(helper_t *)argument;
    pool_t *p = self.pool;
    free(argument);
    for (int64_t seen = 0; !atomic_load(&p->stopping);) {
        await_new_job(p, seen);
        seen = atomic_load(&p->generation);
        /* The helper increments `inside`, then reads `open`; the caller clears `open`, then reads `inside`. So at
         * least one of the two sees the other's change. */
        atomic_fetch_add(&p->inside, 1);
        if (atomic_load(&p->open)) take_items(p, self.thread);
        atomic_fetch_sub(&p->inside, 1);
    }
    return NULL;
}

static void announce(pool_t *p) {
    atomic_fetch_add(&p->generation, 1);
    if (!atomic_load(&p->sleeping)) return;
    pthread_mutex_lock(&p->lock);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
}

void pool_run(pool_t *p, job_t job, void *arguments, int64_t n_items) {
    if (!p || p->n_started == 0 || n_items < 2) {
        for (int64_t item = 0; item < n_items; item++) job(arguments, item, 0);
        release_unit();
        return;
    }
    p->job = job, p->arguments = arguments, p->n_items = n_items;
    atomic_store(&p->next, 0);
    atomic_store(&p->open, 1);
    announce(p);
    take_items(p, 0);
    atomic_store(&p->open, 0);
    release_unit();
    for (int i = 0; atomic_load(&p->inside); i++) i % PAUSES == PAUSES - 1 ? (void)sched_yield() : relax();
}

static int start_helper(pool_t *p, int thread) {
    helper_t *helper = malloc(sizeof *helper);
    if (!helper) return 0;
    *helper = (helper_t){p, thread};
    if (pthread_create(&p->helpers[thread - 1], NULL, help, helper) == 0) return 1;
    free(helper);
    return 0;
}

pool_t *pool_new(int n_threads) {
    pool_t *p = aligned_alloc(64, (sizeof *p + 63) / 64 * 64);
    if (!p) return NULL;
    *p = (pool_t){.n_threads = n_threads};
    p->helpers = calloc((size_t)n_threads, sizeof *p->helpers);
    if (!p->helpers) {
        free(p);
        return NULL;
    }
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    while (p->n_started < n_threads - 1 && start_helper(p, p->n_started + 1)) p->n_started++;
    return p;
}

void pool_free(pool_t *p) {
    pthread_mutex_lock(&p->lock);
    atomic_store(&p->stopping, 1);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < p->n_started; i++) pthread_join(p->helpers[i], NULL);
    pthread_cond_destroy(&p->wake);
    pthread_mutex_destroy(&p->lock);
    free(p->helpers);
    free(p);
}

int pool_threads(const pool_t *p) { return p->n_threads; }
