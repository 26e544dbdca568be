/* y = x W^T + bias with INT4 or INT8 weights and activations rounded to INT8 row by row.
 *
 * A row of x becomes codes of -127 to 127 and one scale, from that row alone. Inputs are taken in pieces: a group, or 256
 * inputs of a longer one. Within a piece the sum of (code - zero) * x is an exact integer, below 2^24 and so exact in
 * float32; the pieces, times their scales, are added up in ascending order. A row's bits are therefore its own, and the
 * same for every tile below.
 */
#include "quant_vector.h"

#define PIECE 256

struct activations {
  int8_t *codes;  /* [rows, stride], zeros past k */
  int32_t *sums;  /* [rows, pieces]: minus the sum of the codes of a piece, times the zero if there is only one */
  float *scales;  /* [rows] */
  int64_t stride, pieces, piece;
};

/* The stride is an odd number of cache lines, so that the rows of a tile do not fall into the same sets. */
static struct activations activations(char *scratch, int64_t rows, int64_t k, int64_t group) {
  struct activations a = {.stride = (whole(k, 64) / 64 | 1) * 64, .piece = group < PIECE ? group : PIECE};
  a.pieces = (k + a.piece - 1) / a.piece;
  a.codes = (int8_t *)scratch;
  a.sums = (int32_t *)(scratch + rows * a.stride);
  a.scales = (float *)(a.sums + rows * a.pieces);
  return a;
}

/* Bytes of scratch that `tritone_linear_int` needs. */
int64_t EXPORT(tritone_linear_int_scratch)(int64_t rows, int64_t k, int64_t group) {
  const struct activations a = activations(0, rows, k, group);
  return rows * (a.stride + a.pieces * 4 + 4);
}

/* The largest magnitude; NaN or infinity if there is one, since their bits are larger than any number's. */
static float largest(const char *x, int64_t k, int type) {
  vi most = {0};
  int64_t i = 0;
  for (; i + LANES <= k; i += LANES) {
    vi bits = (vi)load16(x, i, type) & 0x7fffffff, more = bits > most;
    most = (bits & more) | (most & ~more);
  }
  int32_t result = 0;
  for (int l = 0; l < LANES; l++) result = most[l] > result ? most[l] : result;
  for (; i < k; i++) {
    float value = load1(x, i, type);
    int32_t bits;
    memcpy(&bits, &value, 4);
    bits &= 0x7fffffff;
    result = bits > result ? bits : result;
  }
  float value;
  memcpy(&value, &result, 4);
  return value;
}

/* To nearest, ties to even. The product must be rounded before: no addition may follow that would be fused with it. */
INLINE void round_codes(const char *x, float factor, int8_t *codes, int64_t k, int type) {
  int64_t i = 0;
#ifdef __AVX512F__
  for (; i + LANES <= k; i += LANES)
    _mm_storeu_si128((__m128i *)(codes + i),
                     _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)(load16(x, i, type) * factor))));
#endif
  for (; i < k; i++) codes[i] = (int8_t)__builtin_lrintf(load1(x, i, type) * factor);
}

/* A row with NaN or infinity gets zeros and the scale NaN, which makes its whole result NaN. */
static void quantize_row(const struct activations *a, int64_t row, const char *x, int64_t k, int zero, int type) {
  int8_t *codes = a->codes + row * a->stride;
  float most = largest(x, k, type);
  most = most < 1e-30f ? 1e-30f : most;
  const int finite = most <= 3.402823466e38f;
  a->scales[row] = finite ? most / 127.0f : __builtin_nanf("");
  memset(codes + k / LANES * LANES, 0, (size_t)(a->stride - k / LANES * LANES));
  if (!finite) memset(codes, 0, (size_t)k);
  else if (type == TYPE_F32) round_codes(x, 127.0f / most, codes, k, TYPE_F32);
  else round_codes(x, 127.0f / most, codes, k, TYPE_BF16);
  for (int64_t p = 0; p < a->pieces; p++) {
    const int64_t begin = p * a->piece, end = begin + a->piece < k ? begin + a->piece : k;
    int32_t sum = 0;
    for (int64_t i = begin; i < end; i++) sum += codes[i];
    a->sums[row * a->pieces + p] = -zero * sum;
  }
}

#define FEW 2 /* rows for which a tile keeps two sums of each kind, since each addition waits for the one before */

/* How a tile finds its codes: as packed INT4, or as bytes of at most 15 or 255. */
enum { NIBBLES, NARROW, WIDE };

/* R rows by eight inputs; `x` is where the first row's are. */
INLINE void int_step(qi acc[2][TILE_ROWS][QVECTORS], const uint8_t *codes, const int8_t *x, int64_t stride,
                     const int form, const int R) {
  for (int half = 0; half < 2; half++) {
    qu w[QVECTORS];
    for (int v = 0; v < QVECTORS; v++) {
      w[v] = *(const qu_any *)(codes + v * QLANES * 4 + (form == NIBBLES ? 0 : half * PANEL * 4));
      if (form == NIBBLES) w[v] = (half ? w[v] >> 4 : w[v]) & 0x0f0f0f0f;
    }
    for (int r = 0; r < R; r++) {
      uint32_t quad;
      memcpy(&quad, x + r * stride + half * 4, 4);
      for (int v = 0; v < QVECTORS; v++) {
        qi *sum = &acc[R <= FEW ? half : 0][r][v];
        *sum = dot4(*sum, w[v], quad + (qu){0}, form != WIDE);
      }
    }
  }
}

/* R rows by one panel over inputs `begin` to `end`, whose codes are at `codes`; adds to sums [R, PANEL], or starts them.
 * `ahead`, if not null, is where as many codes are that are wanted soon. */
INLINE void int_tile(const struct quantized *q, const struct activations *a, const char *panel, int64_t row,
                     const uint8_t *codes, int64_t begin, int64_t end, const uint8_t *ahead, float *sums, const int form,
                     const int R) {
  const int64_t stride = a->stride, pieces = a->pieces, piece = a->piece, group = q->group;
  const int64_t read = PANEL * (form == NIBBLES ? 4 : 8), fetch = PANEL * (form == WIDE ? 8 : 4); /* bytes a step */
  const int scale_type = q->scale_type, asymmetric = q->asymmetric;
  const int8_t *x = a->codes + row * stride + begin;
  const int32_t *totals = a->sums + row * pieces + begin / piece;
  const char *zeros = panel + q->zeros_at + begin / group * PANEL;
  int64_t at = begin / group * PANEL, left = group - begin % group;
  for (int64_t k = begin; k < end; k += piece, totals++) {
    const int64_t size = end - k < piece ? end - k : piece;
    qi acc[2][TILE_ROWS][QVECTORS];
    for (int v = 0; v < QVECTORS; v++)
      for (int r = 0; r < R; r++) {
        acc[1][r][v] = (qi){0};
        acc[0][r][v] = (qi){0} + totals[r * pieces];
        if (asymmetric) acc[0][r][v] *= (qi)bytes_to_ints(zeros + v * QLANES);
      }
    int64_t i = 0;
    if (R <= FEW)
      for (; i + 32 <= size; i += 32)
        for (int j = 0; j < 32; j += 8, codes += read, x += 8) int_step(acc, codes, x, stride, form, R);
    for (; i < size; i += 8, codes += read, x += 8) {
      int_step(acc, codes, x, stride, form, R);
      if (R == TILE_ROWS && form != NIBBLES && ahead) {
        for (int64_t b = 0; b < fetch; b += 64) __builtin_prefetch(ahead + b, 0, 2);
        ahead += fetch;
      }
    }
    for (int v = 0; v < QVECTORS; v++) {
      const qf scale = load_scales(panel, at + v * QLANES, scale_type);
      for (int r = 0; r < R; r++) {
        qf_any *sum = (qf_any *)(sums + r * PANEL + v * QLANES);
        const qi dot = R <= FEW ? acc[0][r][v] + acc[1][r][v] : acc[0][r][v];
        *sum = add_product(k ? (qf)*sum : (qf){0}, __builtin_convertvector(dot, qf), scale);
      }
    }
    left -= size;
    if (left <= 0) at += PANEL, zeros += PANEL, left = group;
  }
}

#define INT_TILE(form, R) \
  case R: int_tile(q, a, panel, row, codes, begin, end, ahead, sums, form, R); break;
#if TILE_ROWS > 6
#define INT_TILES(form) \
  INT_TILE(form, 1) INT_TILE(form, 2) INT_TILE(form, 3) INT_TILE(form, 4) INT_TILE(form, 5) INT_TILE(form, 6) \
  INT_TILE(form, 7) INT_TILE(form, 8)
#elif TILE_ROWS > 2
#define INT_TILES(form) \
  INT_TILE(form, 1) INT_TILE(form, 2) INT_TILE(form, 3) INT_TILE(form, 4) INT_TILE(form, 5) INT_TILE(form, 6)
#else
#define INT_TILES(form) INT_TILE(form, 1) INT_TILE(form, 2)
#endif

#define INT_ROWS(name, form)                                                                                         \
  static void name(const struct quantized *q, const struct activations *a, const char *panel, int64_t row,          \
                   const uint8_t *codes, int64_t begin, int64_t end, const uint8_t *ahead, float *sums,            \
                   int64_t rows) {                                                                                  \
    switch (rows) { INT_TILES(form) }                                                                                \
  }
INT_ROWS(nibble_rows, NIBBLES)
INT_ROWS(narrow_rows, NARROW)
INT_ROWS(wide_rows, WIDE)

/* INT4 codes of `inputs` (a multiple of 8) as bytes. */
static void spread_nibbles(const uint8_t *codes, uint8_t *bytes, int64_t inputs) {
  for (int64_t k = 0; k < inputs; k += 8, bytes += PANEL * 8, codes += PANEL * 4)
    for (int64_t i = 0; i < PANEL * 4; i += 4 * QLANES) {
      const qu both = *(const qu_any *)(codes + i);
      *(qu_any *)(bytes + i) = both & 0x0f0f0f0f;
      *(qu_any *)(bytes + PANEL * 4 + i) = (both >> 4) & 0x0f0f0f0f;
    }
}

/* `rows` rows from `row` on by one panel. For more than one tile of rows INT4 codes are made bytes once, block by block. */
static void int_panel(const struct quantized *q, const struct activations *a, int64_t p, const void *bias, char *out,
                      int64_t row, int64_t rows, int type) {
  float sums[BLOCK_ROWS * PANEL];
  uint8_t bytes[PIECE * PANEL] __attribute__((aligned(64)));
  const char *panel = q->data + p * q->panel_bytes;
  const int64_t once = rows <= TILE_ROWS, block = once ? q->k_padded : PIECE / a->piece * a->piece;
  for (int64_t begin = 0; begin < q->k_padded; begin += block) {
    const int64_t end = begin + block < q->k_padded ? begin + block : q->k_padded;
    const uint8_t *codes = codes_at(q, panel, begin), *ahead = codes_at(q, panel, end);
    if (q->code == CODE_INT4 && !once) spread_nibbles(codes, bytes, end - begin), codes = bytes;
    for (int64_t r = 0; r < rows; r += TILE_ROWS) {
      const int64_t some = rows - r < TILE_ROWS ? rows - r : TILE_ROWS;
      if (q->code != CODE_INT4) wide_rows(q, a, panel, row + r, codes, begin, end, r ? 0 : ahead, sums + r * PANEL, some);
      else if (once) nibble_rows(q, a, panel, row + r, codes, begin, end, r ? 0 : ahead, sums + r * PANEL, some);
      else narrow_rows(q, a, panel, row + r, codes, begin, end, r ? 0 : ahead, sums + r * PANEL, some);
    }
  }
  const int64_t first = p * PANEL, width = q->n - first < PANEL ? q->n - first : PANEL;
  for (int64_t r = 0; r < rows; r++) {
    float *sum = sums + r * PANEL;
    for (int64_t i = 0; i < width; i++) sum[i] = sum[i] * a->scales[row + r] + (bias ? load1(bias, first + i, type) : 0.0f);
    store_row(out + ((row + r) * q->n + first) * type_size(type), sum, width, type);
  }
}

/* x [rows, k], out [rows, n], bias [n] or null, all of `type`; w as `tritone_quantized_pack` wrote it, INT4 or INT8. */
void EXPORT(tritone_linear_int)(const char *x, const char *w, const void *bias, char *out, char *scratch, int64_t rows,
                                int64_t n, int64_t k, int64_t group, int code, int asymmetric, int scale_type, int type,
                                int threads) {
  const struct quantized q = quantized(w, n, k, group, code, asymmetric, scale_type);
  const struct activations a = activations(scratch, rows, k, group);
  const int64_t panels = (n + PANEL - 1) / PANEL, row_bytes = k * type_size(type);
  const int zero = asymmetric ? 1 : code_zero(&q);
  const int alone = threads == 1 || rows < TILE_ROWS; /* waking a thread for this takes longer than doing it */
  if (alone)
    for (int64_t r = 0; r < rows; r++) quantize_row(&a, r, x + r * row_bytes, k, zero, type);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    if (!alone) {
#pragma omp for schedule(static)
      for (int64_t r = 0; r < rows; r++) quantize_row(&a, r, x + r * row_bytes, k, zero, type);
    }
    for (int64_t r = 0; r < rows; r += BLOCK_ROWS) {
#pragma omp for schedule(static) nowait
      for (int64_t p = 0; p < panels; p++)
        int_panel(&q, &a, p, bias, out, r, rows - r < BLOCK_ROWS ? rows - r : BLOCK_ROWS, type);
    }
  }
}
