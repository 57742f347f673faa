/* The feed-forward half of a layer: a dense MLP, or routed and shared experts. */
#include "ops.h"

#define ROWS_PER_ITEM 16

/* The input of an MLP, and the same as pairs of bf16 values if matrices take them. */
typedef struct {
    const float *x, *words; /* words: NULL without */
    int64_t n_words;        /* of a row */
} input_t;

/* `words` has room for n_rows rows. */
static input_t input_of(const float *x, int64_t n_rows, const matrix_t *gate, float *words, pool_t *pool) {
    input_t input = {x, NULL, pairs_of(gate->cols)};
    if (takes_pairs(gate)) {
        narrow_rows(x, gate->cols, n_rows, gate->cols, words, input.n_words, pool);
        input.words = words;
    }
    return input;
}

/* silu(gate(x)) * up(x) in the form that `down` takes. */
static product_t hidden_product(const input_t *input, int64_t n_rows, const matrix_t *gate, const matrix_t *up,
                                const matrix_t *down, float *out) {
    product_t p = {.x = input->x, .x_stride = gate->cols, .n_rows = n_rows, .w = gate, .up = up, .out = out,
                   .out_stride = gate->rows};
    if (input->words && takes_pairs(gate) && takes_pairs(up))
        p.x = input->words, p.x_stride = input->n_words, p.is_pairs = 1;
    if (takes_pairs(down)) p.out_stride = pairs_of(gate->rows), p.narrows = 1;
    return p;
}

static product_t down_product(const float *hidden, int64_t n_rows, const matrix_t *down, float *out, int64_t add) {
    int is_pairs = takes_pairs(down);
    return (product_t){.x = hidden, .x_stride = is_pairs ? pairs_of(down->cols) : down->cols, .is_pairs = is_pairs,
                       .n_rows = n_rows, .w = down, .out = out, .out_stride = down->rows, .add = add};
}

int32_t ss_mlp(context_t *context, const mlp_t *mlp, const float *x, int64_t n_rows, float *residual) {
    int64_t n_words = n_rows * pairs_of(mlp->gate->cols);
    char *cursor =
        context_scratch(context, ROOM(float, n_rows * mlp->gate->rows) + ROOM(float, n_words) + products_room(1));
    if (!cursor) return -1;
    float *hidden = TAKE(cursor, float, n_rows * mlp->gate->rows);
    float *words = TAKE(cursor, float, n_words);
    input_t input = input_of(x, n_rows, mlp->gate, words, context_pool(context));
    product_t product = hidden_product(&input, n_rows, mlp->gate, mlp->up, mlp->down, hidden);
    run_products(&product, 1, cursor, context_pool(context));
    product = down_product(hidden, n_rows, mlp->down, residual, 1);
    run_products(&product, 1, cursor, context_pool(context));
    return 0;
}

/* Index of the largest of n values that is not yet taken; the first such when all are NaN. */
static int64_t take_best(const float *values, int64_t n, uint8_t *taken) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; i++)
        if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    taken[best] = 1;
    return best;
}

/* Excludes the experts outside the topk_group groups with the highest sums of their two best experts. */
static void close_groups(const moe_t *m, const float *choice, float *group_score, uint8_t *taken, uint8_t *kept) {
    int64_t size = m->n_experts / m->n_group;
    for (int64_t g = 0; g < m->n_group; g++) {
        const float *of_group = choice + g * size;
        float first = -INFINITY, second = -INFINITY;
        for (int64_t i = 0; i < size; i++) {
            if (of_group[i] > first) second = first, first = of_group[i];
            else if (of_group[i] > second) second = of_group[i];
        }
        group_score[g] = size > 1 ? first + second : first;
    }
    memset(kept, 0, (size_t)m->n_group);
    for (int64_t i = 0; i < m->topk_group; i++) take_best(group_score, m->n_group, kept);
    for (int64_t g = 0; g < m->n_group; g++)
        if (!kept[g]) memset(taken + g * size, 1, (size_t)size);
}

/* DeepSeek-V3 `noaux_tc`: the correction bias steers the choice, weights come from the plain scores. */
static void route_row(const moe_t *m, float *scores, int32_t *ids, float *weights) {
    float choice[m->n_experts], group_score[m->n_group];
    uint8_t taken[m->n_experts], kept[m->n_group];
    float sum = 0;
    memset(taken, 0, sizeof taken);
    for (int64_t e = 0; e < m->n_experts; e++) {
        scores[e] = 1.0f / (1.0f + expf(-scores[e]));
        choice[e] = scores[e] + m->correction_bias[e];
    }
    if (m->n_group > 1) close_groups(m, choice, group_score, taken, kept);
    for (int64_t i = 0; i < m->n_chosen; i++) {
        ids[i] = (int32_t)take_best(choice, m->n_experts, taken);
        weights[i] = scores[ids[i]];
        sum += weights[i];
    }
    float scale = m->routed_scaling_factor / (m->norm_topk_prob ? sum + 1e-20f : 1.0f);
    for (int64_t i = 0; i < m->n_chosen; i++) weights[i] *= scale;
}

typedef struct {
    const moe_t *moe;
    float *logits;
    int64_t n_rows;
    int32_t *ids;
    float *weights;
} routing_t;

static void route_rows(void *arguments, int64_t item, int thread) {
    const routing_t *t = arguments;
    const moe_t *m = t->moe;
    (void)thread;
    for (int64_t r = item * ROWS_PER_ITEM; r < t->n_rows && r < (item + 1) * ROWS_PER_ITEM; r++)
        route_row(m, t->logits + r * m->n_experts, t->ids + r * m->n_chosen, t->weights + r * m->n_chosen);
}

/* Sorts (row, choice) pairs by expert: first[e] .. first[e + 1] are e's, row_of their rows, place their order. */
static void sort_pairs(const moe_t *m, const int32_t *ids, int64_t n_pairs, int32_t *first, int32_t *row_of,
                       int32_t *place) {
    memset(first, 0, sizeof(int32_t) * (size_t)(m->n_experts + 1));
    for (int64_t i = 0; i < n_pairs; i++) first[ids[i] + 1]++;
    for (int64_t e = 0; e < m->n_experts; e++) first[e + 1] += first[e];
    for (int64_t i = 0; i < n_pairs; i++) {
        place[i] = first[ids[i]]++;
        row_of[place[i]] = (int32_t)(i / m->n_chosen);
    }
    for (int64_t e = m->n_experts; e > 0; e--) first[e] = first[e - 1];
    first[0] = 0;
}

typedef struct {
    const moe_t *moe;
    const float *outputs, *weights;
    const int32_t *ids, *place;
    int64_t n_rows, width;
    float *residual;
} combination_t;

/* Adds the weighted outputs of each row's experts, in the order of their choice. */
static void combine_rows(void *arguments, int64_t item, int thread) {
    const combination_t *c = arguments;
    int64_t n_chosen = c->moe->n_chosen;
    (void)thread;
    for (int64_t r = item * ROWS_PER_ITEM; r < c->n_rows && r < (item + 1) * ROWS_PER_ITEM; r++)
        for (int64_t i = r * n_chosen; i < (r + 1) * n_chosen; i++) {
            if (!c->moe->gate[c->ids[i]].data) continue;
            const float *output = c->outputs + c->place[i] * c->width;
            float weight = c->weights[i], *residual = c->residual + r * c->width;
            for (int64_t j = 0; j < c->width; j++) residual[j] += weight * output[j];
        }
}

int32_t ss_moe(context_t *context, const moe_t *m, const float *x, int64_t n_rows, float *residual) {
    pool_t *pool = context_pool(context);
    int64_t width = m->router->cols, inner = m->gate->rows, n_pairs = n_rows * m->n_chosen;
    int64_t n_items = (n_rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM;
    int64_t shared_inner = m->shared.gate ? m->shared.gate->rows : 0;
    size_t room = ROOM(float, n_rows * m->n_experts) + ROOM(float, n_pairs) + 3 * ROOM(int32_t, n_pairs) +
                  ROOM(int32_t, m->n_experts + 1) + ROOM(float, n_pairs * inner) +
                  ROOM(float, n_rows * shared_inner) + ROOM(float, n_pairs * width) + ROOM(float, n_rows * pairs_of(width)) +
                  2 * ROOM(product_t, m->n_experts + 1) + products_room(m->n_experts + 1);
    char *cursor = context_scratch(context, room);
    if (!cursor) return -1;
    float *logits = TAKE(cursor, float, n_rows * m->n_experts);
    float *weights = TAKE(cursor, float, n_pairs);
    int32_t *ids = TAKE(cursor, int32_t, n_pairs);
    int32_t *row_of = TAKE(cursor, int32_t, n_pairs);
    int32_t *place = TAKE(cursor, int32_t, n_pairs);
    int32_t *first = TAKE(cursor, int32_t, m->n_experts + 1);
    float *hidden = TAKE(cursor, float, n_pairs * inner);
    float *shared_hidden = TAKE(cursor, float, n_rows * shared_inner);
    float *outputs = TAKE(cursor, float, n_pairs * width);
    float *words = TAKE(cursor, float, n_rows * pairs_of(width));
    product_t *into = TAKE(cursor, product_t, m->n_experts + 1);
    product_t *out_of = TAKE(cursor, product_t, m->n_experts + 1);

    /* The router multiplies in fp32, as transformers' does. */
    product_t routing = {.x = x, .x_stride = width, .n_rows = n_rows, .w = m->router, .out = logits,
                         .out_stride = m->n_experts};
    run_products(&routing, 1, cursor, pool);
    routing_t chosen = {m, logits, n_rows, ids, weights};
    pool_run(pool, route_rows, &chosen, n_items);
    sort_pairs(m, ids, n_pairs, first, row_of, place);
    input_t input = input_of(x, n_rows, m->gate, words, pool);
    int64_t n = 0;
    for (int64_t e = 0; e < m->n_experts; e++) {
        int64_t count = first[e + 1] - first[e];
        if (!count || !m->gate[e].data) continue; /* no rows, or the expert of another rank */
        into[n] = hidden_product(&input, count, m->gate + e, m->up + e, m->down + e, hidden + first[e] * inner);
        into[n].row_of = row_of + first[e];
        out_of[n++] = down_product(hidden + first[e] * inner, count, m->down + e, outputs + first[e] * width, 0);
    }
    if (m->shared.gate) {
        into[n] = hidden_product(&input, n_rows, m->shared.gate, m->shared.up, m->shared.down, shared_hidden);
        out_of[n++] = down_product(shared_hidden, n_rows, m->shared.down, residual, 1);
    }
    run_products(into, n, cursor, pool);
    run_products(out_of, n, cursor, pool);
    combination_t sum = {m, outputs, weights, ids, place, n_rows, width, residual};
    pool_run(pool, combine_rows, &sum, n_items);
    return 0;
}
