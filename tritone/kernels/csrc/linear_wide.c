/* y = x W^T + bias with quantised weights and activations as they are.
 *
 * Blocks of codes are widened, without their scales and therefore exactly, into the layout of the dense tiles, which sum
 * each group of inputs in float32; a group's sums, times their scales, are added up in ascending order. As in the dense
 * product, nothing depends on the number of rows.
 */
#include "quant_vector.h"

#define WIDE_ROWS 256     /* more than in the dense product: each block of rows widens all weights anew */
#define WIDE_INPUTS 128 /* widened at a time; a multiple of 8 */

/* Sixteen outputs by four inputs, in 32-bit lanes, as `type`; `to` is where the first of them belongs. */
INLINE void put_quads(char *to, const vf *values, int type) {
#ifdef __AVX512BF16__
  if (type == TYPE_BF16) {
    for (int i = 0; i < 4; i += 2)
      *(vf_any *)(to + i / 2 * PANEL * 4) = (vf)(((vu)values[i] >> 16) | ((vu)values[i + 1] & 0xffff0000));
    return;
  }
#endif
  for (int i = 0; i < 4; i++) {
    char *at = to + i * PANEL * type_size(type);
    if (type == TYPE_F32) *(vf_any *)at = values[i];
    else *(vh_any *)at = __builtin_convertvector((vu)values[i] >> 16, vh);
  }
}

#ifdef __AVX512BF16__
/* Four e4m3 codes in each 32-bit lane to two vectors of bfloat16 pairs. A code's byte is put on top of 16 bits. Subnormals
 * come from a table, which is asked for numbers below 8 only. */
INLINE void put_e4m3_pairs(char *to, __m512i codes) {
  static const uint16_t small[32] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  const __m512i table = _mm512_loadu_si512(small);
  for (int i = 0; i < 2; i++) {
    const __m512i order = i ? _mm512_set4_epi32(0x0f800e80, 0x0b800a80, 0x07800680, 0x03800280)
                            : _mm512_set4_epi32(0x0d800c80, 0x09800880, 0x05800480, 0x01800080);
    const __m512i top = _mm512_shuffle_epi8(codes, order);
    const __m512i bits = _mm512_and_si512(_mm512_srli_epi16(top, 4), _mm512_set1_epi16(0x07f0));
    const __mmask32 tiny = _mm512_testn_epi16_mask(bits, _mm512_set1_epi16(0x0780));
    __m512i value = _mm512_add_epi16(bits, _mm512_set1_epi16(0x3c00));
    value = _mm512_mask_permutexvar_epi16(value, tiny, _mm512_srli_epi16(bits, 4), table);
    value = _mm512_ternarylogic_epi32(_mm512_set1_epi16((short)0x8000), top, value, 0xca); /* sign from top */
    _mm512_storeu_si512(to + i * PANEL * 4, value);
  }
}
#endif

#ifdef __AVX512BF16__
/* The same for unsigned codes of at most 15 less their zeros, by a table of the differences -15 to 16. */
INLINE void put_int4_pairs(char *to, __m512i codes, __m512i zeros) {
  static const uint16_t differences[32] = {0xc170, 0xc160, 0xc150, 0xc140, 0xc130, 0xc120, 0xc110, 0xc100,
                                           0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0,
                                           0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100,
                                           0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x4180};
  const __m512i table = _mm512_loadu_si512(differences);
  const __m512i base = _mm512_sub_epi16(_mm512_set1_epi16(15), _mm512_or_si512(zeros, _mm512_slli_epi32(zeros, 16)));
  for (int i = 0; i < 2; i++) {
    const __m512i order = i ? _mm512_set4_epi32((int)0x800f800e, (int)0x800b800a, (int)0x80078006, (int)0x80038002)
                            : _mm512_set4_epi32((int)0x800d800c, (int)0x80098008, (int)0x80058004, (int)0x80018000);
    const __m512i index = _mm512_add_epi16(_mm512_shuffle_epi8(codes, order), base);
    _mm512_storeu_si512(to + i * PANEL * 4, _mm512_permutexvar_epi16(index, table));
  }
}
#endif

/* Sixteen outputs by four inputs from their codes; `zero` is what to take off. */
INLINE void widen_quads(char *to, vu codes, vi zero, int code, int type) {
  vf values[4];
#ifdef __AVX512BF16__
  if (code == CODE_E4M3 && type == TYPE_BF16) {
    put_e4m3_pairs(to, (__m512i)codes);
    return;
  }
  if (code == CODE_INT4 && type == TYPE_BF16) {
    put_int4_pairs(to, (__m512i)codes, (__m512i)zero);
    return;
  }
#endif
  for (int i = 0; i < 4; i++) {
    const vu one = (codes >> 8 * i) & 0xff;
    values[i] = code == CODE_E4M3 ? widen_e4m3(one) : __builtin_convertvector((vi)one - zero, vf);
  }
  put_quads(to, values, type);
}

/* Inputs `begin` to `begin + inputs` (both multiples of 8) of one group of a panel. */
INLINE void widen_block(const struct quantized *q, const char *panel, int64_t group, int64_t begin, int64_t inputs, char *to,
                        const int code, const int type) {
  typedef uint8_t zeros_any __attribute__((vector_size(16), aligned(1), may_alias));
  typedef vu vu_any __attribute__((aligned(1), may_alias));
  const uint8_t *codes = codes_at(q, panel, begin);
  const int64_t quad = PANEL * 4 * type_size(type);
  vi zeros[PANEL_VECTORS];
  for (int v = 0; v < PANEL_VECTORS; v++) {
    zeros[v] = (vi){0} + code_zero(q);
    if (q->asymmetric)
      zeros[v] = __builtin_convertvector(*(const zeros_any *)(panel + q->zeros_at + group * PANEL + v * LANES), vi);
  }
  for (int64_t k = 0; k < inputs; k += code == CODE_INT4 ? 8 : 4, to += code == CODE_INT4 ? 2 * quad : quad)
    for (int v = 0; v < PANEL_VECTORS; v++, codes += 64) {
      char *at = to + v * LANES * type_size(type) * STEP(type);
      const vu found = *(const vu_any *)codes;
      if (code == CODE_INT4) {
        widen_quads(at, found & 0x0f0f0f0f, zeros[v], code, type);
        widen_quads(at + quad, (found >> 4) & 0x0f0f0f0f, zeros[v], code, type);
      } else widen_quads(at, found, zeros[v], code, type);
    }
}

static void widen(const struct quantized *q, const char *panel, int64_t group, int64_t begin, int64_t inputs, char *to,
                  int type) {
#define WIDEN_BLOCK(code, type) widen_block(q, panel, group, begin, inputs, to, code, type)
  switch (q->code * 2 + type) {
    case CODE_INT4 * 2 + TYPE_F32: WIDEN_BLOCK(CODE_INT4, TYPE_F32); break;
    case CODE_INT4 * 2 + TYPE_BF16: WIDEN_BLOCK(CODE_INT4, TYPE_BF16); break;
    case CODE_INT8 * 2 + TYPE_F32: WIDEN_BLOCK(CODE_INT8, TYPE_F32); break;
    case CODE_INT8 * 2 + TYPE_BF16: WIDEN_BLOCK(CODE_INT8, TYPE_BF16); break;
    case CODE_E4M3 * 2 + TYPE_F32: WIDEN_BLOCK(CODE_E4M3, TYPE_F32); break;
    default: WIDEN_BLOCK(CODE_E4M3, TYPE_BF16);
  }
}

/* sums [rows, PANEL] += partial * scales of a group, or start them. */
static void add_scaled(const struct quantized *q, const char *panel, int64_t group, const float *partial, float *sums,
                       int64_t rows) {
  qf scale[QVECTORS];
  for (int v = 0; v < QVECTORS; v++) scale[v] = load_scales(panel, group * PANEL + v * QLANES, q->scale_type);
  for (int64_t r = 0; r < rows; r++)
    for (int v = 0; v < QVECTORS; v++) {
      qf_any *sum = (qf_any *)(sums + r * PANEL + v * QLANES);
      const qf part = (qf) * (const qf_any *)(partial + r * PANEL + v * QLANES);
      *sum = add_product(group ? (qf)*sum : (qf){0}, part, scale[v]);
    }
}

INLINE void wide_panel(const struct quantized *q, const char *x, const void *bias, char *out, int64_t rows, int64_t p,
                       const int type) {
  float sums[WIDE_ROWS * PANEL], partial[WIDE_ROWS * PANEL];
  char wide[WIDE_INPUTS * PANEL * 4] __attribute__((aligned(64)));
  const char *panel = q->data + p * q->panel_bytes;
  const int64_t size = type_size(type);
  for (int64_t group = 0; group < q->groups; group++) {
    const int64_t begin = group * q->group, end = begin + q->group < q->k ? begin + q->group : q->k;
    for (int64_t k = begin; k < end; k += WIDE_INPUTS) {
      const int64_t inputs = end - k < WIDE_INPUTS ? end - k : WIDE_INPUTS;
      widen(q, panel, group, k, whole(inputs, 8), wide, type);
      for (int64_t r = 0; r < rows; r += TILE_ROWS) {
        const int64_t some = rows - r < TILE_ROWS ? rows - r : TILE_ROWS;
        const char *ahead = (const char *)codes_at(q, panel, k + whole(inputs, 8)) + r / TILE_ROWS * inputs / STEP(type) * 64;
        panel_rows(x + (r * q->k + k) * size, q->k * size, wide, ahead, inputs / STEP(type), partial + r * PANEL, k == begin,
                   type, some);
        if (k + inputs == end) add_scaled(q, panel, group, partial + r * PANEL, sums + r * PANEL, some);
      }
    }
  }
  const int64_t first = p * PANEL, width = q->n - first < PANEL ? q->n - first : PANEL;
  for (int64_t r = 0; r < rows; r++) {
    float *sum = sums + r * PANEL;
    if (bias)
      for (int64_t i = 0; i < width; i++) sum[i] += load1(bias, first + i, type);
    store_row(out + (r * q->n + first) * size, sum, width, type);
  }
}

static void wide_panel_f32(const struct quantized *q, const char *x, const void *bias, char *out, int64_t rows, int64_t p) {
  wide_panel(q, x, bias, out, rows, p, TYPE_F32);
}

static void wide_panel_bf16(const struct quantized *q, const char *x, const void *bias, char *out, int64_t rows, int64_t p) {
  wide_panel(q, x, bias, out, rows, p, TYPE_BF16);
}

/* x [rows, k], out [rows, n], bias [n] or null, all of `type`; w as `tritone_quantized_pack` wrote it. k is a multiple of
 * what `tritone_packed_bytes` asks for, the group a multiple of 8 or at least k. */
void EXPORT(tritone_linear_wide)(const char *x, const char *w, const void *bias, char *out, int64_t rows, int64_t n,
                                 int64_t k, int64_t group, int code, int asymmetric, int scale_type, int type, int threads) {
  const struct quantized q = quantized(w, n, k, group, code, asymmetric, scale_type);
  const int64_t panels = (n + PANEL - 1) / PANEL, size = type_size(type);
#pragma omp parallel num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows; r += WIDE_ROWS) {
    const int64_t some = rows - r < WIDE_ROWS ? rows - r : WIDE_ROWS;
#pragma omp for schedule(static) nowait
    for (int64_t p = 0; p < panels; p++)
      (type == TYPE_F32 ? wide_panel_f32 : wide_panel_bf16)(&q, x + r * k * size, bias, out + r * n * size, some, p);
  }
}
