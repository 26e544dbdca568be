/* y = x W^T + bias with weights packed into panels of PANEL outputs, and its bfloat16 form on AVX512-BF16.
 *
 * Every output is one running float32 sum over k in ascending order (in pairs with AVX512-BF16), whatever the number of
 * rows: a row's bits are its own. Splitting k into blocks keeps this, because the running sums are stored in float32.
 */
#include "vector.h"

#if defined(__AVX512F__)
#define TILE_ROWS 8
#define PANEL_VECTORS 3
#elif defined(__AVX2__)
#define TILE_ROWS 6
#define PANEL_VECTORS 1
#else
#define TILE_ROWS 2
#define PANEL_VECTORS 1
#endif
#define PANEL (PANEL_VECTORS * LANES)
#define BLOCK_ROWS 128
#define BLOCK_BYTES 4096 /* of one row of x: a tile of rows then stays in the first or second cache */

/* Inputs taken together: one 32-bit pair of bfloat16 where the CPU multiplies such pairs. */
#ifdef __AVX512BF16__
#define STEP(type) ((type) == TYPE_BF16 ? 2 : 1)
#else
#define STEP(type) 1
#endif

INLINE vr multiply_add(vr sum, const char *x, const char *w, int type) {
#ifdef __AVX512BF16__
  if (type == TYPE_BF16) {
    int32_t pair;
    memcpy(&pair, x, 4);
    return (vr)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_set1_epi32(pair));
  }
#endif
  return sum + load_register(w, 0, type) * spread(x, 0, type);
}

/* R rows by one panel over `steps`; sums [R, PANEL] are started from zero if `first`. `ahead` is memory wanted soon. */
INLINE void panel_tile(const char *x, int64_t x_row, const char *w, const char *ahead, int64_t steps, float *sums,
                       int first, int type, const int R) {
  enum { WIDE = PANEL / REGISTER };
  vr acc[TILE_ROWS][WIDE];
  const int64_t x_step = STEP(type) * type_size(type), w_step = PANEL * x_step;
  for (int r = 0; r < R; r++)
    for (int v = 0; v < WIDE; v++) acc[r][v] = first ? (vr){0} : load_register(sums + r * PANEL, v * REGISTER, TYPE_F32);
  for (int64_t s = 0; s < steps; s++) {
    if (R == TILE_ROWS) __builtin_prefetch(ahead + s * 64);
    for (int r = 0; r < R; r++)
      for (int v = 0; v < WIDE; v++)
        acc[r][v] = multiply_add(acc[r][v], x + r * x_row + s * x_step, w + s * w_step + v * (w_step / WIDE), type);
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < WIDE; v++) store_register(sums + r * PANEL, v * REGISTER, acc[r][v]);
}

INLINE void panel_rows(const char *x, int64_t x_row, const char *w, const char *ahead, int64_t steps, float *sums,
                       int first, int type, int64_t rows) {
  switch (rows) {
#define CASE(R) \
  case R: panel_tile(x, x_row, w, ahead, steps, sums, first, type, R); break;
    CASE(1) CASE(2)
#if TILE_ROWS > 2
    CASE(3) CASE(4) CASE(5) CASE(6)
#endif
#if TILE_ROWS > 6
    CASE(7) CASE(8)
#endif
  }
}

INLINE void linear_panel(const char *x, const char *w, const void *bias, char *out, int64_t rows, int64_t n, int64_t k,
                         int64_t panel, int type) {
  float sums[BLOCK_ROWS * PANEL];
  const int64_t size = type_size(type), step = STEP(type), steps = k / step, block = BLOCK_BYTES / size / step;
  const int64_t w_step = PANEL * step * size;
  w += panel * steps * w_step;
  for (int64_t s = 0; s < steps; s += block) {
    const int64_t now = steps - s < block ? steps - s : block;
    for (int64_t r = 0; r < rows; r += TILE_ROWS) {
      /* the first tiles of a block fetch the weights that follow it, a cache line a step, while they compute */
      const char *ahead = w + (s + now) * w_step + r / TILE_ROWS * now * 64;
      panel_rows(x + r * k * size + s * step * size, k * size, w + s * w_step, ahead, now, sums + r * PANEL, s == 0, type,
                 rows - r < TILE_ROWS ? rows - r : TILE_ROWS);
    }
  }
  const int64_t begin = panel * PANEL, width = n - begin < PANEL ? n - begin : PANEL;
  for (int64_t r = 0; r < rows; r++) {
    float *sum = sums + r * PANEL;
    if (bias)
      for (int64_t i = 0; i < width; i++) sum[i] += load1(bias, begin + i, type);
    store_row(out + (r * n + begin) * size, sum, width, type);
  }
}

/* x [rows, k], out [rows, n], bias [n] or null, all of `type`; w as `tritone_pack` wrote it. */
void EXPORT(tritone_linear)(const char *x, const char *w, const void *bias, char *out, int64_t rows, int64_t n, int64_t k,
                            int type, int threads) {
  const int64_t panels = (n + PANEL - 1) / PANEL, size = type_size(type);
#pragma omp parallel num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows; r += BLOCK_ROWS) {
    const int64_t some = rows - r < BLOCK_ROWS ? rows - r : BLOCK_ROWS;
#pragma omp for schedule(static) nowait
    for (int64_t p = 0; p < panels; p++) {
      if (type == TYPE_F32) linear_panel(x + r * k * size, w, bias, out + r * n * size, some, n, k, p, TYPE_F32);
      else linear_panel(x + r * k * size, w, bias, out + r * n * size, some, n, k, p, TYPE_BF16);
    }
  }
}

/* Bytes that the packed form of [n, k] weights takes; 0 if k cannot be packed. */
int64_t EXPORT(tritone_packed_bytes)(int64_t n, int64_t k, int type) {
  return k % STEP(type) ? 0 : (n + PANEL - 1) / PANEL * PANEL * k * type_size(type);
}

/* w [n, k] -> [panels][k / step][PANEL][step], outputs past n zero. */
void EXPORT(tritone_pack)(const char *w, char *packed, int64_t n, int64_t k, int type, int threads) {
  const int64_t unit = STEP(type) * type_size(type), steps = k / STEP(type), panels = (n + PANEL - 1) / PANEL;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t p = 0; p < panels; p++)
    for (int64_t i = 0; i < PANEL; i++)
      for (int64_t s = 0; s < steps; s++) {
        char *to = packed + ((p * steps + s) * PANEL + i) * unit;
        if (p * PANEL + i < n) memcpy(to, w + ((p * PANEL + i) * steps + s) * unit, (size_t)unit);
        else memset(to, 0, (size_t)unit);
      }
}
