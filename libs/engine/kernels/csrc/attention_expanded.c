/* The expanded form: computes keys and values of each head from the latents, then flash attention.
 *
 * The context is processed in chunks of CHUNK_TOKENS, so that a head's keys and values stay in the cache of the
 * core that computed them. Maxima, denominators and mixed values of all rows carry over between chunks. */
#include "attention.h"

#define CHUNK_TOKENS 2048
#define KEY_BLOCK 64
#define QUERY_BLOCK 48

typedef struct {
    const attention_t *a;
    int64_t sequence, n_rows, first_position; /* of the query rows */
    int64_t token0, n_tokens, n_padded;       /* this chunk; padded to whole key blocks */
    int64_t v_pad;
    int is_first, is_last;
    float *latent; /* [n_padded / 16][width][16]: the chunk's cache rows, tokens along the vector */
    float *mixed;  /* [heads][rows][v_pad], carried over */
    float *state;  /* [heads][rows][2]: maximum and denominator, carried over */
    const int32_t *stop;
} chunk_t;

typedef struct {
    float *uk;     /* [nope][lora] of one head */
    float *uv;     /* [v_pad / 16][lora][16] */
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
    int64_t width = width_of(a);
    float *out = c->latent + panel * width * LANES;
    for (int64_t lane = 0; lane < LANES; lane++) {
        int64_t token = panel * LANES + lane;
        if (token >= c->n_tokens) {
            for (int64_t j = 0; j < width; j++) out[j * LANES + lane] = 0;
            continue;
        }
        const char *row = cache_row(a, c->sequence, c->token0 + token);
        if (a->is_bf16)
            for (int64_t j = 0; j < width; j++) out[j * LANES + lane] = widen_bf16(((const uint16_t *)row)[j]);
        else
            for (int64_t j = 0; j < width; j++) out[j * LANES + lane] = ((const float *)row)[j];
    }
}

/* Computes keys and values of one head for the whole chunk. */
static void expand_head(const chunk_t *c, int64_t head, const workspace_t *w) {
    const attention_t *a = c->a;
    int64_t width = width_of(a), uk_stride = round_up(a->lora, LANES), head_dim = a->nope + a->rope;
    const matrix_t *uk = a->uk + head, *uv = a->uv + head;
    for (int64_t panel = 0; panel < n_panels(uk); panel++) {
        const float *lanes = matrix_panel(uk, panel, 0, a->nope, w->keys);
        for (int64_t d = 0; d < a->nope; d++)
            memcpy(w->uk + d * uk_stride + panel * LANES, lanes + d * LANES, sizeof(float) * LANES);
    }
    for (int64_t panel = 0; panel < n_panels(uv); panel++) {
        float *out = w->uv + panel * a->lora * LANES;
        const float *lanes = matrix_panel(uv, panel, 0, a->lora, out);
        if (lanes != out) memcpy(out, lanes, sizeof(float) * (size_t)(a->lora * LANES));
    }
    const float *uk_rows[TILE_ROWS], *tokens[LANES];
    for (int64_t panel = 0; panel < c->n_padded / LANES; panel++) {
        const float *latent = c->latent + panel * width * LANES;
        float *keys = w->keys + panel * head_dim * LANES, *values = w->values + panel * LANES * c->v_pad;
        for (int64_t d = 0; d < a->nope; d += TILE_ROWS) {
            for (int64_t i = 0; i < TILE_ROWS; i++) uk_rows[i] = w->uk + (d + i) * uk_stride;
            tile_rows(uk_rows, smaller(TILE_ROWS, a->nope - d), 0, 1, latent, LANES, keys + d * LANES, LANES,
                      a->lora, 0);
        }
        /* The rotated part, equal for all heads, is stored after the other, so the scores are one product. */
        memcpy(keys + a->nope * LANES, latent + a->lora * LANES, sizeof(float) * (size_t)(a->rope * LANES));
        for (int64_t i = 0; i < LANES; i++) tokens[i] = latent + i;
        for (int64_t j = 0; j < c->v_pad; j += LANES)
            tile_rows(tokens, LANES, 0, LANES, w->uv + j * a->lora, LANES, values + j, c->v_pad, a->lora, 0);
    }
}

/* Turns one row's scores of a key block into probabilities; returns the factor for its mixed values. */
static float softmax_row(float *score, int64_t n_visible, float *state) {
    if (n_visible < KEY_BLOCK)
        for (int64_t i = n_visible < 0 ? 0 : n_visible; i < KEY_BLOCK; i++) score[i] = -INFINITY;
    vf best_lanes = load(score), sum = splat(0);
    for (int64_t i = VL; i < KEY_BLOCK; i += VL) best_lanes = vmax(load(score + i), best_lanes);
    float old = state[0], best = max_lanes(best_lanes);
    best = best > old ? best : old;
    for (int64_t i = 0; i < KEY_BLOCK; i += VL) {
        vf p = vexp(load(score + i) - best);
        store(score + i, p);
        sum += p;
    }
    float factor = vexp(splat(old - best))[0];
    state[0] = best;
    state[1] = state[1] * factor + sum_lanes(sum);
    return factor;
}

static void attend_key_block(const chunk_t *c, const workspace_t *w, int64_t block, int64_t row0, int64_t n_rows,
                             float *state) {
    const attention_t *a = c->a;
    int64_t head_dim = a->nope + a->rope;
    const float *queries[QUERY_BLOCK], *scores[QUERY_BLOCK];
    for (int64_t r = 0; r < n_rows; r++) {
        queries[r] = w->query + r * head_dim;
        scores[r] = w->score + r * KEY_BLOCK;
    }
    for (int64_t j = 0; j < KEY_BLOCK / LANES; j++) {
        const float *keys = w->keys + (block * (KEY_BLOCK / LANES) + j) * head_dim * LANES;
        tile_rows(queries, n_rows, 0, 1, keys, LANES, w->score + j * LANES, KEY_BLOCK, head_dim, 0);
    }
    int64_t token0 = c->token0 + block * KEY_BLOCK;
    for (int64_t r = 0; r < n_rows; r++) {
        float factor = softmax_row(w->score + r * KEY_BLOCK, c->first_position + row0 + r + 1 - token0, state + 2 * r);
        float *mixed = w->mixed + r * c->v_pad;
        if (factor != 1.0f)
            for (int64_t j = 0; j < c->v_pad; j++) mixed[j] *= factor;
    }
    const float *values = w->values + block * KEY_BLOCK * c->v_pad;
    for (int64_t j = 0; j < c->v_pad; j += LANES)
        tile_rows(scores, n_rows, 0, 1, values + j, c->v_pad, w->mixed + j, c->v_pad, KEY_BLOCK, 1);
}

/* Attends from a block of query rows of one head to the chunk. */
static void attend_query_block(const chunk_t *c, int64_t head, int64_t row0, const workspace_t *w) {
    const attention_t *a = c->a;
    int64_t n_rows = smaller(QUERY_BLOCK, c->n_rows - row0), head_dim = a->nope + a->rope;
    float *carried = c->mixed + (head * c->n_rows + row0) * c->v_pad;
    float *state = c->state + (head * c->n_rows + row0) * 2;
    size_t mixed_bytes = sizeof(float) * (size_t)(n_rows * c->v_pad);
    int64_t batch_row = a->query_start[c->sequence] + row0;
    for (int64_t r = 0; r < n_rows; r++) {
        const float *q = a->q + (batch_row + r) * a->q_stride + head * head_dim;
        for (int64_t i = 0; i < head_dim; i++) w->query[r * head_dim + i] = q[i] * a->scale;
        if (c->is_first) state[2 * r] = -INFINITY, state[2 * r + 1] = 0;
    }
    if (c->is_first) memset(w->mixed, 0, mixed_bytes);
    else memcpy(w->mixed, carried, mixed_bytes);
    int64_t n_visible = smaller(c->first_position + row0 + n_rows - c->token0, c->n_tokens);
    for (int64_t block = 0; block * KEY_BLOCK < n_visible; block++)
        attend_key_block(c, w, block, row0, n_rows, state);
    if (!c->is_last) {
        memcpy(carried, w->mixed, mixed_bytes);
        return;
    }
    for (int64_t r = 0; r < n_rows; r++) {
        float *out = a->out + ((batch_row + r) * a->n_heads + head) * a->v;
        for (int64_t j = 0; j < a->v; j++) out[j] = w->mixed[r * c->v_pad + j] / state[2 * r + 1];
    }
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

int32_t ss_attend_expanded(context_t *context, const attention_t *a) {
    pool_t *pool = context_pool(context);
    int64_t v_pad = round_up(a->v, LANES), width = width_of(a);
    const int32_t *stop = context_stop(context);
    for (int64_t i = 0; i < a->n_sequences && !is_set(stop); i++) {
        int64_t s = a->sequences[i], context_len = a->context_len[s];
        chunk_t c = {.a = a, .sequence = s, .n_rows = a->query_start[s + 1] - a->query_start[s], .v_pad = v_pad,
                     .stop = stop};
        c.first_position = context_len - c.n_rows;
        char *cursor = context_scratch(context, ROOM(float, CHUNK_TOKENS * width) +
                                                    ROOM(float, a->n_heads * c.n_rows * v_pad) +
                                                    ROOM(float, a->n_heads * c.n_rows * 2) +
                                                    (size_t)pool_threads(pool) * workspace_room(a, v_pad));
        if (!cursor) return -1;
        c.latent = TAKE(cursor, float, CHUNK_TOKENS * width);
        c.mixed = TAKE(cursor, float, a->n_heads * c.n_rows * v_pad);
        c.state = TAKE(cursor, float, a->n_heads * c.n_rows * 2);
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
