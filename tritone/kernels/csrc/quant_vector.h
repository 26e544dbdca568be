/* Integer vectors as wide as the CPU's registers, and small floating-point formats made wide.
 *
 * Nothing here relies on subnormal float32 numbers, which a process may have switched off.
 */
#ifndef TRITONE_QUANT_VECTOR_H
#define TRITONE_QUANT_VECTOR_H

#include "quant.h"

#ifdef __SSE2__
#include <immintrin.h>
#endif

#if defined(__AVX512BW__)
#define QLANES 16
#elif defined(__AVX2__)
#define QLANES 8
#else
#define QLANES 4
#endif
#define QVECTORS (PANEL / QLANES)

typedef int32_t qi __attribute__((vector_size(4 * QLANES)));
typedef uint32_t qu __attribute__((vector_size(4 * QLANES)));
typedef float qf __attribute__((vector_size(4 * QLANES)));
typedef uint16_t qh __attribute__((vector_size(2 * QLANES)));
typedef uint8_t qb __attribute__((vector_size(QLANES)));
typedef qu qu_any __attribute__((aligned(1), may_alias));
typedef qf qf_any __attribute__((aligned(1), may_alias));
typedef qh qh_any __attribute__((aligned(1), may_alias));
typedef qb qb_any __attribute__((aligned(1), may_alias));

/* Sums of four products each, of unsigned bytes `w` and signed bytes `x`, exact; `narrow` promises that w is at most 15. */
INLINE qi dot4(qi sum, qu w, qu x, int narrow) {
#if defined(__AVX512VNNI__)
  (void)narrow;
  return (qi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVX512BW__)
  const __m512i low = narrow ? (__m512i)w : (__m512i)(w & 0x0f0f0f0f), high = (__m512i)((w >> 4) & 0x0f0f0f0f);
  sum += (qi)_mm512_madd_epi16(_mm512_maddubs_epi16(low, (__m512i)x), _mm512_set1_epi16(1));
  return narrow ? sum : sum + (qi)_mm512_madd_epi16(_mm512_maddubs_epi16(high, (__m512i)x), _mm512_set1_epi16(16));
#elif defined(__AVX2__)
  const __m256i low = narrow ? (__m256i)w : (__m256i)(w & 0x0f0f0f0f), high = (__m256i)((w >> 4) & 0x0f0f0f0f);
  sum += (qi)_mm256_madd_epi16(_mm256_maddubs_epi16(low, (__m256i)x), _mm256_set1_epi16(1));
  return narrow ? sum : sum + (qi)_mm256_madd_epi16(_mm256_maddubs_epi16(high, (__m256i)x), _mm256_set1_epi16(16));
#elif defined(__SSE2__)
  const __m128i even = _mm_srai_epi16(_mm_slli_epi16((__m128i)x, 8), 8), odd = _mm_srai_epi16((__m128i)x, 8);
  (void)narrow;
  sum += (qi)_mm_madd_epi16((__m128i)(w & 0x00ff00ff), even);
  return sum + (qi)_mm_madd_epi16((__m128i)((w >> 8) & 0x00ff00ff), odd);
#else
  (void)narrow;
  for (int i = 0; i < 4; i++) sum += (qi)((w >> 8 * i) & 0xff) * ((qi)(x << (24 - 8 * i)) >> 24);
  return sum;
#endif
}

/* `bits`: a float format with `mantissa` bits, exponent and mantissa moved to where float32 has them. What is missing of
 * float32's exponent bias is `bias`. Subnormals become normal numbers: 2 * (1.m - 1) instead of 0.m. */
#define WIDEN(float_vector, int_vector, bits, bias)                          \
  ({                                                                         \
    int_vector raised_ = (int_vector)(bits) + ((bias) << 23);                \
    float_vector value_ = (float_vector)raised_;                             \
    int_vector least_ = raised_ * 0 + ((bias) << 23);                        \
    float_vector small_ = (value_ - (float_vector)least_) * 2.0f;            \
    int_vector tiny_ = (int_vector)((int_vector)(bits) < (1 << 23));         \
    (float_vector)((tiny_ & (int_vector)small_) | (~tiny_ & (int_vector)value_)); \
  })

/* Sixteen e4m3 codes in 32-bit lanes to float32; NaN codes are for the caller to refuse. */
INLINE vf widen_e4m3(vu code) {
  vf value = WIDEN(vf, vi, (code & 0x7f) << 20, 120);
  return (vf)((vu)value | ((code & 0x80) << 24));
}

/* sum + a * b, rounded once where the CPU can. Left to itself the compiler fuses the two in one tile and not in another. */
INLINE qf add_product(qf sum, qf a, qf b) {
#if defined(__AVX512BW__)
  return (qf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX2__)
  return (qf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__SSE2__)
  return sum + a * b;
#else
  for (int i = 0; i < QLANES; i++) sum[i] = __builtin_fmaf(a[i], b[i], sum[i]);
  return sum;
#endif
}

/* GCC puts these two together from single bytes if left alone. */
INLINE qu bytes_to_ints(const void *p) {
#if defined(__AVX512BW__)
  return (qu)_mm512_cvtepu8_epi32(_mm_loadu_si128(p));
#elif defined(__AVX2__)
  return (qu)_mm256_cvtepu8_epi32(_mm_loadl_epi64(p));
#else
  return __builtin_convertvector(*(const qb_any *)p, qu);
#endif
}

INLINE qu halves_to_ints(const void *p) {
#if defined(__AVX512BW__)
  return (qu)_mm512_cvtepu16_epi32(_mm256_loadu_si256(p));
#elif defined(__AVX2__)
  return (qu)_mm256_cvtepu16_epi32(_mm_loadu_si128(p));
#else
  return __builtin_convertvector(*(const qh_any *)p, qu);
#endif
}

INLINE qf load_scales(const char *scales, int64_t i, int type) {
  if (type == SCALE_F32) return (qf) * (const qf_any *)(scales + i * 4);
  const qu half = halves_to_ints(scales + i * 2);
  if (type == SCALE_BF16) return (qf)(half << 16);
  qf value = WIDEN(qf, qi, (half & 0x7fff) << 13, 112);
  return (qf)((qu)value | ((half & 0x8000) << 16));
}

#endif
