/* Norms, rotary embedding, the store into the cache, and a single product. */
#include "ops.h"

#define ROWS_PER_ITEM 32
#define LANES_PER_ITEM 256 /* of a merge */

static void norm_row(const float *x, const float *weight, int64_t width, float eps, float *out) {
    vf squares = splat(0);
    int64_t i = 0;
    for (; i + VL <= width; i += VL) squares += load(x + i) * load(x + i);
    float total = sum_lanes(squares);
    for (; i < width; i++) total += x[i] * x[i];
    float scale = 1.0f / sqrtf(total / (float)width + eps);
    for (i = 0; i < width; i++) out[i] = weight[i] * (x[i] * scale);
}

static void rotate_row(float *x, const float *cos_sin, int64_t n_pairs) {
    const float *cosines = cos_sin, *sines = cos_sin + n_pairs;
    for (int64_t i = 0; i < n_pairs; i++) {
        float even = x[2 * i], odd = x[2 * i + 1];
        x[2 * i] = even * cosines[i] - odd * sines[i];
        x[2 * i + 1] = odd * cosines[i] + even * sines[i];
    }
}

typedef struct {
    const float *x, *weight;
    int64_t x_stride, n_rows, width;
    float eps, *out;
} norm_t;

static void norm_rows(void *arguments, int64_t item, int thread) {
    const norm_t *n = arguments;
    (void)thread;
    for (int64_t r = item * ROWS_PER_ITEM; r < n->n_rows && r < (item + 1) * ROWS_PER_ITEM; r++)
        norm_row(n->x + r * n->x_stride, n->weight, n->width, n->eps, n->out + r * n->width);
}

void ss_rms_norm(context_t *context, const float *x, int64_t x_stride, const float *weight, int64_t n_rows,
                 int64_t width, float eps, float *out) {
    norm_t n = {x, weight, x_stride, n_rows, width, eps, out};
    pool_run(context_pool(context), norm_rows, &n, (n_rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM);
}

typedef struct {
    float *q;
    int64_t q_stride, n_rows, n_heads, head_dim, rope_dim;
    const float *cos_sin;
} rotation_t;

static void rotate_rows(void *arguments, int64_t item, int thread) {
    const rotation_t *t = arguments;
    (void)thread;
    for (int64_t r = item * ROWS_PER_ITEM; r < t->n_rows && r < (item + 1) * ROWS_PER_ITEM; r++)
        for (int64_t head = 1; head <= t->n_heads; head++)
            rotate_row(t->q + r * t->q_stride + head * t->head_dim - t->rope_dim, t->cos_sin + r * t->rope_dim,
                       t->rope_dim / 2);
}

void ss_rotate_queries(context_t *context, float *q, int64_t q_stride, int64_t n_rows, int64_t n_heads,
                       int64_t head_dim, int64_t rope_dim, const float *cos_sin) {
    rotation_t t = {q, q_stride, n_rows, n_heads, head_dim, rope_dim, cos_sin};
    pool_run(context_pool(context), rotate_rows, &t, (n_rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM);
}

typedef struct {
    const slots_t *slots;
    const float *kv_a, *norm;
    int64_t kv_a_stride;
    float eps;
    char *layer_base, *scratch; /* scratch: a row for each thread */
} latents_t;

/* One cache row from kv_a = latent | key: normed latent | rotated key, in fp32 or bf16. */
static void store_row(const latents_t *t, int64_t r, float *row) {
    const slots_t *s = t->slots;
    int64_t width = s->lora + s->rope;
    char *slot = t->layer_base + s->page_of_row[r] * s->page_bytes + s->offset_of_row[r] * width * (s->is_bf16 ? 2 : 4);
    norm_row(t->kv_a + r * t->kv_a_stride, t->norm, s->lora, t->eps, row);
    memcpy(row + s->lora, t->kv_a + r * t->kv_a_stride + s->lora, sizeof(float) * (size_t)s->rope);
    rotate_row(row + s->lora, s->cos_sin + r * s->rope, s->rope / 2);
    if (!s->is_bf16) {
        memcpy(slot, row, sizeof(float) * (size_t)width);
        return;
    }
    for (int64_t i = 0; i < width; i++) ((uint16_t *)slot)[i] = narrow_bf16(row[i]);
}

static void store_rows(void *arguments, int64_t item, int thread) {
    const latents_t *t = arguments;
    float *row = (float *)(t->scratch + (size_t)thread * ROOM(float, t->slots->lora + t->slots->rope));
    for (int64_t r = item * ROWS_PER_ITEM; r < t->slots->n_rows && r < (item + 1) * ROWS_PER_ITEM; r++)
        if (t->slots->page_of_row[r] >= 0) store_row(t, r, row);
}

int32_t ss_store_latent(context_t *context, const slots_t *slots, const float *kv_a, int64_t kv_a_stride,
                        const float *norm, float eps, char *layer_base) {
    pool_t *pool = context_pool(context);
    size_t room = (size_t)pool_threads(pool) * ROOM(float, slots->lora + slots->rope);
    char *scratch = context_scratch(context, room);
    if (!scratch) return -1;
    latents_t t = {slots, kv_a, norm, kv_a_stride, eps, layer_base, scratch};
    pool_run(pool, store_rows, &t, (slots->n_rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM);
    return 0;
}

typedef struct {
    const float *const *shares;
    int64_t n_shares, n_lanes, v;
    float *out;
} merge_t;

static void merge_lane(const merge_t *t, int64_t lane) {
    float best = -INFINITY, sum = 0, *out = t->out + lane * t->v;
    for (int64_t s = 0; s < t->n_shares; s++) {
        float log_sum = t->shares[s][t->n_lanes * t->v + lane];
        best = log_sum > best ? log_sum : best;
    }
    memset(out, 0, sizeof(float) * (size_t)t->v);
    for (int64_t s = 0; s < t->n_shares; s++) {
        const float *values = t->shares[s] + lane * t->v;
        float factor = expf(t->shares[s][t->n_lanes * t->v + lane] - best);
        sum += factor;
        for (int64_t j = 0; j < t->v; j++) out[j] += values[j] * factor;
    }
    for (int64_t j = 0; j < t->v; j++) out[j] /= sum;
}

static void merge_lanes(void *arguments, int64_t item, int thread) {
    const merge_t *t = arguments;
    (void)thread;
    for (int64_t lane = item * LANES_PER_ITEM; lane < t->n_lanes && lane < (item + 1) * LANES_PER_ITEM; lane++)
        merge_lane(t, lane);
}

void ss_merge_shares(context_t *context, const float *const *shares, int64_t n_shares, int64_t n_lanes, int64_t v,
                     float *out) {
    merge_t t = {shares, n_shares, n_lanes, v, out};
    pool_run(context_pool(context), merge_lanes, &t, (n_lanes + LANES_PER_ITEM - 1) / LANES_PER_ITEM);
}

int32_t ss_linear(context_t *context, const float *x, int64_t x_stride, int64_t n_rows, const matrix_t *w,
                  float *out, int32_t add) {
    int64_t n_words = takes_pairs(w) ? pairs_of(w->cols) : 0;
    char *cursor = context_scratch(context, ROOM(float, n_rows * n_words) + products_room(1));
    if (!cursor) return -1;
    product_t product = {.x = x, .x_stride = x_stride, .n_rows = n_rows, .w = w, .out = out,
                         .out_stride = w->rows, .add = add};
    if (n_words) {
        float *words = TAKE(cursor, float, n_rows * n_words);
        narrow_rows(x, x_stride, n_rows, w->cols, words, n_words, context_pool(context));
        product.x = words, product.x_stride = n_words, product.is_pairs = 1;
    }
    run_products(&product, 1, cursor, context_pool(context));
    return 0;
}
