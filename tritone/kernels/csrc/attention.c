/* Attention of new tokens over the KV pages of their sequences.
 *
 * A work item is (block of neighbouring query tokens of one sequence, kv head, partition of its context). All query
 * heads of the block that share the kv head are rows of the item, so a key is read once for all of them. Partitions
 * have a fixed size and are merged in order, keys go by in tiles of 16, and a masked key adds exactly zero: a token's
 * numbers depend neither on the other sequences, nor on the chunk it came in, nor on the number of threads.
 */
#include "vector.h"

#include <stdlib.h>

#define TILE 16
#define PARTITION 512 /* keys; a multiple of TILE and of every page size */
#define ROWS_PER_BLOCK 24
#define STATS LANES /* room behind a result row: [0] the largest score, [1] the sum of the weights */

struct attention {
  const char *q, *kv;
  const int32_t *page_table;
  int64_t q_stride, q_heads, kv_heads, group, dim, padded, page_size, max_pages;
  int64_t page_stride, kv_stride, head_stride;
  float scale;
  int type, kv_type;
};

struct block { /* neighbouring query tokens of one sequence */
  int64_t sequence, token, tokens, context; /* context: keys seen by the block's first token */
};

/* Sixteen keys or values as float rows; rows past `keys` and lanes past the head are zero. */
INLINE const float *tile_rows(const struct attention *a, const char *at, int64_t keys, float *scratch) {
  if (a->kv_type == TYPE_F32 && keys == TILE && a->dim == a->padded) return (const float *)at;
  for (int64_t t = 0; t < TILE; t++) {
    float *row = scratch + t * a->padded;
    if (t >= keys) {
      memset(row, 0, (size_t)a->padded * 4);
    } else {
      if (a->kv_type == TYPE_F32) load_row(row, at + t * a->dim * 4, a->dim, TYPE_F32);
      else load_row(row, at + t * a->dim * 2, a->dim, TYPE_BF16);
      for (int64_t i = a->dim; i < a->padded; i++) row[i] = 0;
    }
  }
  return scratch;
}

INLINE void add_weighted(float *restrict acc, const float *restrict weights, const float *restrict rows, int64_t padded,
                         const int R, const int V) {
  const int64_t pitch = padded + STATS;
  vf sum[4][4];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sum[r][v] = load16(acc + r * pitch, v * LANES, TYPE_F32);
  for (int t = 0; t < TILE; t++)
    for (int v = 0; v < V; v++) {
      vf x = load16(rows + t * padded, v * LANES, TYPE_F32);
      for (int r = 0; r < R; r++) sum[r][v] += x * weights[r * PARTITION + t];
    }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store16(acc + r * pitch, v * LANES, sum[r][v], TYPE_F32);
}

INLINE void add_weighted_rows(float *acc, const float *weights, const float *rows, int64_t padded, const int R) {
  int64_t i = 0;
  for (; i + 4 * LANES <= padded; i += 4 * LANES) add_weighted(acc + i, weights, rows + i, padded, R, 4);
  for (; i < padded; i += LANES) add_weighted(acc + i, weights, rows + i, padded, R, 1);
}

/* One item: fills, for each row, `padded` weighted sums and the two statistics. */
static void attend(const struct attention *a, const struct block *b, int64_t head, int64_t partition, float *result,
                   float *scratch) {
  const int64_t padded = a->padded, rows = b->tokens * a->group;
  const int64_t begin = partition * PARTITION, last = b->context + b->tokens - 1;
  const int64_t end = last < begin + PARTITION ? last : begin + PARTITION;
  const int64_t size = type_size(a->kv_type);
  float *queries = scratch, *tile = queries + rows * padded, *scores = tile + TILE * padded;
  const int32_t *pages = a->page_table + b->sequence * a->max_pages;

  for (int64_t r = 0; r < rows; r++) {
    int64_t token = b->token + r / a->group, q_head = head * a->group + r % a->group;
    const char *from = a->q + (token * a->q_stride + q_head * a->dim) * type_size(a->type);
    float *to = queries + r * padded;
    if (a->type == TYPE_F32) load_row(to, from, a->dim, TYPE_F32);
    else load_row(to, from, a->dim, TYPE_BF16);
    for (int64_t i = 0; i < a->dim; i++) to[i] *= a->scale;
    for (int64_t i = a->dim; i < padded; i++) to[i] = 0;
  }
  for (int64_t key = begin; key < end; key += TILE) {
    const char *at = a->kv + (pages[key / a->page_size] * a->page_stride + head * a->head_stride +
                              key % a->page_size * a->dim) * size;
    const float *k = tile_rows(a, at, end - key < TILE ? end - key : TILE, tile);
    for (int64_t r = 0; r < rows; r++) {
      vf dots[TILE];
      for (int t = 0; t < TILE; t++) dots[t] = splat(0);
      for (int64_t i = 0; i < padded; i += LANES) {
        vf q = load16(queries + r * padded, i, TYPE_F32);
        for (int t = 0; t < TILE; t++) dots[t] += q * load16(k + t * padded, i, TYPE_F32);
      }
      store16(scores + r * PARTITION, key - begin, sums_of_16(dots), TYPE_F32);
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    float *s = scores + r * PARTITION, *out = result + r * (padded + STATS);
    int64_t seen = b->context + r / a->group - begin; /* keys of this partition that the row may see */
    if (seen > end - begin) seen = end - begin;
    int64_t span = (end - begin + TILE - 1) / TILE * TILE;
    for (int64_t i = seen < 0 ? 0 : seen; i < span; i++) s[i] = -1e30f;
    vf top = splat(-1e30f), total = splat(0);
    for (int64_t i = 0; i < span; i += LANES) top = vmax(top, load16(s, i, TYPE_F32));
    float m = lane_max(top);
    for (int64_t i = 0; i < span; i += LANES) {
      vf x = load16(s, i, TYPE_F32);
      vf w = (vf)((vi)vexp(x - m) & (x > -1e29f));
      total += w;
      store16(s, i, w, TYPE_F32);
    }
    memset(out, 0, (size_t)padded * 4);
    out[padded] = m;
    out[padded + 1] = lane_sum(total);
  }
  for (int64_t key = begin; key < end; key += TILE) {
    const char *at = a->kv + (pages[key / a->page_size] * a->page_stride + a->kv_stride + head * a->head_stride +
                              key % a->page_size * a->dim) * size;
    const float *v = tile_rows(a, at, end - key < TILE ? end - key : TILE, tile);
    const float *w = scores + key - begin;
    const int64_t pitch = padded + STATS;
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) add_weighted_rows(result + r * pitch, w + r * PARTITION, v, padded, 4);
    for (; r < rows; r++) add_weighted_rows(result + r * pitch, w + r * PARTITION, v, padded, 1);
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
    float scale = 1.0f / run[a->padded + 1];
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
          if (item % most < partitions_of(b)) attend(a, b, head, item % most, partial + item * result, own);
          continue;
        }
        float *run = own + scratch, *next = run + result;
        attend(a, b, head, 0, run, own);
        for (int64_t p = 1; p < partitions_of(b); p++) {
          attend(a, b, head, p, next, own);
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
                                        const int32_t *contexts, char *out, int64_t sequences, int64_t q_stride,
                                        int64_t q_heads, int64_t kv_heads, int64_t head_dim, int64_t page_size,
                                        int64_t pages, int64_t max_pages, int64_t page_stride, int64_t kv_stride,
                                        int64_t head_stride, float scale, int type, int kv_type, int threads) {
  struct attention a = {.q = q, .kv = kv, .page_table = page_table, .q_stride = q_stride, .q_heads = q_heads,
                        .kv_heads = kv_heads, .group = q_heads / kv_heads, .dim = head_dim,
                        .padded = (head_dim + LANES - 1) / LANES * LANES, .page_size = page_size,
                        .max_pages = max_pages, .page_stride = page_stride, .kv_stride = kv_stride,
                        .head_stride = head_stride, .scale = scale, .type = type, .kv_type = kv_type};
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
