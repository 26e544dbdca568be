/* Quantised weights in memory: codes of 4 or 8 bits, and scales and zeros for groups of inputs.
 *
 * A panel of PANEL outputs lies together, each part from a multiple of 64 bytes on:
 *   scales [groups][PANEL]; zeros [groups][PANEL] bytes, if there are any;
 *   codes [inputs / 4][PANEL][4] bytes, or for INT4 [inputs / 8][PANEL][4] bytes, whose low halves are the first four
 *   inputs and whose high halves are the other four.
 * Inputs are padded to a multiple of 8 with code 0, outputs to a multiple of PANEL with scale 0. PANEL is that of linear.c.
 */
#ifndef TRITONE_QUANT_H
#define TRITONE_QUANT_H

#include "vector.h"

/* The numbers are part of the Python binding. A weight is (code - zero) * scale; INT8 codes are stored with 128 added. */
enum { CODE_INT4 = 0, CODE_INT8 = 1, CODE_E4M3 = 2 };
enum { SCALE_F32 = 0, SCALE_BF16 = 1, SCALE_F16 = 2 };

struct quantized {
  const char *data;
  int64_t n, k, k_padded, group, groups, zeros_at, codes_at, panel_bytes;
  int code, asymmetric, scale_type;
};

INLINE int64_t whole(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

static struct quantized quantized(const char *data, int64_t n, int64_t k, int64_t group, int code, int asymmetric,
                                  int scale_type) {
  struct quantized q = {.data = data, .n = n, .k = k, .group = group, .code = code, .asymmetric = asymmetric};
  q.scale_type = scale_type;
  q.k_padded = whole(k, 8);
  q.groups = (k + group - 1) / group;
  q.zeros_at = whole(q.groups * PANEL * (scale_type == SCALE_F32 ? 4 : 2), 64);
  q.codes_at = q.zeros_at + (asymmetric ? whole(q.groups * PANEL, 64) : 0);
  q.panel_bytes = q.codes_at + whole(q.k_padded * PANEL / (code == CODE_INT4 ? 2 : 1), 64);
  return q;
}

/* Where the codes of input k (a multiple of 8) of a panel begin. */
INLINE const uint8_t *codes_at(const struct quantized *q, const char *panel, int64_t k) {
  return (const uint8_t *)panel + q->codes_at + k * PANEL / (q->code == CODE_INT4 ? 2 : 1);
}

/* The zero of a code where there is none for each group. */
INLINE int code_zero(const struct quantized *q) { return q->code == CODE_INT4 ? 8 : 128; }

/* Bytes of a packed matrix [n, k]. */
int64_t EXPORT(tritone_quantized_bytes)(int64_t n, int64_t k, int64_t group, int code, int asymmetric, int scale_type) {
  return whole(n, PANEL) / PANEL * quantized(0, n, k, group, code, asymmetric, scale_type).panel_bytes;
}

static void pack_codes(const struct quantized *q, uint8_t *to, const uint8_t *codes, int64_t output) {
  for (int64_t k = 0; k < q->k_padded; k++) {
    const uint8_t code = output < q->n && k < q->k ? codes[output * q->k + k] : 0;
    const int64_t i = output % PANEL * 4 + k % 4;
    if (q->code != CODE_INT4) to[k / 4 * PANEL * 4 + i] = code;
    else if (k % 8 < 4) to[k / 8 * PANEL * 4 + i] = code;
    else to[k / 8 * PANEL * 4 + i] |= (uint8_t)(code << 4);
  }
}

/* codes [n, k], scales [n, groups] of `scale_type`, zeros [n, groups] or null. */
void EXPORT(tritone_quantized_pack)(const uint8_t *codes, const char *scales, const uint8_t *zeros, char *packed, int64_t n,
                                    int64_t k, int64_t group, int code, int scale_type, int threads) {
  const struct quantized q = quantized(packed, n, k, group, code, zeros != 0, scale_type);
  const int64_t size = scale_type == SCALE_F32 ? 4 : 2, panels = whole(n, PANEL) / PANEL;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t p = 0; p < panels; p++) {
    char *panel = packed + p * q.panel_bytes;
    memset(panel, 0, (size_t)q.panel_bytes);
    for (int64_t i = 0; i < PANEL; i++) {
      const int64_t output = p * PANEL + i;
      for (int64_t g = 0; g < q.groups && output < n; g++) {
        memcpy(panel + (g * PANEL + i) * size, scales + (output * q.groups + g) * size, (size_t)size);
        if (zeros) panel[q.zeros_at + g * PANEL + i] = (char)zeros[output * q.groups + g];
      }
      pack_codes(&q, (uint8_t *)panel + q.codes_at, codes, output);
    }
  }
}

#endif
