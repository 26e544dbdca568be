/* What attention does to sixteen keys or values at a time: find them, fetch them early, multiply, add up. */
#ifndef TRITONE_TILES_H
#define TRITONE_TILES_H

#include "fp8.h"

#define TILE 16
#define PARTITION 512 /* keys; a multiple of TILE */
#define FETCH_AHEAD (3 * TILE)
#define FETCH_AHEAD_E4M3 (10 * TILE) /* smaller tiles go by faster */
#define STATS LANES /* room behind a result row: [0] the largest score, [1] the sum of the weights */

struct attention {
  const char *q, *kv;
  const int32_t *page_table;
  int64_t q_stride, q_heads, kv_heads, group, dim, padded, page_size, max_pages;
  int64_t page_stride, kv_stride, head_stride;
  int64_t ahead; /* keys from one that is computed to one that is fetched */
  float scale;
  const float *scales; /* of e4m3 pages: [kv_heads] of keys, then of values */
  int type, kv_type, pairs; /* pairs: bfloat16 dot products on queries as they lie */
};

/* Where sixteen neighbouring keys (half 0) or values (half 1) lie; null past the end. */
INLINE const char *tile_at(const struct attention *a, const int32_t *pages, int64_t head, int64_t key, int64_t end,
                           int half) {
  if (key >= end) return 0;
  int64_t at = pages[key / a->page_size] * a->page_stride + half * a->kv_stride + head * a->head_stride +
               key % a->page_size * a->dim;
  return a->kv + at * kv_size(a->kv_type);
}

/* Asks for share `part` of `parts` of a tile. The hardware does not look past a 4 KiB page and neighbouring tiles often lie
 * in different ones; the shares are spread over the work on an earlier tile, since only so many lines can be waited for. */
INLINE void fetch_tile(const struct attention *a, const char *at, int64_t part, int64_t parts) {
  const int64_t bytes = TILE * a->dim * kv_size(a->kv_type);
  if (!at) return;
  for (int64_t i = bytes * part / parts & -64; i < bytes * (part + 1) / parts; i += 64) __builtin_prefetch(at + i, 0, 2);
}

/* Sixteen keys or values as float rows [TILE, padded]; rows past `keys` and lanes past the head are zero. */
static void widen_tile(const struct attention *a, const char *at, int64_t keys, float *to) {
  for (int64_t t = 0; t < TILE; t++, to += a->padded) {
    if (t >= keys) {
      memset(to, 0, (size_t)a->padded * 4);
      continue;
    }
    if (a->kv_type == TYPE_F32) load_row(to, at + t * a->dim * 4, a->dim, TYPE_F32);
    else if (a->kv_type == TYPE_BF16) load_row(to, at + t * a->dim * 2, a->dim, TYPE_BF16);
    else load_codes(to, at + t * a->dim, a->dim, 1);
    for (int64_t i = a->dim; i < a->padded; i++) to[i] = 0;
  }
}

/* Products of one query [padded] with a tile of keys [TILE, padded]. */
#ifdef __AVX512F__
INLINE vf dots_float(const float *query, const float *keys, int64_t padded) {
  vf dots[TILE];
  for (int t = 0; t < TILE; t++) dots[t] = splat(0);
  for (int64_t i = 0; i < padded; i += LANES) {
    vf q = load16(query, i, TYPE_F32);
    for (int t = 0; t < TILE; t++) dots[t] += q * load16(keys + t * padded, i, TYPE_F32);
  }
  return sums_of_16(dots);
}
#else
INLINE vf dots_float(const float *query, const float *keys, int64_t padded) {
  float sums[TILE];
  for (int64_t half = 0; half < TILE; half += 8, keys += 8 * padded) {
    vr dots[8];
    for (int t = 0; t < 8; t++) dots[t] = (vr){0};
    for (int64_t i = 0; i < padded; i += REGISTER) {
      vr q = load_register(query, i, TYPE_F32);
      for (int t = 0; t < 8; t++) dots[t] += q * load_register(keys + t * padded, i, TYPE_F32);
    }
    sums_of_8(sums + half, dots);
  }
  return load16(sums, 0, TYPE_F32);
}
#endif

/* The same for bfloat16 queries and keys, whose products are exact in float32; dim is a multiple of 32. */
INLINE vf dots_bf16(const char *query, const char *keys, int64_t dim) {
  vf dots[TILE];
  for (int t = 0; t < TILE; t++) dots[t] = splat(0);
#ifdef __AVX512BF16__
  for (int64_t i = 0; i < dim * 2; i += 64) {
    __m512bh q = (__m512bh)_mm512_loadu_si512(query + i);
    for (int t = 0; t < TILE; t++)
      dots[t] = (vf)_mm512_dpbf16_ps((__m512)dots[t], q, (__m512bh)_mm512_loadu_si512(keys + t * dim * 2 + i));
  }
#else
  (void)query, (void)keys, (void)dim;
#endif
  return sums_of_16(dots);
}

/* Registers of a row that are added up at once; four rows of them, and what they are multiplied with, fit. */
#ifdef __AVX512F__
#define ADDED 4
#else
#define ADDED 2
#endif

/* acc [R, pitch] += weights [R, PARTITION] (first TILE of each) times rows [TILE, width of `type`]. */
INLINE void add_weighted(float *restrict acc, const float *restrict weights, const char *restrict rows, int64_t padded,
                         int type, const char *ahead, const int R, const int V) {
  const int64_t pitch = padded + STATS, row = padded * type_size(type);
  vr sum[4][ADDED];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sum[r][v] = load_register(acc + r * pitch, v * REGISTER, TYPE_F32);
  for (int t = 0; t < TILE; t++) {
    if (ahead)
      for (int64_t i = 0; i < V * REGISTER * type_size(type); i += 64) __builtin_prefetch(ahead + t * row + i, 0, 2);
    for (int v = 0; v < V; v++) {
      vr x = load_register(rows + t * row, v * REGISTER, type);
      for (int r = 0; r < R; r++) sum[r][v] += x * weights[r * PARTITION + t];
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store_register(acc + r * pitch, v * REGISTER, sum[r][v]);
}

INLINE void add_weighted_rows(float *acc, const float *weights, const char *rows, int64_t padded, int type,
                              const char *ahead, const int R) {
  int64_t i = 0, size = type_size(type);
  for (; i + ADDED * REGISTER <= padded; i += ADDED * REGISTER)
    add_weighted(acc + i, weights, rows + i * size, padded, type, ahead ? ahead + i * size : 0, R, ADDED);
  for (; i < padded; i += REGISTER)
    add_weighted(acc + i, weights, rows + i * size, padded, type, ahead ? ahead + i * size : 0, R, 1);
}

/* `ahead`, if not null, is a tile of the same shape that is wanted soon. */
INLINE void add_tile(float *result, const float *weights, const char *values, int64_t padded, int type, const char *ahead,
                     int64_t rows) {
  const int64_t pitch = padded + STATS;
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4)
    add_weighted_rows(result + r * pitch, weights + r * PARTITION, values, padded, type, r ? 0 : ahead, 4);
  result += r * pitch, weights += r * PARTITION;
  if (rows - r == 3) add_weighted_rows(result, weights, values, padded, type, r ? 0 : ahead, 3);
  if (rows - r == 2) add_weighted_rows(result, weights, values, padded, type, r ? 0 : ahead, 2);
  if (rows - r == 1) add_weighted_rows(result, weights, values, padded, type, r ? 0 : ahead, 1);
}

#endif
