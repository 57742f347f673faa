/* All layers of a forward pass in one call. It runs the operations of the Python stack in the same order, without
 * Python's overhead and without taking the interpreter lock a hundred times per step. */
#include "ops.h"

typedef struct {
    const float *input_norm, *q_norm, *kv_norm, *post_norm; /* q_norm NULL: a_proj computes the queries directly */
    const matrix_t *a_proj, *q_b, *uk, *uv, *o_proj;
    const mlp_t *mlp; /* NULL in a layer of experts */
    const moe_t *moe;
} layer_t;

typedef struct {
    const layer_t *layers;
    int64_t n_layers, hidden;
    float eps, latent_eps;
} stack_t;

/* One batch. The attentions have the fields that are equal for all layers; n_sequences may be 0. */
typedef struct {
    slots_t slots;
    attention_t absorbed, expanded;
    char *cache;               /* page 0 */
    const int32_t *captured_of; /* [n_layers]: which capture takes the layer's output, or -1 */
    float *captured;           /* [captures][n_rows][hidden] */
    float *x;                  /* [n_rows][hidden]: the residual stream, in and out */
    const int32_t *stop;       /* a word that another thread sets to end the pass early; NULL: never */
} step_t;

typedef struct {
    float *normed, *a, *q_latent, *q, *mixed;
} buffers_t;

static int64_t q_width(const step_t *s) {
    const attention_t *a = &s->absorbed;
    return a->n_heads * (a->nope + a->rope);
}

typedef struct {
    int64_t normed, a, q_latent, q, mixed; /* floats */
} sizes_t;

static sizes_t sizes_of(const stack_t *t, const step_t *s) {
    const layer_t *layer = t->layers; /* all layers have the same attention */
    int64_t n = s->slots.n_rows, has_q_b = layer->q_b != NULL;
    return (sizes_t){n * t->hidden, n * layer->a_proj->rows, has_q_b ? n * layer->q_b->cols : 0,
                     has_q_b ? n * q_width(s) : 0, n * s->absorbed.n_heads * s->absorbed.v};
}

static int32_t take_buffers(context_t *context, const stack_t *t, const step_t *s, buffers_t *b) {
    sizes_t n = sizes_of(t, s);
    char *cursor = context_lasting(context, ROOM(float, n.normed) + ROOM(float, n.a) + ROOM(float, n.q_latent) +
                                                ROOM(float, n.q) + ROOM(float, n.mixed));
    if (!cursor) return -1;
    b->normed = TAKE(cursor, float, n.normed);
    b->a = TAKE(cursor, float, n.a);
    b->q_latent = TAKE(cursor, float, n.q_latent);
    b->q = TAKE(cursor, float, n.q);
    b->mixed = TAKE(cursor, float, n.mixed);
    return 0;
}

static int32_t attend(context_t *context, const layer_t *layer, attention_t *a, float *q, int64_t q_stride,
                      const char *layer_base, float *out, int32_t (*form)(context_t *, const attention_t *)) {
    if (!a->n_sequences) return 0;
    a->q = q, a->q_stride = q_stride, a->uk = layer->uk, a->uv = layer->uv, a->layer_base = layer_base, a->out = out;
    return form(context, a);
}

static int32_t run_attention(context_t *context, const stack_t *t, const layer_t *layer, step_t *s,
                             const buffers_t *b, char *layer_base) {
    attention_t *a = &s->absorbed;
    int64_t n = s->slots.n_rows, a_width = layer->a_proj->rows, latent = width_of(a);
    float *q = b->a, *kv_a = b->a + a_width - latent;
    int64_t q_stride = a_width;
    if (ss_linear(context, b->normed, t->hidden, n, layer->a_proj, b->a, 0)) return -1;
    if (layer->q_b) {
        ss_rms_norm(context, b->a, a_width, layer->q_norm, n, layer->q_b->cols, t->latent_eps, b->q_latent);
        q = b->q, q_stride = q_width(s);
        if (ss_linear(context, b->q_latent, layer->q_b->cols, n, layer->q_b, q, 0)) return -1;
    }
    ss_rotate_queries(context, q, q_stride, n, a->n_heads, a->nope + a->rope, a->rope, s->slots.cos_sin);
    if (ss_store_latent(context, &s->slots, kv_a, a_width, layer->kv_norm, t->latent_eps, layer_base)) return -1;
    if (is_set(s->stop)) return 1;
    if (attend(context, layer, &s->absorbed, q, q_stride, layer_base, b->mixed, ss_attend_absorbed)) return -1;
    if (attend(context, layer, &s->expanded, q, q_stride, layer_base, b->mixed, ss_attend_expanded)) return -1;
    if (is_set(s->stop)) return 1;
    return ss_linear(context, b->mixed, a->n_heads * a->v, n, layer->o_proj, s->x, 1);
}

static int32_t run_layers(context_t *context, const stack_t *t, step_t *s, const buffers_t *b) {
    int64_t n = s->slots.n_rows;
    for (int64_t i = 0; i < t->n_layers; i++) {
        const layer_t *layer = t->layers + i;
        char *layer_base = s->cache + i * (s->slots.page_bytes / t->n_layers);
        ss_rms_norm(context, s->x, t->hidden, layer->input_norm, n, t->hidden, t->eps, b->normed);
        int32_t status = run_attention(context, t, layer, s, b, layer_base);
        if (status) return status;
        if (is_set(s->stop)) return 1;
        ss_rms_norm(context, s->x, t->hidden, layer->post_norm, n, t->hidden, t->eps, b->normed);
        status = layer->moe ? ss_moe(context, layer->moe, b->normed, n, s->x)
                            : ss_mlp(context, layer->mlp, b->normed, n, s->x);
        if (status) return status;
        if (is_set(s->stop)) return 1;
        if (s->captured_of[i] >= 0)
            memcpy(s->captured + s->captured_of[i] * n * t->hidden, s->x, sizeof(float) * (size_t)(n * t->hidden));
    }
    return 0;
}

/* Returns 0; 1 when it was stopped, which leaves x and the rows' cache slots undefined; -1 when out of memory. */
int32_t ss_run_stack(context_t *context, const stack_t *t, step_t *s) {
    buffers_t b;
    if (take_buffers(context, t, s, &b)) return -1;
    context_watch(context, s->stop);
    int32_t status = run_layers(context, t, s, &b);
    context_watch(context, NULL);
    return status;
}
