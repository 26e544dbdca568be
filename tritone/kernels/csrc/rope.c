/* Head norm, rotary embedding and the write of new keys and values into their pages. */
#include "fp8.h"

#include <math.h>

#define MAX_HEAD_DIM 512

INLINE void head_norm(float *x, const void *weight, int64_t d, float eps, int type) {
  float sum = 0;
  for (int64_t i = 0; i < d; i++) sum += x[i] * x[i];
  float scale = 1.0f / sqrtf(sum / (float)d + eps);
  for (int64_t i = 0; i < d; i++) x[i] = rounded1(rounded1(x[i] * scale, type) * load1(weight, i, type), type);
}

/* Rotates (x[i], x[i + d/2]) by the angle of position and i, the "rotate half" convention of the Hugging Face families. */
INLINE void rotate(float *restrict x, const float *restrict cos, const float *restrict sin, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    float a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i] + a * sin[i];
  }
}

struct rope_args {
  int64_t q_heads, kv_heads, head_dim, page_size;
  int64_t page_stride, kv_stride, head_stride; /* in elements of the KV type */
  float eps;
  const float *scales;  /* of e4m3 pages: [kv_heads] of keys, then of values */
  const float *offsets; /* of e4m3 pages: [kv_heads, head_dim], or null */
};

INLINE void subtract(float *restrict x, const float *restrict offset, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] -= offset[i];
}

INLINE void add(float *restrict x, const float *restrict offset, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] += offset[i];
}

INLINE void rope_token(const struct rope_args *a, char *qkv, char *kv, int64_t slot, const float *cos, const float *sin,
                       const void *q_norm, const void *k_norm, int type, int kv_type) {
  int64_t d = a->head_dim;
  float x[MAX_HEAD_DIM];
  for (int64_t h = 0; h < a->q_heads + 2 * a->kv_heads; h++) {
    char *head = qkv + h * d * type_size(type);
    int64_t kv_head = h - a->q_heads;
    int is_v = kv_head >= a->kv_heads;
    load_row(x, head, d, type);
    if (!is_v) {
      const void *norm = kv_head < 0 ? q_norm : k_norm;
      if (norm) head_norm(x, norm, d, a->eps, type);
      rotate(x, cos, sin, d / 2);
      if (kv_type == TYPE_E4M3 && kv_head < 0) mix(x, d, mixed_width(d), query_factor(mixed_width(d)));
      store_row(head, x, d, type);
    }
    if (kv_head < 0) continue;
    if (is_v) kv_head -= a->kv_heads;
    int64_t at = slot / a->page_size * a->page_stride + (is_v ? a->kv_stride : 0) + kv_head * a->head_stride +
                 slot % a->page_size * d;
    if (kv_type == TYPE_E4M3) {
      load_row(x, head, d, type);
      if (!is_v && a->offsets) subtract(x, a->offsets + kv_head * d, d);
      if (!is_v) mix(x, d, mixed_width(d), key_factor(mixed_width(d)));
      store_codes(kv + at, x, d, a->scales[is_v * a->kv_heads + kv_head], TYPE_F32);
      continue;
    }
    if (type != kv_type) load_row(x, head, d, type);
    store_row(kv + at * type_size(kv_type), x, d, kv_type);
  }
}

/* Returns 0, or 1 + the index of the first token whose slot or position lies outside its table (nothing is written then). */
int64_t EXPORT(tritone_rope_append)(char *qkv, const int32_t *positions, const int64_t *slots, const float *cos,
                                    const float *sin, char *kv, const void *q_norm, const void *k_norm, const float *scales,
                                    const float *offsets, int64_t tokens, int64_t qkv_stride, int64_t q_heads,
                                    int64_t kv_heads, int64_t head_dim, int64_t page_size, int64_t pages,
                                    int64_t table_rows, int64_t page_stride, int64_t kv_stride, int64_t head_stride,
                                    float eps, int type, int kv_type, int threads) {
  struct rope_args a = {.q_heads = q_heads, .kv_heads = kv_heads, .head_dim = head_dim,
                        .page_size = page_size, .page_stride = page_stride, .kv_stride = kv_stride,
                        .head_stride = head_stride, .eps = eps, .scales = scales,
                        .offsets = offsets};
  for (int64_t t = 0; t < tokens; t++)
    if (slots[t] < 0 || slots[t] >= pages * page_size || positions[t] < 0 || positions[t] >= table_rows) return 1 + t;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < tokens; t++) {
    char *row = qkv + t * qkv_stride * type_size(type);
    const float *c = cos + positions[t] * (head_dim / 2), *s = sin + positions[t] * (head_dim / 2);
#define CASE(T, K) \
  if (type == T && kv_type == K) rope_token(&a, row, kv, slots[t], c, s, q_norm, k_norm, T, K);
    CASE(TYPE_F32, TYPE_F32)
    CASE(TYPE_F32, TYPE_BF16)
    CASE(TYPE_F32, TYPE_E4M3)
    CASE(TYPE_BF16, TYPE_F32)
    CASE(TYPE_BF16, TYPE_BF16)
    CASE(TYPE_BF16, TYPE_E4M3)
#undef CASE
  }
  return 0;
}

/* Tokens of one head of a page, n elements in all, into another type. Offsets are those of its keys, or null: not of e4m3,
 * none, or the same on both sides. Gives 1 if a NaN went into a code, else 0. */
INLINE int convert_plane(char *to, const char *from, int64_t n, int64_t head_dim, int keys, float to_scale,
                         float from_scale, const float *to_offset, const float *from_offset, int to_type, int from_type) {
  const int moved = to_offset || from_offset;
  const int unmixes = keys && from_type == TYPE_E4M3 && (to_type != TYPE_E4M3 || moved);
  const int mixes = keys && to_type == TYPE_E4M3 && (from_type != TYPE_E4M3 || moved);
  const int64_t width = mixed_width(head_dim);
  float x[MAX_HEAD_DIM];
  int nan = 0;
  if (to_type == from_type && to_scale == from_scale && !moved) {
    memcpy(to, from, (size_t)(n * kv_size(to_type)));
    return 0;
  }
  for (int64_t i = 0; i < n; i += head_dim) {
    const char *at = from + i * kv_size(from_type);
    if (to_type == TYPE_E4M3 && !mixes && from_type != TYPE_E4M3) {
      nan |= store_codes(to + i, at, head_dim, to_scale, from_type);
      continue;
    }
    if (from_type == TYPE_E4M3) load_codes(x, at, head_dim, from_scale);
    else load_row(x, at, head_dim, from_type);
    if (unmixes) mix(x, head_dim, width, query_factor(width)); /* the inverse has the other factor */
    if (from_offset) add(x, from_offset, head_dim);
    if (to_offset) subtract(x, to_offset, head_dim);
    if (mixes) mix(x, head_dim, width, key_factor(width));
    if (to_type == TYPE_E4M3) nan |= store_codes(to + i, x, head_dim, to_scale, TYPE_F32);
    else store_row(to + i * kv_size(to_type), x, head_dim, to_type);
  }
  return nan;
}

static int convert_plane_of(char *to, const char *from, int64_t n, int64_t head_dim, int keys, float to_scale,
                            float from_scale, const float *to_offset, const float *from_offset, int to_type,
                            int from_type) {
#define CASE(T, F)                         \
  if (to_type == T && from_type == F)      \
    return convert_plane(to, from, n, head_dim, keys, to_scale, from_scale, to_offset, from_offset, T, F);
  CASE(TYPE_E4M3, TYPE_BF16)
  CASE(TYPE_E4M3, TYPE_F32)
  CASE(TYPE_BF16, TYPE_F32)
  CASE(TYPE_F32, TYPE_BF16)
#undef CASE
  return convert_plane(to, from, n, head_dim, keys, to_scale, from_scale, to_offset, from_offset, to_type, from_type);
}

/* Copies the first `tokens` tokens that lie in the pages `sources` into the pages `targets`; a page is `planes` times
 * [page_size, head_dim], keys of all heads, then values, a layer; scales (null: 1) are one a plane, offsets (null: 0) one
 * row [head_dim] a plane of keys. Returns 0, or 1 + the index of the first page with a NaN that became a code. */
int64_t EXPORT(tritone_convert_pages)(const char *from, const int64_t *sources, const float *from_scales,
                                      const float *from_offsets, char *to, const int64_t *targets, const float *to_scales,
                                      const float *to_offsets, int64_t tokens, int64_t planes, int64_t kv_heads,
                                      int64_t page_size, int64_t head_dim, int from_type, int to_type, int threads) {
  const int64_t count = (tokens + page_size - 1) / page_size, plane = page_size * head_dim;
  int64_t first = count;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(min : first)
  for (int64_t p = 0; p < count; p++) {
    const int64_t left = tokens - p * page_size, rows = left < page_size ? left : page_size;
    int nan = 0;
    for (int64_t h = 0; h < planes; h++) {
      const int keys = h / kv_heads % 2 == 0;
      const int64_t offset = (h / kv_heads / 2 * kv_heads + h % kv_heads) * head_dim;
      nan |= convert_plane_of(to + (targets[p] * planes + h) * plane * kv_size(to_type),
                              from + (sources[p] * planes + h) * plane * kv_size(from_type), rows * head_dim, head_dim,
                              keys, to_scales ? to_scales[h] : 1, from_scales ? from_scales[h] : 1,
                              keys && to_offsets ? to_offsets + offset : 0,
                              keys && from_offsets ? from_offsets + offset : 0, to_type, from_type);
    }
    if (nan && p < first) first = p;
  }
  return first < count ? 1 + first : 0;
}
