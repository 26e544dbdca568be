/* Conversion from and to e4m3 (sign, 4 exponent bits with bias 7, 3 mantissa bits; no infinity, 0x7f and 0xff are NaN).
 *
 * Every code is exact in bfloat16, so both directions agree in all instruction sets to the bit.
 */
#ifndef TRITONE_FP8_H
#define TRITONE_FP8_H

#include "vector.h"

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

/* The third type of KV pages, after those of vector.h. */
enum { TYPE_E4M3 = 2 };
INLINE int64_t kv_size(int type) { return type == TYPE_E4M3 ? 1 : type_size(type); }

typedef uint8_t vb __attribute__((vector_size(16)));
typedef int8_t vsb_any __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint8_t vb_any __attribute__((vector_size(16), aligned(1), may_alias));

/* Nearest code, ties to even, saturating at +-448; NaN stays NaN. */
INLINE vb e4m3_codes(vf x) {
  vu sign = (vu)x >> 24 & 0x80, nan = (vu)(x != x);
  vf size = vmin((vf)((vu)x & 0x7fffffff), splat(448));
  vu u = (vu)size;
  vu normal = ((u + 0x7ffff + ((u >> 20) & 1)) >> 20) - (120 << 3);
  /* below 2^-6 codes are multiples of 2^-9, the last place of a float between 2^14 and 2^15 */
  vu tiny = (vu)(size + 0x1p14f) - (vu)splat(0x1p14f);
  vu below = (vu)(size < 0x1p-6f);
  vu code = (normal & ~below) | (tiny & below);
  return __builtin_convertvector(((code & ~nan) | (nan & 0x7f)) | sign, vb);
}

INLINE vf e4m3_load16(const void *p, int64_t i) {
#if defined(__F16C__) || defined(__AVX512F__)
  /* as half precision, which has the same layout with two more exponent bits: exact, and no denormal floats arise */
  __m128i codes = _mm_loadu_si128((const __m128i_u *)((const char *)p + i));
  __m256i half = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7), _mm256_set1_epi16((short)0xbf80));
#ifdef __AVX512F__
  vf x = (vf)_mm512_cvtph_ps(half) * 256.0f;
#else
  vf x;
  __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(half)), high = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
  memcpy(&x, &low, 32), memcpy((char *)&x + 32, &high, 32);
  x *= 256.0f;
#endif
#else
  vu wide = (vu)__builtin_convertvector(*(const vsb_any *)((const char *)p + i), vi);
  vf x = (vf)((wide << 20) & 0x87f00000u) * 0x1p120f;
#endif
  return (vf)((vi)x | (vi)(x * x > 448.0f * 448.0f)); /* the NaN codes came out as +-480 */
}

/* Any number of codes of values / scale. Gives 1 if there was a NaN among the values, else 0. */
INLINE int store_codes(void *to, const void *from, int64_t n, float scale, int type) {
  const uint32_t mantissa = 0x7fffff;
  uint32_t bits;
  memcpy(&bits, &scale, 4);
  const int exact = !(bits & mantissa); /* the reciprocal of a power of two: multiplying gives the same number */
  const float inverse = 1.0f / scale;
  vi nan = {0};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    vf x = load16(from, i, type);
    nan |= x != x;
    *(vb_any *)((uint8_t *)to + i) = e4m3_codes(exact ? x * inverse : x / scale);
  }
  if (i < n) {
    float last[LANES] = {0};
    for (int64_t j = i; j < n; j++) last[j - i] = load1(from, j, type);
    vf x = load16(last, 0, TYPE_F32);
    nan |= x != x;
    vb codes = e4m3_codes(x / scale);
    memcpy((uint8_t *)to + i, &codes, (size_t)(n - i));
  }
  return lane_max((vf)(nan & (vi)splat(1))) != 0;
}

/* n values of codes * scale as floats (scale 1: exactly the codes' values). */
INLINE void load_codes(float *to, const void *from, int64_t n, float scale) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store16(to, i, e4m3_load16(from, i) * scale, TYPE_F32);
  if (i < n) {
    uint8_t last[LANES] = {0};
    memcpy(last, (const uint8_t *)from + i, (size_t)(n - i));
    vf x = e4m3_load16(last, 0) * scale;
    memcpy(to + i, &x, (size_t)(n - i) * 4);
  }
}

/* Largest power of two that divides the head, over which keys and queries are mixed. */
INLINE int64_t mixed_width(int64_t head_dim) { return head_dim & -head_dim; }

/* What mixed keys are multiplied by; with the queries' factor it makes 1 / width, and both are powers of two: exact. */
INLINE float key_factor(int64_t width) {
  float factor = 1;
  for (; width >= 4; width /= 4) factor *= 0.5f;
  return factor;
}
INLINE float query_factor(int64_t width) { return 1.0f / ((float)width * key_factor(width)); }

/* Sums and differences of lanes `h` apart; the lower lane gets the sum. */
#define MIX_LANES(x, h)                                                                                              \
  ((vf)((vu)(x) ^ ((vu)((LANE & h) != 0) & 0x80000000u)) + SHUFFLE(x, x, 0 ^ h, 1 ^ h, 2 ^ h, 3 ^ h, 4 ^ h, 5 ^ h, \
                                                                   6 ^ h, 7 ^ h, 8 ^ h, 9 ^ h, 10 ^ h, 11 ^ h, 12 ^ h, \
                                                                   13 ^ h, 14 ^ h, 15 ^ h))

#define MIX_MOST 1e30f

/* Hadamard transform of each `width` neighbours of x [n], times `factor`. Sums in one order in all instruction sets.
 * Limited to +-MIX_MOST first, so that infinities do not make NaN; a NaN stays. */
INLINE void mix(float *x, int64_t n, int64_t width, float factor) {
  const vi LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  int64_t h = 1;
  for (int64_t i = 0; i < n; i++) x[i] = x[i] > MIX_MOST ? MIX_MOST : x[i] < -MIX_MOST ? -MIX_MOST : x[i];
  if (width >= LANES) {
    for (int64_t i = 0; i < n; i += LANES) {
      vf v = load16(x, i, TYPE_F32);
      v = MIX_LANES(v, 1);
      v = MIX_LANES(v, 2);
      v = MIX_LANES(v, 4);
      store16(x, i, MIX_LANES(v, 8), TYPE_F32);
    }
    h = LANES;
  }
  for (; h < width; h *= 2)
    for (int64_t i = 0; i < n; i += 2 * h)
      for (int64_t j = i; j < i + h; j++) {
        float a = x[j], b = x[j + h];
        x[j] = a + b;
        x[j + h] = a - b;
      }
  for (int64_t i = 0; i < n; i++) x[i] *= factor;
}

#ifdef __AVX512BF16__
/* The 128 codes without sign as bfloat16; the eight smallest are multiples of 2^-9. */
#define WORD(c) \
  ((c) == 0x7f ? 0x7fc0 : (c) >= 4 ? 0x3c00 + ((c) >= 8 ? (c) << 4 : ((c)-4) << 5) \
   : (c) >= 2 ? 0x3b80 + (((c)-2) << 6) : (c) ? 0x3b00 : 0)
#define LOW(c) (WORD(c) & 0xff)
#define HIGH(c) (WORD(c) >> 8)
#define CODES4(f, c) f(c), f(c + 1), f(c + 2), f(c + 3)
#define CODES16(f, c) CODES4(f, c), CODES4(f, c + 4), CODES4(f, c + 8), CODES4(f, c + 12)
#define CODES64(f, c) CODES16(f, c), CODES16(f, c + 16), CODES16(f, c + 32), CODES16(f, c + 48)
static const uint8_t bf16_of_code[256] __attribute__((aligned(64))) = {CODES64(LOW, 0), CODES64(LOW, 64),
                                                                       CODES64(HIGH, 0), CODES64(HIGH, 64)};

__attribute__((target("avx512vbmi"))) static void codes_to_bf16_vbmi(uint16_t *to, const char *from, int64_t n,
                                                                    const char *ahead) {
  const uint8_t *table = bf16_of_code;
  const __m512i low0 = _mm512_load_si512(table), low1 = _mm512_load_si512(table + 64);
  const __m512i high0 = _mm512_load_si512(table + 128), high1 = _mm512_load_si512(table + 192);
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), sign = _mm512_set1_epi8((char)0x80);
  for (int64_t i = 0; i < n; i += 64) {
    if (ahead) __builtin_prefetch(ahead + i, 0, 2);
    __m512i codes = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(from + i));
    __m512i low = _mm512_permutex2var_epi8(low0, codes, low1);
    __m512i high = _mm512_permutex2var_epi8(high0, codes, high1);
    high = _mm512_ternarylogic_epi64(high, codes, sign, 0xf8); /* high | (codes & sign) */
    _mm512_store_si512(to + i, _mm512_unpacklo_epi8(low, high));
    _mm512_store_si512(to + i + 32, _mm512_unpackhi_epi8(low, high));
  }
}

#undef WORD
#undef LOW
#undef HIGH
#undef CODES4
#undef CODES16
#undef CODES64
#endif

/* n codes, a multiple of 64, as bfloat16 at an aligned place; asks for the cache lines of `ahead` (or null) meanwhile. */
static inline void codes_to_bf16(uint16_t *to, const char *from, int64_t n, const char *ahead) {
#ifdef __AVX512BF16__
  if (__builtin_cpu_supports("avx512vbmi")) {
    codes_to_bf16_vbmi(to, from, n, ahead);
    return;
  }
#endif
  for (int64_t i = 0; i < n; i += LANES) {
    if (ahead && !(i & 63)) __builtin_prefetch(ahead + i, 0, 2);
    store16(to, i, e4m3_load16(from, i), TYPE_BF16);
  }
}

#endif
