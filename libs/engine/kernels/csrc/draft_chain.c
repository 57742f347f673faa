/* A chain of drafts by a head of EAGLE-3 with grouped attention, in one call: `libs/engine/eagle/head.py` states the
 * arithmetic. Its matrices are so small that one call an operation would cost more than the products. */
#include "ops.h"

typedef struct {
    int64_t hidden, n_heads, n_kv_heads, head_dim;
    int64_t embedding_is_bf16, norm_before_residual, norm_output;
    float eps, scale;
    const float *input_norm, *hidden_norm, *post_norm, *norm;
    const void *embedding;     /* [vocabulary][hidden] */
    const int64_t *target_ids; /* of each row of lm_head */
    const matrix_t *qkv, *o_proj, *lm_head;
    const mlp_t *mlp;
} draft_head_t;

/* One sequence. Its context has room behind it for n_drafts - 1 rows, which the chain writes. */
typedef struct {
    float *keys, *values;       /* of the first kv head: n_rows rows of head_dim */
    int64_t kv_stride, n_rows;  /* floats from one kv head to the next */
    const float *residual, *q;  /* of the newest row: hidden and n_heads * head_dim values */
    const float *cos_sin;       /* [n_drafts - 1][2][head_dim / 2]: of the rows behind the context */
    int64_t *tokens, n_tokens;  /* out: room for n_drafts */
} draft_context_t;

/* The sequences that still draft, in the order of `contexts`, and a row of each buffer for each of them. */
typedef struct {
    draft_context_t **running;
    float *confidence;                               /* the product of the probabilities of a sequence's drafts */
    float *x, *normed, *inputs, *qkv, *mixed, *logits, *cos_sin;
    float *scores;                                   /* a row for each thread */
    int64_t n, longest;
    const draft_head_t *head;
    int64_t behind;                                  /* rows behind each context */
} chain_t;

static int64_t qkv_width(const draft_head_t *h) { return (h->n_heads + 2 * h->n_kv_heads) * h->head_dim; }

static float dot(const float *a, const float *b, int64_t n) {
    vf sums = splat(0);
    int64_t i = 0;
    for (; i + VL <= n; i += VL) sums += load(a + i) * load(b + i);
    float total = sum_lanes(sums);
    for (; i < n; i++) total += a[i] * b[i];
    return total;
}

/* Replaces values by e^(value - largest); returns their sum. */
static float exponentials(float *values, int64_t n, float largest) {
    vf sums = splat(0);
    int64_t i = 0;
    for (; i + VL <= n; i += VL) {
        vf e = vexp(load(values + i) - largest);
        store(values + i, e);
        sums += e;
    }
    float total = sum_lanes(sums);
    for (; i < n; i++) total += values[i] = expf(values[i] - largest);
    return total;
}

#define AT_ONCE (4 * VL)

/* out = the rows of `values`, weighed. */
static void weigh_rows(const float *weights, const float *values, int64_t n, int64_t width, float *out) {
    int64_t d = 0;
    for (; d + AT_ONCE <= width; d += AT_ONCE) {
        vf sums[4] = {splat(0), splat(0), splat(0), splat(0)};
        for (int64_t i = 0; i < n; i++)
            UNROLL for (int v = 0; v < 4; v++) sums[v] += weights[i] * load(values + i * width + d + v * VL);
        UNROLL for (int v = 0; v < 4; v++) store(out + d + v * VL, sums[v]);
    }
    for (; d < width; d++) {
        float sum = 0;
        for (int64_t i = 0; i < n; i++) sum += weights[i] * values[i * width + d];
        out[d] = sum;
    }
}

/* Attention of one query head to its whole context; scores [n] is scratch. */
static void attend_head(const float *q, const float *keys, const float *values, int64_t n, int64_t width, float scale,
                        float *scores, float *out) {
    float best = -INFINITY;
    for (int64_t i = 0; i < n; i++) {
        scores[i] = dot(q, keys + i * width, width) * scale;
        best = scores[i] > best ? scores[i] : best;
    }
    float sum = exponentials(scores, n, best);
    weigh_rows(scores, values, n, width, out);
    for (int64_t d = 0; d < width; d++) out[d] /= sum;
}

static void attend_item(void *arguments, int64_t item, int thread) {
    const chain_t *c = arguments;
    const draft_head_t *h = c->head;
    int64_t row = item / h->n_heads, head = item % h->n_heads, group = h->n_heads / h->n_kv_heads;
    const draft_context_t *of = c->running[row];
    const float *q = c->behind ? c->qkv + row * qkv_width(h) : of->q;
    int64_t kv = head / group * of->kv_stride;
    attend_head(q + head * h->head_dim, of->keys + kv, of->values + kv, of->n_rows + c->behind, h->head_dim, h->scale,
                c->scores + thread * c->longest, c->mixed + (row * h->n_heads + head) * h->head_dim);
}

/* The most likely row of lm_head, and the product of its probability with those before. */
static void choose_item(void *arguments, int64_t row, int thread) {
    const chain_t *c = arguments;
    int64_t n = c->head->lm_head->rows, best = 0;
    float *logits = c->logits + row * n;
    draft_context_t *of = c->running[row];
    (void)thread;
    for (int64_t i = 1; i < n; i++) best = logits[i] > logits[best] ? i : best;
    c->confidence[row] /= exponentials(logits, n, logits[best]);
    of->tokens[of->n_tokens] = c->head->target_ids[best]; /* counted when it is likely enough */
}

/* Count the drafts that are likely enough, and let the others' sequences leave. */
static void leave_unsure(chain_t *c, float least) {
    int64_t hidden = c->head->hidden, kept = 0;
    for (int64_t row = 0; row < c->n; row++) {
        if (!(c->confidence[row] >= least)) continue;
        c->running[row]->n_tokens++;
        c->running[kept] = c->running[row], c->confidence[kept] = c->confidence[row];
        memmove(c->x + kept * hidden, c->x + row * hidden, sizeof(float) * (size_t)hidden);
        memmove(c->normed + kept * hidden, c->normed + row * hidden, sizeof(float) * (size_t)hidden);
        kept++;
    }
    c->n = kept;
}

static void embed(const chain_t *c, int64_t row, float *out) {
    const draft_context_t *of = c->running[row];
    int64_t hidden = c->head->hidden, first = of->tokens[of->n_tokens - 1] * hidden;
    if (!c->head->embedding_is_bf16) {
        memcpy(out, (const float *)c->head->embedding + first, sizeof(float) * (size_t)hidden);
        return;
    }
    for (int64_t i = 0; i < hidden; i++) out[i] = widen_bf16(((const uint16_t *)c->head->embedding)[first + i]);
}

/* The rows that were drafted become inputs: x the residuals, qkv the projections, keys and values behind contexts. */
static int32_t project(context_t *context, chain_t *c) {
    const draft_head_t *h = c->head;
    int64_t hidden = h->hidden, width = h->head_dim, rotated = h->n_heads + h->n_kv_heads, stride = qkv_width(h);
    const float *next = h->norm_output ? c->normed : c->x;
    float *right = c->mixed; /* free now */
    ss_rms_norm(context, next, hidden, h->hidden_norm, c->n, hidden, h->eps, right);
    for (int64_t row = 0; row < c->n; row++) {
        float *input = c->inputs + row * 2 * hidden;
        embed(c, row, input + hidden);
        ss_rms_norm(context, input + hidden, hidden, h->input_norm, 1, hidden, h->eps, input);
        memcpy(input + hidden, right + row * hidden, sizeof(float) * (size_t)hidden);
        memcpy(c->cos_sin + row * width, c->running[row]->cos_sin + c->behind * width, sizeof(float) * (size_t)width);
    }
    const float *residual = h->norm_before_residual ? right : next;
    if (residual != c->x) memcpy(c->x, residual, sizeof(float) * (size_t)(c->n * hidden));
    if (ss_linear(context, c->inputs, 2 * hidden, c->n, h->qkv, c->qkv, 0)) return -1;
    ss_rotate_queries(context, c->qkv, stride, c->n, rotated, width, width, c->cos_sin);
    for (int64_t row = 0; row < c->n; row++)
        for (int64_t head = 0; head < h->n_kv_heads; head++) {
            const draft_context_t *of = c->running[row];
            const float *key = c->qkv + row * stride + (h->n_heads + head) * width;
            int64_t at = head * of->kv_stride + (of->n_rows + c->behind) * width;
            memcpy(of->keys + at, key, sizeof(float) * (size_t)width);
            memcpy(of->values + at, key + h->n_kv_heads * width, sizeof(float) * (size_t)width);
        }
    return 0;
}

/* From inputs to the next draft of each sequence. */
static int32_t draft_once(context_t *context, chain_t *c) {
    const draft_head_t *h = c->head;
    pool_t *pool = context_pool(context);
    pool_run(pool, attend_item, c, c->n * h->n_heads);
    if (ss_linear(context, c->mixed, h->n_heads * h->head_dim, c->n, h->o_proj, c->x, 1)) return -1;
    ss_rms_norm(context, c->x, h->hidden, h->post_norm, c->n, h->hidden, h->eps, c->normed);
    if (ss_mlp(context, h->mlp, c->normed, c->n, c->x)) return -1;
    ss_rms_norm(context, c->x, h->hidden, h->norm, c->n, h->hidden, h->eps, c->normed);
    if (ss_linear(context, c->normed, h->hidden, c->n, h->lm_head, c->logits, 0)) return -1;
    pool_run(pool, choose_item, c, c->n);
    return 0;
}

static int32_t take_chain(context_t *context, const draft_head_t *h, draft_context_t *contexts, int64_t n,
                          int64_t n_drafts, chain_t *c) {
    int64_t threads = pool_threads(context_pool(context)), mixed = h->n_heads * h->head_dim;
    int64_t wide = mixed > h->hidden ? mixed : h->hidden;
    *c = (chain_t){.n = n, .head = h};
    for (int64_t i = 0; i < n; i++)
        c->longest = contexts[i].n_rows + n_drafts > c->longest ? contexts[i].n_rows + n_drafts : c->longest;
    char *cursor = context_lasting(
        context, ROOM(draft_context_t *, n) + ROOM(float, n) + 2 * ROOM(float, n * h->hidden) +
                     ROOM(float, 2 * n * h->hidden) + ROOM(float, n * qkv_width(h)) + ROOM(float, n * wide) +
                     ROOM(float, n * h->lm_head->rows) + ROOM(float, n * h->head_dim) + ROOM(float, threads * c->longest));
    if (!cursor) return -1;
    c->running = TAKE(cursor, draft_context_t *, n);
    c->confidence = TAKE(cursor, float, n);
    c->x = TAKE(cursor, float, n * h->hidden);
    c->normed = TAKE(cursor, float, n * h->hidden);
    c->inputs = TAKE(cursor, float, 2 * n * h->hidden);
    c->qkv = TAKE(cursor, float, n * qkv_width(h));
    c->mixed = TAKE(cursor, float, n * wide);
    c->logits = TAKE(cursor, float, n * h->lm_head->rows);
    c->cos_sin = TAKE(cursor, float, n * h->head_dim);
    c->scores = TAKE(cursor, float, threads * c->longest);
    for (int64_t i = 0; i < n; i++) {
        c->running[i] = contexts + i, c->confidence[i] = 1, contexts[i].n_tokens = 0;
        memcpy(c->x + i * h->hidden, contexts[i].residual, sizeof(float) * (size_t)h->hidden);
    }
    return 0;
}

/* Drafts for each of n contexts, up to the one at which the product of probabilities falls below `least`. */
int32_t ss_draft_chain(context_t *context, const draft_head_t *head, draft_context_t *contexts, int64_t n,
                       int64_t n_drafts, float least) {
    chain_t c;
    if (take_chain(context, head, contexts, n, n_drafts, &c)) return -1;
    for (; c.behind < n_drafts; c.behind++) {
        if (draft_once(context, &c)) return -1;
        leave_unsure(&c, least);
        if (!c.n || c.behind + 1 == n_drafts) break;
        if (project(context, &c)) return -1;
    }
    return 0;
}
