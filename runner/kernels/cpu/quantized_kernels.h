// What one machine tier offers for quantised weight matrices: plain functions over raw pointers, as in kernels.h.
//
// quantized_tier.cpp is compiled once per tier; packed.py says how a matrix lies. Invariant: what is computed for a row
// depends on that row alone, to the bit.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace kvyard {

// The forms of a quantised weight matrix, see quantized.h: bits of a code, inputs of one scale, minima.
enum class QuantizedForm { kFourBits, kFourBitsMinima, kEightBits, kEightBitsOf16 };

constexpr int64_t kQuantizedGroup = 32;       // activations of one scale
constexpr float kSmallestActivation = 1e-35f;  // a group that reaches no further is zero: its quotient would overflow

constexpr int bits_of(QuantizedForm form) {
  return form == QuantizedForm::kFourBits || form == QuantizedForm::kFourBitsMinima ? 4 : 8;
}
constexpr int64_t group_of(QuantizedForm form) { return form == QuantizedForm::kEightBitsOf16 ? 16 : kQuantizedGroup; }
constexpr bool has_minima(QuantizedForm form) { return form == QuantizedForm::kFourBitsMinima; }
// The code of weight 0.
constexpr int zero_of(QuantizedForm form) { return has_minima(form) ? 0 : 1 << (bits_of(form) - 1); }

// Activations as whole numbers, rows one after the other: codes [inputs], and for each group its scale and, as the form
// wants it, scale times the sum of its codes, or -zero times their sum (for each 16 where the weights' scales are so).
struct QuantizedRows {
  int8_t* codes;
  float *scales, *sums;
  int32_t* offsets;
};

struct QuantizedWork {
  QuantizedForm form;
  QuantizedRows rows_in;
  const void* panels;
  void* out;
  int64_t rows, inputs, outputs, panel_bytes, out_stride_bytes;
  bool to_bfloat16;  // else float32
};

struct QuantizedKernels {
  // One row of activations as whole numbers. [0] float32, [1] bfloat16.
  void (*quantize_row[2])(const void* row, int64_t inputs, QuantizedForm, const QuantizedRows& to);
  // Panels [first, last).
  void (*multiply)(const QuantizedWork&, int64_t first, int64_t last);
};

extern const QuantizedKernels kQuantizedPortable;
#ifdef __x86_64__
extern const QuantizedKernels kQuantizedAvx2;
extern const QuantizedKernels kQuantizedAvx512;
extern const QuantizedKernels kQuantizedVnni;
#endif

}  // namespace kvyard
