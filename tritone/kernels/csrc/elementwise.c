/* Row-wise kernels: residual addition with RMS norm, and SwiGLU's gate. */
#include "vector.h"

#include <math.h>

/* x [rows, n], residual [rows, n] updated in place or null, out [rows, n]. */
INLINE void norm_row(const void *x, void *residual, const void *weight, void *out, int64_t n, float eps, int type) {
  vf acc = splat(0), odd = splat(0);
  float tail = 0;
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    vf a = load16(x, i, type);
    if (residual) {
      a = rounded16(a + load16(residual, i, type), type);
      store16(residual, i, a, type);
    }
    vf sum = odd + a * a;
    odd = acc;
    acc = sum;
  }
  for (; i < n; i++) {
    float a = load1(x, i, type);
    if (residual) {
      store1(residual, i, a + load1(residual, i, type), type);
      a = load1(residual, i, type);
    }
    tail += a * a;
  }
  const void *in = residual ? residual : x;
  float scale = 1.0f / sqrtf((lane_sum(acc + odd) + tail) / (float)n + eps);
  for (i = 0; i + LANES <= n; i += LANES) {
    vf a = rounded16(load16(in, i, type) * scale, type);
    store16(out, i, a * load16(weight, i, type), type);
  }
  for (; i < n; i++) store1(out, i, rounded1(load1(in, i, type) * scale, type) * load1(weight, i, type), type);
}

void EXPORT(tritone_add_rms_norm)(const char *x, char *residual, const void *weight, char *out, int64_t rows, int64_t n,
                                  float eps, int type, int threads) {
  int64_t row = n * type_size(type);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows; r++) {
    char *res = residual ? residual + r * row : 0;
    if (type == TYPE_F32) norm_row(x + r * row, res, weight, out + r * row, n, eps, TYPE_F32);
    else norm_row(x + r * row, res, weight, out + r * row, n, eps, TYPE_BF16);
  }
}

/* gate_up [2n] -> out [n] = silu(gate) * up, with silu rounded to the activation type as the reference does. */
INLINE void silu_row(const void *gate_up, void *out, int64_t n, int type) {
  const void *up = (const char *)gate_up + n * type_size(type);
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    vf g = load16(gate_up, i, type);
    vf s = g / (1.0f + vexp(-g));
    store16(out, i, rounded16(s, type) * load16(up, i, type), type);
  }
  for (; i < n; i++) {
    float g = load1(gate_up, i, type);
    float s = g / (1.0f + vexp(splat(-g))[0]);
    store1(out, i, rounded1(s, type) * load1(up, i, type), type);
  }
}

void EXPORT(tritone_silu_mul)(const char *gate_up, char *out, int64_t rows, int64_t n, int type, int threads) {
  int64_t row = n * type_size(type);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows; r++) {
    if (type == TYPE_F32) silu_row(gate_up + 2 * r * row, out + r * row, n, TYPE_F32);
    else silu_row(gate_up + 2 * r * row, out + r * row, n, TYPE_BF16);
  }
}
