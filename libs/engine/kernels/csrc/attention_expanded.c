/* The expanded form: computes keys and values of each head from the latents, then flash attention.
 *
 * The context is processed in chunks of CHUNK_TOKENS, so that a head's keys and values stay in the cache of the
 * core that computed them. Maxima, denominators and mixed values of all rows carry over between chunks. */
#include "attention.h"

#define CHUNK_TOKENS 2048
#define KEY_BLOCK 64
#define QUERY_BLOCK (HAS_AMX ? 64 : 48) /* whole blocks of the kernels' tiles */

typedef struct {
    const attention_t *a;
    int64_t sequence, n_rows;           /* of the query rows */
    int64_t token0, n_tokens, n_padded; /* this chunk; padded to whole key blocks */
    int64_t v_pad, row_pad; /* n_rows in whole query blocks */
    int is_first, is_last, is_pairs;
    float *latent;     /* [n_padded / 16][width][16]: the chunk's cache rows, tokens along the vector */
    float *mixed;      /* [heads][rows][v_pad], carried over */
    float *best, *sum; /* [heads][row_pad]: maximum and denominator, carried over */
    const int32_t *stop;
} chunk_t;

/* With is_pairs the values of a key, a query, a latent are in pairs, and those of two tokens in values and scores. */
typedef struct {
    float *uk;     /* [nope][lora] of one head */
    float *uv;     /* [v_pad / 16][lora][16]; unused with is_pairs */
    float *keys;   /* [n_padded / 16][nope + rope][16] */
    float *values; /* [n_padded][v_pad] */
    float *query;  /* [QUERY_BLOCK][nope + rope], scaled */
    float *score;  /* [QUERY_BLOCK][KEY_BLOCK] */
    float *mixed;  /* [QUERY_BLOCK][v_pad] */
} workspace_t;

static size_t workspace_room(const attention_t *a, int64_t v_pad) {
    return ROOM(float, a->nope * round_up(a->lora, LANES)) + ROOM(float, v_pad * a->lora) +
           ROOM(float, CHUNK_TOKENS * (a->nope + a->rope)) + ROOM(float, CHUNK_TOKENS * v_pad) +
           ROOM(float, QUERY_BLOCK * (a->nope + a->rope)) + ROOM(float, QUERY_BLOCK * KEY_BLOCK) +
           ROOM(float, QUERY_BLOCK * v_pad);
}

static workspace_t take_workspace(const attention_t *a, int64_t v_pad, char *cursor) {
    workspace_t w;
    w.uk = TAKE(cursor, float, a->nope * round_up(a->lora, LANES));
    w.uv = TAKE(cursor, float, v_pad * a->lora);
    w.keys = TAKE(cursor, float, CHUNK_TOKENS * (a->nope + a->rope));
    w.values = TAKE(cursor, float, CHUNK_TOKENS * v_pad);
    w.query = TAKE(cursor, float, QUERY_BLOCK * (a->nope + a->rope));
    w.score = TAKE(cursor, float, QUERY_BLOCK * KEY_BLOCK);
    w.mixed = TAKE(cursor, float, QUERY_BLOCK * v_pad);
    return w;
}

/* Transposes 16 cache rows, so that vectors hold tokens; zeros beyond the chunk. */
static void turn_latents(const chunk_t *c, int64_t panel) {
    const attention_t *a = c->a;
    int64_t width = width_of(a), n = width / per_element(c->is_pairs);
    float *out = c->latent + panel * n * LANES, widened[width];
    for (int64_t lane = 0; lane < LANES; lane++) {
        int64_t token = panel * LANES + lane;
        if (token >= c->n_tokens) {
            for (int64_t j = 0; j < n; j++) out[j * LANES + lane] = 0;
            continue;
        }
        const char *row = cache_row(a, c->sequence, c->token0 + token);
        if (a->is_bf16 && !c->is_pairs)
            for (int64_t j = 0; j < width; j++) widened[j] = widen_bf16(((const uint16_t *)row)[j]);
        else
            memcpy(widened, row, sizeof(float) * (size_t)n);
        for (int64_t j = 0; j < n; j++) out[j * LANES + lane] = widened[j];
    }
}

/* uk of one head with the latent's values along rows. */
static void turn_uk(const chunk_t *c, const matrix_t *uk, const workspace_t *w) {
    int64_t nope = c->a->nope, unit = per_element(c->is_pairs), stride = round_up(c->a->lora, LANES) / unit;
    for (int64_t panel = 0; panel < n_panels(uk); panel++) {
        const float *lanes = matrix_panel(uk, panel, 0, nope, w->keys);
        for (int64_t d = 0; d < nope; d++) {
            float *out = w->uk + d * stride + panel * LANES / unit;
            if (c->is_pairs) narrow_row(lanes + d * LANES, LANES, out);
            else memcpy(out, lanes + d * LANES, sizeof(float) * LANES);
        }
    }
}

/* Joins rows 2i and 2i + 1 of values [n_rows][stride] to pairs: n_lanes of them. */
static void join_rows(const float *values, int64_t n_rows, int64_t stride, int64_t n_lanes, float *out,
                      int64_t out_stride) {
    for (int64_t row = 0; row < n_rows; row += 2)
        for (int64_t j = 0; j < n_lanes; j += VL) {
            const float *even = values + row * stride + j;
            store_words(out + row / 2 * out_stride + j, join_pairs(load(even), load(even + stride)));
        }
}

/* Computes the keys of one head for two panels of tokens. */
static void expand_keys(const chunk_t *c, int64_t panel, const workspace_t *w) {
    const attention_t *a = c->a;
    int64_t unit = per_element(c->is_pairs), width = width_of(a) / unit, head_dim = (a->nope + a->rope) / unit;
    int64_t stride = round_up(a->lora, LANES) / unit;
    const float *latent = c->latent + panel * width * LANES, *rows[QUERY_BLOCK];
    float *keys = w->keys + panel * head_dim * LANES;
    for (int64_t d = 0; d < a->nope; d += QUERY_BLOCK) {
        int64_t n_rows = smaller(QUERY_BLOCK, a->nope - d);
        for (int64_t i = 0; i < n_rows; i++) rows[i] = w->uk + (d + i) * stride;
        tiles_t t = {.is_pairs = c->is_pairs, .a = rows, .n_rows = n_rows, .step = 1, .b = latent, .b_stride = LANES,
                     .b_panel = width * LANES, .c = keys + d * LANES, .c_stride = LANES,
                     .c_panel = head_dim * LANES, .n = a->lora / unit, .n_panels = 2};
        if (c->is_pairs) t.c = w->score, t.c_stride = 2 * LANES, t.c_panel = LANES;
        run_tiles(t);
        for (int64_t p = 0; c->is_pairs && p < 2; p++)
            join_rows(w->score + p * LANES, n_rows, 2 * LANES, LANES, keys + (p * head_dim + d / 2) * LANES, LANES);
    }
    /* The rotated part, equal for all heads, is stored after the other, so the scores are one product. */
    for (int64_t p = 0; p < 2; p++)
        memcpy(keys + (p * head_dim + a->nope / unit) * LANES, latent + (p * width + a->lora / unit) * LANES,
               sizeof(float) * (size_t)(a->rope / unit * LANES));
}

/* The pairs of a token of the chunk; beyond the chunk, where probabilities are 0, those of its last token. */
static const float *pairs_of_token(const chunk_t *c, int64_t token) {
    return (const float *)cache_row(c->a, c->sequence, c->token0 + smaller(token, c->n_tokens - 1));
}

/* Computes the values of one head for one panel of tokens; uv is in panels of n_lora elements. */
static void expand_values(const chunk_t *c, int64_t panel, const float *uv, const workspace_t *w) {
    const attention_t *a = c->a;
    int64_t unit = per_element(c->is_pairs), n_lora = a->lora / unit;
    const float *latent = c->latent + panel * (width_of(a) / unit) * LANES, *tokens[LANES];
    float *values = w->values + panel * LANES / unit * c->v_pad;
    for (int64_t i = 0; i < LANES; i++) tokens[i] = c->is_pairs ? pairs_of_token(c, panel * LANES + i) : latent + i;
    run_tiles((tiles_t){.is_pairs = c->is_pairs, .a = tokens, .n_rows = LANES, .step = c->is_pairs ? 1 : LANES, .b = uv,
                        .b_stride = LANES, .b_panel = n_lora * LANES, .c = c->is_pairs ? w->mixed : values,
                        .c_stride = c->v_pad, .c_panel = LANES, .n = n_lora, .n_panels = c->v_pad / LANES});
    if (c->is_pairs) join_rows(w->mixed, LANES, c->v_pad, c->v_pad, values, c->v_pad);
}

/* Computes keys and values of one head for the whole chunk. */
static void expand_head(const chunk_t *c, int64_t head, const workspace_t *w) {
    const matrix_t *uk = c->a->uk + head, *uv = c->a->uv + head;
    const float *uv_panels = c->is_pairs ? uv->data : w->uv;
    turn_uk(c, uk, w);
    for (int64_t panel = 0; !c->is_pairs && panel < n_panels(uv); panel++) {
        float *out = w->uv + panel * uv->cols * LANES;
        const float *lanes = matrix_panel(uv, panel, 0, uv->cols, out);
        if (lanes != out) memcpy(out, lanes, sizeof(float) * (size_t)(uv->cols * LANES));
    }
    for (int64_t panel = 0; panel < c->n_padded / LANES; panel++) {
        if (panel % 2 == 0) expand_keys(c, panel, w);
        expand_values(c, panel, uv_panels, w);
    }
}

/* The maximum of each of VL rows of scores, and of `old`. */
INLINE vf max_of_rows(const float *score, vf old) {
    vu best[VL];
    UNROLL for (int r = 0; r < VL; r++) {
        vf lanes = load(score + r * KEY_BLOCK);
        UNROLL for (int i = VL; i < KEY_BLOCK; i += VL) lanes = vmax(load(score + r * KEY_BLOCK + i), lanes);
        best[r] = (vu)lanes;
    }
    transpose(best);
    UNROLL for (int i = 0; i < VL; i++) old = vmax((vf)best[i], old);
    return old;
}

/* Turns VL rows of scores into probabilities, in pairs if is_pairs; returns their sums. */
INLINE vf exponentials_of_rows(float *score, const float *base, const int is_pairs) {
    vu sums[VL];
    for (int r = 0; r < VL; r++) {
        float *row = score + r * KEY_BLOCK;
        vf p[KEY_BLOCK / VL], sum = splat(0);
        UNROLL for (int i = 0; i < KEY_BLOCK / VL; i++) {
            p[i] = vexp2(load(row + i * VL) - base[r]);
            sum += p[i];
        }
        UNROLL for (int i = 0; i < KEY_BLOCK / VL; i++) {
            if (!is_pairs) store(row + i * VL, p[i]);
            else if (i % 2) store_words(row + i / 2 * VL, narrow_values(p[i - 1], p[i]));
        }
        sums[r] = (vu)sum;
    }
    transpose(sums);
    vf total = (vf)sums[0];
    UNROLL for (int i = 1; i < VL; i++) total += (vf)sums[i];
    return total;
}

/* Turns the scores of VL rows and a key block into probabilities; `factor` gets what their mixed values are to be
 * multiplied by. Together, because sums and maxima across the lanes of one row wait for each other. */
INLINE void softmax_rows(float *score, float *best_at, float *sum_at, float *factor, const int is_pairs) {
    float bases[VL];
    vf old = load(best_at), best = max_of_rows(score, old);
    vf base = vmax(best, splat(-1e30f)); /* so that a row without visible tokens has weight 0 and not NaN */
    store(bases, base);
    vf total = exponentials_of_rows(score, bases, is_pairs), shrink = vexp2(old - base);
    store(factor, shrink);
    store(best_at, best);
    store(sum_at, load(sum_at) * shrink + total);
}

/* Some rows of queries of one head. */
typedef struct {
    int64_t row0, n_rows;
    const float *queries[QUERY_BLOCK], *scores[QUERY_BLOCK]; /* by row */
    float *best, *sum;                                       /* [QUERY_BLOCK] */
} query_block_t;

/* Turns the scores of a key block into probabilities, and rescales the rows' mixed values. */
static void softmax_block(const chunk_t *c, const workspace_t *w, const query_block_t *q, int64_t token0) {
    const int32_t *visible = c->a->visible + c->a->query_start[c->sequence] + q->row0;
    float factor[QUERY_BLOCK];
    for (int64_t r = 0; r < q->n_rows; r++)
        for (int64_t i = visible[r] < token0 ? 0 : visible[r] - token0; i < KEY_BLOCK; i++)
            w->score[r * KEY_BLOCK + i] = -INFINITY;
    for (int64_t r = 0; r < q->n_rows; r += VL) {
        float *score = w->score + r * KEY_BLOCK;
        if (c->is_pairs) softmax_rows(score, q->best + r, q->sum + r, factor + r, 1);
        else softmax_rows(score, q->best + r, q->sum + r, factor + r, 0);
    }
    for (int64_t r = 0; r < q->n_rows; r++) {
        float *mixed = w->mixed + r * c->v_pad;
        if (factor[r] != 1.0f)
            for (int64_t j = 0; j < c->v_pad; j++) mixed[j] *= factor[r];
    }
}

static void attend_key_block(const chunk_t *c, const workspace_t *w, const query_block_t *q, int64_t block) {
    const attention_t *a = c->a;
    int64_t unit = per_element(c->is_pairs), head_dim = (a->nope + a->rope) / unit;
    run_tiles((tiles_t){.is_pairs = c->is_pairs, .a = q->queries, .n_rows = q->n_rows, .step = 1,
                        .b = w->keys + block * KEY_BLOCK * head_dim, .b_stride = LANES, .b_panel = head_dim * LANES,
                        .c = w->score, .c_stride = KEY_BLOCK, .c_panel = LANES, .n = head_dim,
                        .n_panels = KEY_BLOCK / LANES});
    softmax_block(c, w, q, c->token0 + block * KEY_BLOCK);
    run_tiles((tiles_t){.is_pairs = c->is_pairs, .accumulate = 1, .a = q->scores, .n_rows = q->n_rows, .step = 1,
                        .b = w->values + block * KEY_BLOCK / unit * c->v_pad, .b_stride = c->v_pad, .b_panel = LANES,
                        .c = w->mixed, .c_stride = c->v_pad, .c_panel = LANES, .n = KEY_BLOCK / unit,
                        .n_panels = c->v_pad / LANES});
}

/* Scales the queries of the rows, which the workspace gets. */
static void place_queries(const chunk_t *c, int64_t head, const workspace_t *w, query_block_t *q) {
    const attention_t *a = c->a;
    int64_t head_dim = a->nope + a->rope, stride = head_dim / per_element(c->is_pairs);
    const float *from = a->q + (a->query_start[c->sequence] + q->row0) * a->q_stride + head * head_dim;
    float scaled[head_dim], scale = score_scale(a);
    for (int64_t r = 0; r < q->n_rows; r++, from += a->q_stride) {
        float *query = w->query + r * stride;
        const float *next = from + QUERY_BLOCK * a->q_stride; /* comes into the cache meanwhile, if it exists */
        for (int64_t i = 0; i < head_dim; i += 64 / sizeof(float)) __builtin_prefetch(next + i, 0, 2);
        for (int64_t i = 0; i < head_dim; i++) scaled[i] = from[i] * scale;
        if (c->is_pairs) narrow_row(scaled, head_dim, query);
        else memcpy(query, scaled, sizeof scaled);
        q->queries[r] = query;
        q->scores[r] = w->score + r * KEY_BLOCK;
    }
}

/* Writes the rows' results: mixed values by denominators. */
static void write_rows(const chunk_t *c, int64_t head, const workspace_t *w, const query_block_t *q) {
    const attention_t *a = c->a;
    for (int64_t r = 0; r < q->n_rows; r++) {
        int64_t lane = (a->query_start[c->sequence] + q->row0 + r) * a->n_heads + head;
        float divisor = divisor_of(a, lane, q->sum[r]);
        for (int64_t j = 0; j < a->v; j++) a->out[lane * a->v + j] = w->mixed[r * c->v_pad + j] / divisor;
        keep_log_sum(a, lane, q->best[r], q->sum[r]);
    }
}

/* Attends from a block of query rows of one head to the chunk. */
static void attend_query_block(const chunk_t *c, int64_t head, int64_t row0, const workspace_t *w) {
    const attention_t *a = c->a;
    query_block_t q = {.row0 = row0, .n_rows = smaller(QUERY_BLOCK, c->n_rows - row0),
                       .best = c->best + head * c->row_pad + row0, .sum = c->sum + head * c->row_pad + row0};
    float *carried = c->mixed + (head * c->n_rows + row0) * c->v_pad;
    size_t mixed_bytes = sizeof(float) * (size_t)(q.n_rows * c->v_pad);
    place_queries(c, head, w, &q);
    if (c->is_first) {
        for (int64_t r = 0; r < QUERY_BLOCK; r++) q.best[r] = -INFINITY, q.sum[r] = 0;
        memset(w->mixed, 0, mixed_bytes);
    } else {
        memcpy(w->mixed, carried, mixed_bytes);
    }
    int64_t last = a->query_start[c->sequence] + row0 + q.n_rows - 1;
    int64_t n_visible = smaller(a->visible[last] - c->token0, c->n_tokens);
    for (int64_t block = 0; block * KEY_BLOCK < n_visible; block++) attend_key_block(c, w, &q, block);
    if (c->is_last) write_rows(c, head, w, &q);
    else memcpy(carried, w->mixed, mixed_bytes);
}

typedef struct {
    const chunk_t *chunk;
    char *scratch;
    size_t room; /* of one thread */
} share_t;

static void turn_item(void *arguments, int64_t item, int thread) {
    const chunk_t *c = ((const share_t *)arguments)->chunk;
    (void)thread;
    for (int64_t i = 0; i < KEY_BLOCK / LANES; i++) turn_latents(c, item * (KEY_BLOCK / LANES) + i);
}

static void head_item(void *arguments, int64_t head, int thread) {
    const share_t *share = arguments;
    const chunk_t *c = share->chunk;
    workspace_t w = take_workspace(c->a, c->v_pad, share->scratch + (size_t)thread * share->room);
    if (is_set(c->stop)) return;
    expand_head(c, head, &w);
    for (int64_t row = 0; row < c->n_rows && !is_set(c->stop); row += QUERY_BLOCK) attend_query_block(c, head, row, &w);
}

static void run_chunk(const chunk_t *c, char *scratch, pool_t *pool) {
    share_t share = {c, scratch, workspace_room(c->a, c->v_pad)};
    pool_run(pool, turn_item, &share, c->n_padded / KEY_BLOCK);
    pool_run(pool, head_item, &share, c->a->n_heads);
}

/* The result of rows that see nothing. */
static void clear_rows(const attention_t *a, int64_t sequence) {
    int64_t lane = a->query_start[sequence] * a->n_heads, end = a->query_start[sequence + 1] * a->n_heads;
    memset(a->out + lane * a->v, 0, sizeof(float) * (size_t)((end - lane) * a->v));
    for (; lane < end; lane++) keep_log_sum(a, lane, -INFINITY, 0);
}

int32_t ss_attend_expanded(context_t *context, const attention_t *a) {
    pool_t *pool = context_pool(context);
    int64_t v_pad = round_up(a->v, LANES), width = width_of(a);
    const int32_t *stop = context_stop(context);
    for (int64_t i = 0; i < a->n_sequences && !is_set(stop); i++) {
        int64_t s = a->sequences[i], context_len = a->context_len[s], rows = a->query_start[s + 1] - a->query_start[s];
        chunk_t c = {.a = a, .sequence = s, .n_rows = rows, .v_pad = v_pad,
                     .row_pad = round_up(rows, QUERY_BLOCK), .is_pairs = attends_pairs(a), .stop = stop};
        if (!context_len) {
            clear_rows(a, s);
            continue;
        }
        char *cursor = context_scratch(context, ROOM(float, CHUNK_TOKENS * width) +
                                                    ROOM(float, a->n_heads * rows * v_pad) +
                                                    2 * ROOM(float, a->n_heads * c.row_pad) +
                                                    (size_t)pool_threads(pool) * workspace_room(a, v_pad));
        if (!cursor) return -1;
        c.latent = TAKE(cursor, float, CHUNK_TOKENS * width);
        c.mixed = TAKE(cursor, float, a->n_heads * rows * v_pad);
        c.best = TAKE(cursor, float, a->n_heads * c.row_pad);
        c.sum = TAKE(cursor, float, a->n_heads * c.row_pad);
        for (c.token0 = 0; c.token0 < context_len && !is_set(stop); c.token0 += CHUNK_TOKENS) {
            c.n_tokens = smaller(CHUNK_TOKENS, context_len - c.token0);
            c.n_padded = round_up(c.n_tokens, KEY_BLOCK);
            c.is_first = c.token0 == 0;
            c.is_last = c.token0 + CHUNK_TOKENS >= context_len;
            run_chunk(&c, cursor, pool);
        }
    }
    return 0;
}
