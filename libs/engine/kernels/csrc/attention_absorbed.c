/* The absorbed form: kv_b is folded into query and output, and all heads attend to the latents themselves.
 *
 * Vectors hold 16 query lanes (row, head), so the softmax needs no sum across lanes and cache rows are read in
 * place. A context is split at multiples of SPLIT_TOKENS, whatever the load. So several threads can compute one
 * long sequence, and a row's result has the same bits in every batch. */
#include "attention.h"

#define SPLIT_TOKENS 512
#define BLOCK_TOKENS 64
#define GROUP_LANES 64 /* query lanes of a work item */
#define SCORE_ROWS (HAS_AMX ? 32 : 2 * TILE_ROWS) /* tokens of a product, whole blocks of tiles */

/* One work item: some query lanes of a sequence against one split of its context. */
typedef struct {
    int64_t sequence, first_lane, n_lanes, split;
    float *mixed;      /* [n_lanes][lora_pad], unnormalised */
    float *best, *sum; /* [n_lanes rounded up to 16]: running maximum and denominator */
} item_t;

typedef struct {
    float *query;  /* [GROUP_LANES / 16][width][16], scaled */
    float *latent; /* [BLOCK_TOKENS][latent_stride]: widened cache rows, or [BLOCK_TOKENS / 2][lora_pad] pairs of rows */
    float *score;  /* [BLOCK_TOKENS][16] */
} workspace_t;

typedef struct {
    const attention_t *a;
    const float *folded; /* [rows][heads][lora]: queries times uk, by batch row */
    int64_t row0;        /* batch row of folded[0] */
    int64_t lora_pad, latent_stride;
    int in_place, is_pairs; /* is_pairs: queries and latents hold pairs, scores and mixed latents pairs of tokens */
} task_t;

static int64_t rows_of(const attention_t *a, int64_t s) { return a->query_start[s + 1] - a->query_start[s]; }

static void pack_queries(const task_t *t, const item_t *item, float *query) {
    const attention_t *a = t->a;
    int64_t width = width_of(a), n = width / per_element(t->is_pairs), head_dim = a->nope + a->rope;
    float scaled[width], scale = score_scale(a);
    memset(query, 0, sizeof(float) * (size_t)(round_up(item->n_lanes, LANES) * n));
    for (int64_t i = 0; i < item->n_lanes; i++) {
        int64_t lane = item->first_lane + i, head = lane % a->n_heads;
        int64_t row = a->query_start[item->sequence] + lane / a->n_heads;
        const float *folded = t->folded + ((row - t->row0) * a->n_heads + head) * a->lora;
        const float *rope = a->q + row * a->q_stride + head * head_dim + a->nope;
        float *out = query + i / LANES * n * LANES + i % LANES;
        for (int64_t j = 0; j < a->lora; j++) scaled[j] = folded[j] * scale;
        for (int64_t j = 0; j < a->rope; j++) scaled[a->lora + j] = rope[j] * scale;
        if (t->is_pairs) narrow_row(scaled, width, scaled);
        for (int64_t j = 0; j < n; j++) out[j * LANES] = scaled[j];
    }
}

/* Joins the latents of tokens 2i and 2i + 1 to pairs [lora_pad]; zeros beside an odd last one. */
static void join_tokens(const task_t *t, const uint16_t *rows, int64_t n_tokens, float *pairs) {
    int64_t width = width_of(t->a), lora = t->a->lora, pad = t->lora_pad - lora;
    uint16_t none[t->lora_pad];
    memset(none, 0, sizeof none);
    for (int64_t i = 0; i < n_tokens; i += 2, rows += 2 * width, pairs += t->lora_pad) {
        join_bf16(rows, i + 1 < n_tokens ? rows + width : none, lora, pairs);
        memset(pairs + lora, 0, sizeof(float) * (size_t)pad);
    }
}

/* Starts to load n cache rows of one page, while the caller computes with others. */
static void prefetch_rows(const char *rows, int64_t n, int64_t row_bytes) {
    for (int64_t at = 0; at < n * row_bytes; at += 64) __builtin_prefetch(rows + at);
}

/* Joins the probabilities of tokens 2i and 2i + 1 of 16 lanes, in place. */
static void join_scores(float *score, int64_t n_tokens) {
    for (int64_t i = 0; i < n_tokens; i += 2)
        UNROLL for (int v = 0; v < NV; v++) {
            vf even = load(score + i * LANES + v * VL);
            vf odd = i + 1 < n_tokens ? load(score + (i + 1) * LANES + v * VL) : splat(0);
            store_words(score + i / 2 * LANES + v * VL, join_pairs(even, odd));
        }
}

/* Widens n cache rows of one page into `latent`. */
static void widen_rows(const task_t *t, const char *rows, int64_t n, float *latent) {
    int64_t width = width_of(t->a);
    for (int64_t i = 0; i < n; i++) {
        float *out = latent + i * t->latent_stride;
        if (t->a->is_bf16) {
            const uint16_t *row = (const uint16_t *)rows + i * width;
            for (int64_t j = 0; j < width; j++) out[j] = widen_bf16(row[j]);
        } else {
            memcpy(out, (const float *)rows + i * width, sizeof(float) * (size_t)width);
        }
    }
}

/* Turns the scores of one block into probabilities for 16 lanes, and rescales the lanes' mixed values. */
static void softmax_block(const task_t *t, const item_t *item, int64_t lane0, int64_t token0, int64_t n_tokens,
                          float *score) {
    const attention_t *a = t->a;
    int64_t n_lanes = smaller(LANES, item->n_lanes - lane0);
    for (int64_t i = 0; i < n_lanes; i++) {
        int64_t row = a->query_start[item->sequence] + (item->first_lane + lane0 + i) / a->n_heads;
        int64_t visible = a->visible[row] - token0;
        for (int64_t token = visible < 0 ? 0 : visible; token < n_tokens; token++)
            score[token * LANES + i] = -INFINITY;
    }
    float shrink[LANES];
    UNROLL for (int v = 0; v < NV; v++) {
        float *column = score + v * VL, *best_at = item->best + lane0 + v * VL;
        vf old = load(best_at), best = old, sum = splat(0);
        for (int64_t i = 0; i < n_tokens; i++) best = vmax(load(column + i * LANES), best);
        vf base = vmax(best, splat(-1e30f)); /* so that a lane without visible tokens has weight 0 and not NaN */
        for (int64_t i = 0; i < n_tokens; i++) {
            vf p = vexp2(load(column + i * LANES) - base);
            store(column + i * LANES, p);
            sum += p;
        }
        vf factor = vexp2(old - base);
        store(shrink + v * VL, factor);
        store(best_at, best);
        float *sum_at = item->sum + lane0 + v * VL;
        store(sum_at, load(sum_at) * factor + sum);
    }
    for (int64_t i = 0; i < n_lanes; i++) {
        float *mixed = item->mixed + (lane0 + i) * t->lora_pad;
        if (shrink[i] != 1.0f)
            for (int64_t j = 0; j < t->lora_pad; j++) mixed[j] *= shrink[i];
    }
}

/* Scores of 16 lanes. Meanwhile the rows of the next block, if any, come into the cache. */
static void score_block(const task_t *t, const float *const *tokens, int64_t n_tokens, const float *query,
                        float *score, const char *next) {
    int64_t width = width_of(t->a), row_bytes = width * (t->a->is_bf16 ? 2 : 4);
    for (int64_t token = 0, n; token < n_tokens; token += n) {
        n = smaller(SCORE_ROWS, n_tokens - token);
        if (next) prefetch_rows(next + token * row_bytes, n, row_bytes);
        run_tiles((tiles_t){.is_pairs = t->is_pairs, .a = tokens + token, .n_rows = n, .step = 1, .b = query,
                            .b_stride = LANES, .c = score + token * LANES, .c_stride = LANES,
                            .n = width / per_element(t->is_pairs), .n_panels = 1});
    }
}

/* Attends to n_tokens cache rows of one page; `next`, if any, has as many rows that follow. */
static void attend_block(const task_t *t, const item_t *item, const workspace_t *w, int64_t token0,
                         int64_t n_tokens, const char *next) {
    const attention_t *a = t->a;
    int64_t unit = per_element(t->is_pairs), width = width_of(a) / unit, stride = t->latent_stride;
    const char *row = cache_row(a, item->sequence, token0);
    const float *latent = (const float *)row, *mixable = latent; /* for scores, and for mixed values */
    if (t->is_pairs) {
        join_tokens(t, (const uint16_t *)row, n_tokens, w->latent);
        mixable = w->latent;
    } else if (!t->in_place) {
        widen_rows(t, row, n_tokens, w->latent);
        latent = mixable = w->latent;
    }
    const float *tokens[BLOCK_TOKENS], *lanes[LANES];
    for (int64_t i = 0; i < n_tokens; i++) tokens[i] = latent + i * stride;
    for (int64_t i = 0; i < LANES; i++) lanes[i] = w->score + i;
    for (int64_t lane0 = 0; lane0 < item->n_lanes; lane0 += LANES) {
        score_block(t, tokens, n_tokens, w->query + lane0 * width, w->score, lane0 ? NULL : next);
        softmax_block(t, item, lane0, token0, n_tokens, w->score);
        if (t->is_pairs) join_scores(w->score, n_tokens);
        run_tiles((tiles_t){.is_pairs = t->is_pairs, .accumulate = 1, .a = lanes,
                            .n_rows = smaller(LANES, item->n_lanes - lane0), .step = LANES, .b = mixable,
                            .b_stride = t->is_pairs ? t->lora_pad : stride, .b_panel = LANES,
                            .c = item->mixed + lane0 * t->lora_pad, .c_stride = t->lora_pad, .c_panel = LANES,
                            .n = (n_tokens + unit - 1) / unit, .n_panels = t->lora_pad / LANES});
    }
}

/* Tokens from `token` on that are in one page and in one block, before `end`. */
static int64_t block_at(const attention_t *a, int64_t token, int64_t end) {
    int64_t in_page = a->block_tokens - token % a->block_tokens;
    return smaller(smaller(in_page, BLOCK_TOKENS), end - token);
}

static void run_item(const task_t *t, const item_t *item, const workspace_t *w) {
    const attention_t *a = t->a;
    int64_t padded = round_up(item->n_lanes, LANES);
    int64_t end = smaller((item->split + 1) * SPLIT_TOKENS, a->context_len[item->sequence]);
    memset(item->mixed, 0, sizeof(float) * (size_t)(item->n_lanes * t->lora_pad));
    memset(item->sum, 0, sizeof(float) * (size_t)padded);
    for (int64_t i = 0; i < padded; i++) item->best[i] = -INFINITY;
    pack_queries(t, item, w->query);
    for (int64_t token = item->split * SPLIT_TOKENS, n; token < end; token += n) {
        n = block_at(a, token, end);
        int has_next = token + n < end && block_at(a, token + n, end) >= n;
        attend_block(t, item, w, token, n, has_next ? cache_row(a, item->sequence, token + n) : NULL);
    }
}

/* Joins the splits of one query lane into out [lora]. `items` are the lane's group, one per split. Returns the
 * lane's maximum, and its sum in `total`; without visible tokens that is 0, as is `out`. */
static float join_splits(const task_t *t, const item_t *items, int64_t n_splits, int64_t lane, float *out,
                         float *total) {
    float best = -INFINITY, sum = 0;
    for (int64_t s = 0; s < n_splits; s++) best = items[s].best[lane] > best ? items[s].best[lane] : best;
    for (int64_t j = 0; j < t->a->lora; j++) out[j] = 0;
    float base = best > -1e30f ? best : -1e30f;
    for (int64_t s = 0; s < n_splits; s++) {
        float factor = exp2f(items[s].best[lane] - base);
        const float *mixed = items[s].mixed + lane * t->lora_pad;
        sum += items[s].sum[lane] * factor;
        for (int64_t j = 0; j < t->a->lora; j++) out[j] += mixed[j] * factor;
    }
    int64_t first = t->a->query_start[items->sequence] * t->a->n_heads + items->first_lane;
    float divisor = divisor_of(t->a, first + lane, sum);
    for (int64_t j = 0; j < t->a->lora; j++) out[j] /= divisor;
    *total = sum;
    return best;
}

static int64_t splits_of(const attention_t *a, int64_t s) {
    return (a->context_len[s] + SPLIT_TOKENS - 1) / SPLIT_TOKENS;
}

/* Makes work items in the order (sequence, lane group, split), so that the splits of a group are adjacent. */
static int64_t list_items(const task_t *t, item_t *items, float *partial) {
    const attention_t *a = t->a;
    int64_t n = 0;
    for (int64_t i = 0; i < a->n_sequences; i++) {
        int64_t s = a->sequences[i], n_lanes = rows_of(a, s) * a->n_heads;
        for (int64_t lane = 0; lane < n_lanes; lane += GROUP_LANES)
            for (int64_t split = 0; split < splits_of(a, s); split++) {
                int64_t lanes = smaller(GROUP_LANES, n_lanes - lane), padded = round_up(lanes, LANES);
                float *mixed = partial, *best = mixed + padded * t->lora_pad, *sum = best + padded;
                partial = sum + padded;
                items[n++] = (item_t){s, lane, lanes, split, mixed, best, sum};
            }
    }
    return n;
}

static int64_t count_items(const attention_t *a) {
    int64_t n = 0;
    for (int64_t i = 0; i < a->n_sequences; i++) {
        int64_t s = a->sequences[i], n_lanes = rows_of(a, s) * a->n_heads;
        n += (n_lanes + GROUP_LANES - 1) / GROUP_LANES * splits_of(a, s);
    }
    return n;
}

/* The input of the products by head: of consecutive heads x_step apart, of batch row r at x + (r - row0) * x_stride. */
typedef struct {
    const float *x;
    int64_t x_stride, x_step, row0;
    int is_pairs;
} heads_t;

/* `heads` of n_rows rows, narrowed into `words` if `w` takes pairs. */
static heads_t narrow_heads(const attention_t *a, const matrix_t *w, heads_t heads, int64_t row0, int64_t n_rows,
                            float *words, pool_t *pool) {
    int64_t n = pairs_of(w->cols);
    if (!takes_pairs(w)) return heads;
    for (int64_t head = 0; head < a->n_heads; head++)
        narrow_rows(heads.x + (row0 - heads.row0) * heads.x_stride + head * heads.x_step, heads.x_stride, n_rows,
                    w->cols, words + head * n, a->n_heads * n, pool);
    return (heads_t){words, a->n_heads * n, n, row0, 1};
}

/* Makes the products of `w` by head for every run of consecutive sequences; returns their number. */
static int64_t head_products(const attention_t *a, const matrix_t *w, const heads_t *heads, float *out,
                             int64_t out_row0, product_t *products) {
    int64_t out_width = w->rows;
    int64_t n = 0;
    for (int64_t i = 0, next; i < a->n_sequences; i = next) {
        for (next = i + 1; next < a->n_sequences && a->sequences[next] == a->sequences[next - 1] + 1;) next++;
        int64_t row = a->query_start[a->sequences[i]], end = a->query_start[a->sequences[next - 1] + 1];
        for (int64_t head = 0; head < a->n_heads; head++)
            products[n++] = (product_t){.x = heads->x + (row - heads->row0) * heads->x_stride + head * heads->x_step,
                                        .x_stride = heads->x_stride,
                                        .is_pairs = heads->is_pairs,
                                        .n_rows = end - row,
                                        .w = w + head,
                                        .out = out + ((row - out_row0) * a->n_heads + head) * out_width,
                                        .out_stride = a->n_heads * out_width};
    }
    return n;
}

static int64_t work_of(const attention_t *a) {
    int64_t pairs = 0;
    for (int64_t i = 0; i < a->n_sequences; i++) pairs += rows_of(a, a->sequences[i]) * a->context_len[a->sequences[i]];
    return pairs * a->n_heads * (2 * a->lora + a->rope);
}

/* Replaces the folded queries by the mixed latents of all lanes. */
static void join_items(const task_t *t, const item_t *items, int64_t n_items, float *folded) {
    const attention_t *a = t->a;
    for (int64_t i = 0; i < n_items; i += splits_of(a, items[i].sequence)) {
        int64_t first = a->query_start[items[i].sequence] * a->n_heads + items[i].first_lane;
        for (int64_t lane = 0; lane < items[i].n_lanes; lane++) {
            float *out = folded + (first - t->row0 * a->n_heads + lane) * a->lora, sum;
            float best = join_splits(t, items + i, splits_of(a, items[i].sequence), lane, out, &sum);
            keep_log_sum(a, first + lane, best, sum);
        }
    }
    for (int64_t i = 0; i < a->n_sequences; i++) { /* those without a split */
        int64_t s = a->sequences[i], lane = a->query_start[s] * a->n_heads, n = rows_of(a, s) * a->n_heads;
        if (a->context_len[s]) continue;
        memset(folded + (lane - t->row0 * a->n_heads) * a->lora, 0, sizeof(float) * (size_t)(n * a->lora));
        for (int64_t j = 0; j < n; j++) keep_log_sum(a, lane + j, -INFINITY, 0);
    }
}

typedef struct {
    const task_t *task;
    const item_t *items;
    char *scratch;
    size_t room; /* of one thread */
    int64_t latent_room;
    const int32_t *stop;
} share_t;

static void share_item(void *arguments, int64_t i, int thread) {
    const share_t *share = arguments;
    if (is_set(share->stop)) return;
    char *cursor = share->scratch + (size_t)thread * share->room;
    workspace_t w;
    w.query = TAKE(cursor, float, GROUP_LANES * width_of(share->task->a));
    w.latent = TAKE(cursor, float, share->latent_room);
    w.score = TAKE(cursor, float, BLOCK_TOKENS * LANES);
    run_item(share->task, share->items + i, &w);
}

int32_t ss_attend_absorbed(context_t *context, const attention_t *a) {
    pool_t *pool = context_pool(context);
    int64_t n_items = count_items(a), lora_pad = round_up(a->lora, LANES), width = width_of(a);
    int64_t row0 = a->query_start[a->sequences[0]];
    int64_t n_rows = a->query_start[a->sequences[a->n_sequences - 1] + 1] - row0;
    int in_place = !a->is_bf16 && lora_pad == a->lora, is_pairs = attends_pairs(a);
    int64_t latent_stride = is_pairs ? width / 2 : in_place ? width : round_up(width, LANES) + LANES;
    task_t t = {a, NULL, row0, lora_pad, latent_stride, in_place, is_pairs};
    int64_t latent_room = BLOCK_TOKENS * (round_up(width, LANES) + LANES) + LANES;
    size_t thread_room = ROOM(float, GROUP_LANES * width) + ROOM(float, latent_room) +
                         ROOM(float, BLOCK_TOKENS * LANES);
    int64_t n_products = a->n_heads * a->n_sequences, folded_size = n_rows * a->n_heads * a->lora;
    int64_t words_size = n_rows * a->n_heads * pairs_of(a->lora > a->nope ? a->lora : a->nope);
    char *cursor = context_scratch(context, ROOM(item_t, n_items) + ROOM(float, n_items * GROUP_LANES * (lora_pad + 2)) +
                                                ROOM(float, folded_size) + ROOM(product_t, n_products) +
                                                ROOM(float, words_size) +
                                                products_room(n_products) + (size_t)pool_threads(pool) * thread_room);
    if (!cursor) return -1;
    item_t *items = TAKE(cursor, item_t, n_items);
    float *partial = TAKE(cursor, float, n_items * GROUP_LANES * (lora_pad + 2));
    float *folded = TAKE(cursor, float, folded_size);
    float *words = TAKE(cursor, float, words_size);
    product_t *products = TAKE(cursor, product_t, n_products);
    char *products_scratch = take_bytes(&cursor, products_room(n_products));
    t.folded = folded;

    heads_t heads = {a->q, a->q_stride, a->nope + a->rope, 0, 0};
    heads = narrow_heads(a, a->uk, heads, row0, n_rows, words, pool);
    n_products = head_products(a, a->uk, &heads, folded, row0, products);
    run_products(products, n_products, products_scratch, pool);
    list_items(&t, items, partial);
    share_t share = {&t, items, cursor, thread_room, latent_room, context_stop(context)};
    pool_run(work_of(a) > SERIAL_WORK ? pool : NULL, share_item, &share, n_items);
    if (is_set(share.stop)) return 0; /* skipped items have no scores to join */
    join_items(&t, items, n_items, folded);
    heads = (heads_t){folded, a->n_heads * a->lora, a->lora, row0, 0};
    heads = narrow_heads(a, a->uv, heads, row0, n_rows, words, pool);
    n_products = head_products(a, a->uv, &heads, a->out, 0, products);
    run_products(products, n_products, products_scratch, pool);
    return 0;
}
