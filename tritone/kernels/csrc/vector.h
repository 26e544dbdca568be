/* Sixteen-lane float arithmetic on GCC/Clang vector extensions.
 *
 * The same source is compiled once per instruction set; the compiler splits a vector into two AVX2 or four SSE/NEON
 * registers where there is no 512-bit one. No reduction here depends on anything but its own operands, which is what
 * makes a row's numbers independent of the rows beside it.
 */
#ifndef TRITONE_VECTOR_H
#define TRITONE_VECTOR_H

#include <stdint.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifndef TRITONE_SUFFIX
#define TRITONE_SUFFIX _plain
#endif
#define TRITONE_JOIN2(a, b) a##b
#define TRITONE_JOIN(a, b) TRITONE_JOIN2(a, b)
#define EXPORT(name) __attribute__((visibility("default"))) TRITONE_JOIN(name, TRITONE_SUFFIX)
#define INLINE static inline __attribute__((always_inline))

#define LANES 16
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));
typedef float vf_any __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(32), aligned(2), may_alias));

/* As many lanes as a register has. The compiler keeps wider vectors in memory: sums over long loops belong in these. */
#if defined(__AVX512F__)
#define REGISTER 16
#elif defined(__AVX2__)
#define REGISTER 8
#else
#define REGISTER 4
#endif
typedef float vr __attribute__((vector_size(4 * REGISTER)));
typedef uint32_t vru __attribute__((vector_size(4 * REGISTER)));
typedef uint16_t vrh __attribute__((vector_size(2 * REGISTER)));
typedef float vr_any __attribute__((vector_size(4 * REGISTER), aligned(4), may_alias));
typedef uint16_t vrh_any __attribute__((vector_size(2 * REGISTER), aligned(2), may_alias));

/* Element types of activations and KV pages; the numbers are part of the Python binding. */
enum { TYPE_F32 = 0, TYPE_BF16 = 1 };
INLINE int64_t type_size(int type) { return type == TYPE_F32 ? 4 : 2; }

INLINE vf splat(float x) { return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

INLINE float bf16_to_float(uint16_t h) {
  uint32_t u = (uint32_t)h << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

/* Round to nearest even; NaN stays NaN. */
INLINE uint16_t float_to_bf16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if (f != f) return 0x7fc0;
  return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

INLINE vf load16(const void *p, int64_t i, int type) {
  if (type == TYPE_F32) return (vf) * (const vf_any *)((const float *)p + i);
  vh h = (vh) * (const vh_any *)((const uint16_t *)p + i);
  return (vf)(__builtin_convertvector(h, vu) << 16);
}

INLINE vr load_register(const void *p, int64_t i, int type) {
  if (type == TYPE_F32) return (vr) * (const vr_any *)((const float *)p + i);
  vrh h = (vrh) * (const vrh_any *)((const uint16_t *)p + i);
  return (vr)(__builtin_convertvector(h, vru) << 16);
}

INLINE void store_register(float *p, int64_t i, vr x) { *(vr_any *)(p + i) = x; }

INLINE vu bf16_bits(vf x) {
  vu u = (vu)x;
  vu r = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  vu nan = (vu)(x != x);
  return (r & ~nan) | (nan & 0x7fc0);
}

INLINE void store16(void *p, int64_t i, vf x, int type) {
  if (type == TYPE_F32) *(vf_any *)((float *)p + i) = x;
  else *(vh_any *)((uint16_t *)p + i) = __builtin_convertvector(bf16_bits(x), vh);
}

INLINE float load1(const void *p, int64_t i, int type) {
  return type == TYPE_F32 ? ((const float *)p)[i] : bf16_to_float(((const uint16_t *)p)[i]);
}

/* Element i in every lane. */
INLINE vr spread(const void *p, int64_t i, int type) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if (type == TYPE_BF16) return (vr)_mm256_slli_epi32(_mm256_set1_epi16(((const int16_t *)p)[i]), 16);
#endif
  return load1(p, i, type) - (vr){0}; /* minus zero changes no number, plus zero would change one */
}

INLINE void store1(void *p, int64_t i, float x, int type) {
  if (type == TYPE_F32) ((float *)p)[i] = x;
  else ((uint16_t *)p)[i] = float_to_bf16(x);
}

/* The value that a store and a load would give back. */
INLINE vf rounded16(vf x, int type) { return type == TYPE_F32 ? x : (vf)(bf16_bits(x) << 16); }

INLINE float rounded1(float x, int type) { return type == TYPE_F32 ? x : bf16_to_float(float_to_bf16(x)); }

INLINE void load_row(float *to, const void *from, int64_t n, int type) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store16(to, i, load16(from, i, type), TYPE_F32);
  for (; i < n; i++) to[i] = load1(from, i, type);
}

INLINE void store_row(void *to, const float *from, int64_t n, int type) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store16(to, i, load16(from, i, TYPE_F32), type);
  for (; i < n; i++) store1(to, i, from[i], type);
}

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif

/* Each level adds the two halves of every lane group of a and b: 16 vectors become one vector of their 16 sums. */
INLINE vf fold8(vf a, vf b) {
  return SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
INLINE vf fold4(vf a, vf b) {
  return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
INLINE vf fold2(vf a, vf b) {
  return SHUFFLE(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
         SHUFFLE(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
}
INLINE vf fold1(vf a, vf b) {
  return SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}
INLINE vf sums_of_16(const vf *v) {
  vf q[4];
  for (int i = 0; i < 4; i++) {
    const vf *w = v + 4 * i;
    q[i] = fold4(fold8(w[0], w[1]), fold8(w[2], w[3]));
  }
  return fold1(fold2(q[0], q[1]), fold2(q[2], q[3]));
}

#ifndef __AVX512F__
/* to[i] = the sum of the lanes of v[i], for eight of them. */
INLINE void sums_of_8(float *to, const vr *v) {
#ifdef __AVX2__
  __m256 low = _mm256_hadd_ps(_mm256_hadd_ps((__m256)v[0], (__m256)v[1]), _mm256_hadd_ps((__m256)v[2], (__m256)v[3]));
  __m256 high = _mm256_hadd_ps(_mm256_hadd_ps((__m256)v[4], (__m256)v[5]), _mm256_hadd_ps((__m256)v[6], (__m256)v[7]));
  store_register(to, 0, (vr)_mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)));
#else
  for (int i = 0; i < 8; i++) to[i] = (v[i][0] + v[i][1]) + (v[i][2] + v[i][3]);
#endif
}
#endif

INLINE float lane_sum(vf v) {
  v = fold8(v, v);
  v = fold4(v, v);
  v = fold2(v, v);
  v = fold1(v, v);
  return v[0];
}
INLINE vf vmax(vf a, vf b) {
  vi m = a > b;
  return (vf)(((vi)a & m) | ((vi)b & ~m));
}
INLINE vf vmin(vf a, vf b) {
  vi m = a < b;
  return (vf)(((vi)a & m) | ((vi)b & ~m));
}

INLINE float lane_max(vf v) {
  v = vmax(v, SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = vmax(v, SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = vmax(v, SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = vmax(v, SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return v[0];
}

/* e^x in float32, relative error below 2e-7; clamped to the normal range (x < -87.3 gives the smallest normal).
 * Cephes expf: range reduction by ln 2 in two parts, degree-5 polynomial. */
INLINE vf vexp(vf x) {
  x = vmin(vmax(x, splat(-87.33654f)), splat(88.0f));
  vf t = x * 1.44269504088896341f;
  vf half = (vf)(((vi)t & (vi)splat(-0.0f)) | (vi)splat(0.5f));
  vi n = __builtin_convertvector(t + half, vi);
  vf k = __builtin_convertvector(n, vf);
  vf r = x - k * 0.693359375f;
  r = r - k * -2.12194440e-4f;
  vf y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  return y * (vf)((n + 127) << 23);
}

#endif
