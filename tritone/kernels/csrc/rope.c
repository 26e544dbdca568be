/* Head norm, rotary embedding and the write of new keys and values into their pages. */
#include "vector.h"

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
};

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
      store_row(head, x, d, type);
    }
    if (kv_head < 0) continue;
    if (is_v) kv_head -= a->kv_heads;
    int64_t at = slot / a->page_size * a->page_stride + (is_v ? a->kv_stride : 0) + kv_head * a->head_stride +
                 slot % a->page_size * d;
    if (type != kv_type) load_row(x, head, d, type);
    store_row(kv + at * type_size(kv_type), x, d, kv_type);
  }
}

/* Returns 0, or 1 + the index of the first token whose slot or position lies outside its table (nothing is written then). */
int64_t EXPORT(tritone_rope_append)(char *qkv, const int32_t *positions, const int64_t *slots, const float *cos,
                                    const float *sin, char *kv, const void *q_norm, const void *k_norm, int64_t tokens,
                                    int64_t qkv_stride, int64_t q_heads, int64_t kv_heads, int64_t head_dim,
                                    int64_t page_size, int64_t pages, int64_t table_rows, int64_t page_stride,
                                    int64_t kv_stride, int64_t head_stride, float eps, int type, int kv_type,
                                    int threads) {
  struct rope_args a = {.q_heads = q_heads, .kv_heads = kv_heads, .head_dim = head_dim,
                        .page_size = page_size, .page_stride = page_stride, .kv_stride = kv_stride,
                        .head_stride = head_stride, .eps = eps};
  for (int64_t t = 0; t < tokens; t++)
    if (slots[t] < 0 || slots[t] >= pages * page_size || positions[t] < 0 || positions[t] >= table_rows) return 1 + t;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < tokens; t++) {
    char *row = qkv + t * qkv_stride * type_size(type);
    const float *c = cos + positions[t] * (head_dim / 2), *s = sin + positions[t] * (head_dim / 2);
    if (type == TYPE_F32 && kv_type == TYPE_F32) rope_token(&a, row, kv, slots[t], c, s, q_norm, k_norm, TYPE_F32, TYPE_F32);
    else if (type == TYPE_F32) rope_token(&a, row, kv, slots[t], c, s, q_norm, k_norm, TYPE_F32, TYPE_BF16);
    else if (kv_type == TYPE_F32) rope_token(&a, row, kv, slots[t], c, s, q_norm, k_norm, TYPE_BF16, TYPE_F32);
    else rope_token(&a, row, kv, slots[t], c, s, q_norm, k_norm, TYPE_BF16, TYPE_BF16);
  }
  return 0;
}
