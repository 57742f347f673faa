/* A pool of threads that process the items of a job. One caller at a time.
 *
 * The caller works too, and waits only for threads that have taken an item. So a helper that the scheduler delays
 * on a busy machine causes no stall. (An OpenMP barrier waits for every thread.) */
#pragma once

#include <stdint.h>

typedef struct pool pool_t;

/* `thread`, below pool_threads, belongs to one thread at a time and can be the index of its workspace. */
typedef void (*job_t)(void *arguments, int64_t item, int thread);

pool_t *pool_new(int n_threads);
void pool_free(pool_t *pool);
int pool_threads(const pool_t *pool);

/* Runs job(arguments, i, thread) once for each i < n_items, in ascending order of start; returns when all are done.
 * Without a pool, on the calling thread alone, as thread 0. */
void pool_run(pool_t *pool, job_t job, void *arguments, int64_t n_items);
