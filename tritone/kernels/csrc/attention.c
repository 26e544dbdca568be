/* Attention of new tokens over the KV pages of their sequences.
 *
 * A work item is (block of neighbouring query tokens of one sequence, kv head, partition of its context). All query
 * heads of the block that share the kv head are rows of the item, so a key is read once for all of them. Partitions
 * have a fixed size and are merged in order, keys go by in tiles of 16, and a masked key adds exactly zero: a token's
 * numbers depend neither on the other sequences, nor on the chunk it came in, nor on the number of threads.
 */
#include "tiles.h"

#include <math.h>
#include <stdlib.h>

#define ROWS_PER_BLOCK 24 /* about; one token's group if that is larger */

struct block { /* neighbouring query tokens of one sequence */
  int64_t sequence, token, tokens, context; /* context: keys seen by the block's first token */
};

/* Scores [PARTITION] of one row become weights; `seen` of `span` keys count. Gives the largest score and the sum,
 * which is NaN if a score is NaN or infinite. */
INLINE void soften(float *scores, int64_t seen, int64_t span, float scale, float *stats) {
  for (int64_t i = seen < 0 ? 0 : seen; i < span; i++) scores[i] = -INFINITY;
  vf top = splat(-1e30f), total = splat(0);
  vi lost = {0};
  for (int64_t i = 0; i < span; i += LANES) top = vmax(top, load16(scores, i, TYPE_F32) * scale);
  float m = lane_max(top);
  for (int64_t i = 0; i < span; i += LANES) {
    vf x = load16(scores, i, TYPE_F32) * scale;
    vf w = (vf)((vi)vexp(x - m) & (x > -1e30f));
    total += w;
    lost |= ~(x <= 3e38f);
    store16(scores, i, w, TYPE_F32);
  }
  stats[0] = m;
  stats[1] = lane_sum((vf)((vi)total | lost));
}

/* One item: fills, for each row, `padded` weighted sums and the two statistics. `next` (or null) and `next_head` tell
 * whose first keys to fetch at the end. */
static void attend(const struct attention *a, const struct block *b, int64_t head, int64_t partition, float *result,
                   float *scratch, const struct block *next, int64_t next_head) {
  const int64_t padded = a->padded, rows = b->tokens * a->group;
  const int64_t begin = partition * PARTITION, last = b->context + b->tokens - 1;
  const int64_t end = last < begin + PARTITION ? last : begin + PARTITION, span = (end - begin + TILE - 1) / TILE * TILE;
  float *queries = scratch, *wide = queries + rows * padded, *scores = wide + TILE * padded;
  const int32_t *pages = a->page_table + b->sequence * a->max_pages;
  const int32_t *next_pages = next ? a->page_table + next->sequence * a->max_pages : 0;
  const int64_t next_end = next ? next->context + next->tokens - 1 : 0;
  const float scale = a->scales ? a->scale * a->scales[head] : a->scale;
  const char *q[rows];

  for (int64_t r = 0; r < rows; r++) {
    int64_t token = b->token + r / a->group, q_head = head * a->group + r % a->group;
    q[r] = a->q + (token * a->q_stride + q_head * a->dim) * type_size(a->type);
    if (a->pairs) continue;
    float *to = queries + r * padded;
    if (a->type == TYPE_F32) load_row(to, q[r], a->dim, TYPE_F32);
    else load_row(to, q[r], a->dim, TYPE_BF16);
    for (int64_t i = a->dim; i < padded; i++) to[i] = 0;
  }
  for (int64_t key = begin; key < end; key += TILE) {
    const char *at = tile_at(a, pages, head, key, end, 0);
    const char *ahead = tile_at(a, pages, head, key + a->ahead, end, 0);
    if (!ahead) ahead = tile_at(a, pages, head, key + a->ahead - span, end, 1);
    float *score = scores + key - begin;
    if (a->pairs) {
      const char *k = at;
      if (a->kv_type == TYPE_E4M3) codes_to_bf16((uint16_t *)wide, at, TILE * a->dim, ahead), k = (const char *)wide, ahead = 0;
      for (int64_t r = 0; r < rows; r++) {
        fetch_tile(a, ahead, r, rows);
        store16(score, r * PARTITION, dots_bf16(q[r], k, a->dim), TYPE_F32);
      }
      continue;
    }
    const float *k = (const float *)at;
    if (a->kv_type != TYPE_F32 || a->dim != padded) widen_tile(a, at, TILE, wide), k = wide;
    for (int64_t r = 0; r < rows; r++) {
      fetch_tile(a, ahead, r, rows);
      store16(score, r * PARTITION, dots_float(queries + r * padded, k, padded), TYPE_F32);
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    float *out = result + r * (padded + STATS);
    int64_t seen = b->context + r / a->group - begin;
    memset(out, 0, (size_t)padded * 4);
    soften(scores + r * PARTITION, seen < end - begin ? seen : end - begin, span, scale, out + padded);
  }
  for (int64_t key = begin; key < end; key += TILE) {
    const char *at = tile_at(a, pages, head, key, end, 1);
    const char *ahead = tile_at(a, pages, head, key + a->ahead, end, 1);
    if (!ahead && end < last) ahead = tile_at(a, pages, head, key + a->ahead, last, 0);
    if (!ahead && next) ahead = tile_at(a, next_pages, next_head, key + a->ahead - span - begin, next_end, 0);
    const float *weights = scores + key - begin;
    if (a->pairs && a->kv_type == TYPE_E4M3 && end - key >= TILE && rows <= 4) {
      codes_to_bf16((uint16_t *)wide, at, TILE * a->dim, ahead);
      add_tile(result, weights, (const char *)wide, padded, TYPE_BF16, 0, rows);
    } else if (a->kv_type != TYPE_E4M3 && end - key >= TILE && a->dim == padded && (a->kv_type == TYPE_F32 || rows <= 4)) {
      if (a->kv_type == TYPE_F32) add_tile(result, weights, at, padded, TYPE_F32, ahead, rows);
      else add_tile(result, weights, at, padded, TYPE_BF16, ahead, rows);
    } else {
      /* a weight of zero does not undo an infinity left in an unused slot, so those rows are zeroed here */
      fetch_tile(a, ahead, 0, 1);
      widen_tile(a, at, end - key, wide);
      add_tile(result, weights, (const char *)wide, padded, TYPE_F32, 0, rows);
    }
  }
}

/* Joins the next partition to the running result, the usual rescaling by the larger maximum. */
INLINE void join(const struct attention *a, float *run, const float *next, int64_t rows) {
  const int64_t padded = a->padded, pitch = padded + STATS;
  for (int64_t r = 0; r < rows; r++, run += pitch, next += pitch) {
    float m = run[padded] > next[padded] ? run[padded] : next[padded];
    vf both = vexp((vf){run[padded] - m, next[padded] - m});
    for (int64_t i = 0; i < padded; i++) run[i] = run[i] * both[0] + next[i] * both[1];
    run[padded + 1] = run[padded + 1] * both[0] + next[padded + 1] * both[1];
    run[padded] = m;
  }
}

INLINE void write_out(const struct attention *a, const struct block *b, int64_t head, float *run, char *out) {
  for (int64_t r = 0; r < b->tokens * a->group; r++, run += a->padded + STATS) {
    int64_t token = b->token + r / a->group, q_head = head * a->group + r % a->group;
    float scale = (a->scales ? a->scales[a->kv_heads + head] : 1.0f) / run[a->padded + 1];
    for (int64_t i = 0; i < a->dim; i++) run[i] *= scale;
    char *to = out + (token * a->q_heads + q_head) * a->dim * type_size(a->type);
    if (a->type == TYPE_F32) store_row(to, run, a->dim, TYPE_F32);
    else store_row(to, run, a->dim, TYPE_BF16);
  }
}

static int64_t partitions_of(const struct block *b) { return (b->context + b->tokens - 2) / PARTITION + 1; }

static int run_blocks(const struct attention *a, const struct block *blocks, int64_t n, int64_t rows, char *out,
                      int threads) {
  const int64_t result = rows * (a->padded + STATS);
  const int64_t scratch = (rows + TILE) * a->padded + rows * PARTITION;
  int64_t most = 1;
  for (int64_t i = 0; i < n; i++) most = partitions_of(blocks + i) > most ? partitions_of(blocks + i) : most;
  /* With few items and a long context the partitions of one item are shared out among the threads. */
  const int split = threads > 1 && most > 1 && n * a->kv_heads < 4 * threads;
  float *partial = split ? malloc((size_t)(n * a->kv_heads * most * result) * 4) : 0;
  int failed = split && !partial;
  if (!failed) {
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
    {
      float *own = aligned_alloc(64, (size_t)((2 * result + scratch + 15) / 16 * 16) * 4);
      failed |= !own;
#pragma omp for schedule(dynamic)
      for (int64_t item = 0; item < n * a->kv_heads * (split ? most : 1); item++) {
        const struct block *b = blocks + item / (split ? most : 1) / a->kv_heads;
        int64_t head = item / (split ? most : 1) % a->kv_heads;
        if (!own) continue;
        if (split) {
          if (item % most < partitions_of(b)) attend(a, b, head, item % most, partial + item * result, own, 0, 0);
          continue;
        }
        float *run = own + scratch, *next = run + result;
        const struct block *follows = head + 1 < a->kv_heads ? b : b + 1 < blocks + n ? b + 1 : 0;
        attend(a, b, head, 0, run, own, follows, (head + 1) % a->kv_heads);
        for (int64_t p = 1; p < partitions_of(b); p++) {
          attend(a, b, head, p, next, own, follows, (head + 1) % a->kv_heads);
          join(a, run, next, b->tokens * a->group);
        }
        write_out(a, b, head, run, out);
      }
      free(own);
    }
  }
  for (int64_t item = 0; split && !failed && item < n * a->kv_heads; item++) {
    const struct block *b = blocks + item / a->kv_heads;
    float *run = partial + item * most * result;
    for (int64_t p = 1; p < partitions_of(b); p++) join(a, run, run + p * result, b->tokens * a->group);
    write_out(a, b, item % a->kv_heads, run, out);
  }
  free(partial);
  return failed;
}

/* Returns 0; 1 + the index of the first sequence with a bad length or page number; -1 without memory. */
int64_t EXPORT(tritone_paged_attention)(const char *q, const char *kv, const int32_t *page_table, const int32_t *starts,
                                        const int32_t *contexts, const float *scales, char *out, int64_t sequences,
                                        int64_t q_stride, int64_t q_heads, int64_t kv_heads, int64_t head_dim,
                                        int64_t page_size, int64_t pages, int64_t max_pages, int64_t page_stride,
                                        int64_t kv_stride, int64_t head_stride, float scale, int type, int kv_type, int threads) {
  struct attention a = {.q = q, .kv = kv, .page_table = page_table, .q_stride = q_stride, .q_heads = q_heads,
                        .kv_heads = kv_heads, .group = q_heads / kv_heads, .dim = head_dim,
                        .padded = (head_dim + LANES - 1) / LANES * LANES, .page_size = page_size,
                        .max_pages = max_pages, .page_stride = page_stride, .kv_stride = kv_stride,
                        .head_stride = head_stride,
                        .ahead = kv_type == TYPE_E4M3 ? FETCH_AHEAD_E4M3 : FETCH_AHEAD, .scale = scale,
                        .scales = scales, .type = type, .kv_type = kv_type};
#ifdef __AVX512BF16__
  a.pairs = type == TYPE_BF16 && kv_type != TYPE_F32 && head_dim % 32 == 0;
#endif
  const int64_t step = a.group < ROWS_PER_BLOCK ? ROWS_PER_BLOCK / a.group : 1;
  int64_t n = 0, widest = 0;
  for (int64_t s = 0; s < sequences; s++) {
    int64_t tokens = starts[s + 1] - starts[s], used = (contexts[s] + page_size - 1) / page_size;
    if (tokens < 1 || contexts[s] < tokens || used > max_pages) return 1 + s;
    for (int64_t p = 0; p < used; p++)
      if (page_table[s * max_pages + p] < 0 || page_table[s * max_pages + p] >= pages) return 1 + s;
    n += (tokens + step - 1) / step;
    if (tokens > widest) widest = tokens;
  }
  if (!n) return 0;
  struct block *blocks = malloc((size_t)n * sizeof *blocks);
  if (!blocks) return -1;
  n = 0;
  for (int64_t s = 0; s < sequences; s++)
    for (int64_t t = starts[s]; t < starts[s + 1]; t += step)
      blocks[n++] = (struct block){.sequence = s, .token = t,
                                   .tokens = starts[s + 1] - t < step ? starts[s + 1] - t : step,
                                   .context = contexts[s] - (starts[s + 1] - t) + 1};
  int failed = run_blocks(&a, blocks, n, (widest < step ? widest : step) * a.group, out, threads);
  free(blocks);
  return failed ? -1 : 0;
}
