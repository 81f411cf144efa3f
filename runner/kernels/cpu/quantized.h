// Products with a weight matrix whose codes are whole numbers of 4 or 8 bits, as a GGUF stores them; packed.py says how
// the panels lie. Activations are whole numbers too: a row's 32 values in a group share one scale, the largest over 127.
//
// Within a group products and sums are exact, in 32-bit integers; groups are added up in float32 in their order. So a
// row's output is the same to the bit in any company, whatever the tile.
//
//      group of 32 inputs     dots = sum of code * x             an integer, beginning at -zero * sum of x
//                             sum += dots * (scale * scale of x)
//                             sum += minimum * (sum of x)        where there are minima
#pragma once

#include "quantized_kernels.h"
#include "vector.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

using kvyard::kPanel;
using kvyard::kQuantizedGroup;
using kvyard::QuantizedForm;
using kvyard::QuantizedRows;
using kvyard::QuantizedWork;

// A panel is so many vectors.
constexpr int kPanelVectors = static_cast<int>(kPanel) / kLanes;

typedef int16_t I16 __attribute__((vector_size(4 * kLanes)));

// Scales as floats: kLanes of float16.
INLINE F32 load_halves(const uint16_t* from) {
#if defined(__AVX512F__)
  return (F32)_mm512_cvtph_ps((__m256i)load_raw<U16>(from));
#elif defined(__F16C__)
  return (F32)_mm256_cvtph_ps((__m128i)load_raw<U16>(from));
#else
  const U32 bits = zero_extend(load_raw<U16>(from));
  const F32 magnitude = reinterpret_cast<F32>((bits & 0x7FFF) << 13) * 0x1p112f;  // moves the exponent, subnormals too
  return reinterpret_cast<F32>(reinterpret_cast<U32>(magnitude) | (bits & 0x8000) << 16);
#endif
}

// To the nearest whole number, ties to even. |value| < 2^22.
INLINE I32 whole(F32 value) {
#if defined(__AVX512F__)
  return (I32)_mm512_cvtps_epi32((__m512)value);
#elif defined(__AVX2__)
  return (I32)_mm256_cvtps_epi32((__m256)value);
#else
  return reinterpret_cast<I32>(value + 12582912.0f) - 0x4B400000;  // 1.5 * 2^23
#endif
}

INLINE int32_t sum(I32 value) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)value);
#else
  int32_t total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += value[lane];
  return total;
#endif
}

// Four products of each lane added to its integer: unsigned codes times signed activations, the same four in every lane.
// Two ways: one instruction (VNNI), or pairs of 16-bit products, even bytes and odd ones apart so that nothing saturates.
#if defined(__AVX512VNNI__)

struct Activations {
  I32 four;
  explicit INLINE Activations(const int8_t* from) {
    int32_t unit;
    std::memcpy(&unit, from, sizeof unit);
    four = I32{} + unit;
  }
};

struct CodeVector {
  U32 codes;
  explicit INLINE CodeVector(U32 codes) : codes(codes) {}
};

INLINE void add_products(I32& dots, const CodeVector& weights, const Activations& x) {
  dots = (I32)_mm512_dpbusd_epi32((__m512i)dots, (__m512i)weights.codes, (__m512i)x.four);
}

#else

struct Activations {
  I32 even, odd;  // pairs of 16 bits
  explicit INLINE Activations(const int8_t* from) {
    const uint32_t first = static_cast<uint16_t>(from[0]) | static_cast<uint32_t>(static_cast<uint16_t>(from[2])) << 16;
    const uint32_t second = static_cast<uint16_t>(from[1]) | static_cast<uint32_t>(static_cast<uint16_t>(from[3])) << 16;
    even = I32{} + static_cast<int32_t>(first);
    odd = I32{} + static_cast<int32_t>(second);
  }
};

struct CodeVector {
  U32 even, odd;
  explicit INLINE CodeVector(U32 codes) : even(codes & 0x00FF00FF), odd(codes >> 8 & 0x00FF00FF) {}
};

INLINE I32 products_of_pairs(U32 a, I32 b) {
#if defined(__AVX512BW__)
  return (I32)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (I32)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (I32)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return ((I32)(a << 16) >> 16) * ((b << 16) >> 16) + ((I32)a >> 16) * (b >> 16);
#endif
}

INLINE void add_products(I32& dots, const CodeVector& weights, const Activations& x) {
  dots += products_of_pairs(weights.even, x.even) + products_of_pairs(weights.odd, x.odd);
}

#endif

// Rows of one pass, and panels side by side for so many rows: twelve integer sums and as many in float32 fill the 32
// registers. A smaller tile where codes and activations take two registers each, or there are sixteen.
#if defined(__AVX512VNNI__)
constexpr int kTileRows = 4;
constexpr int tile_panels(int rows) { return rows <= 3 ? 4 : 3; }
#else
constexpr int kTileRows = 2;
constexpr int tile_panels(int) { return kLanes == 16 ? 2 : 1; }
#endif

// Where one panel's parts lie.
template <QuantizedForm kForm>
struct PanelParts {
  static constexpr int64_t kScaleGroup = kvyard::group_of(kForm);
  const char* codes;
  const uint16_t *scales, *minima;
  INLINE PanelParts(const QuantizedWork& work, int64_t panel) {
    codes = static_cast<const char*>(work.panels) + panel * work.panel_bytes;
    scales = reinterpret_cast<const uint16_t*>(codes + work.inputs * kPanel * kvyard::bits_of(kForm) / 8);
    minima = scales + work.inputs / kScaleGroup * kPanel;
  }
};

// Bytes that come next for this thread, a share of them in each pass over the rows.
struct FetchBytes {
  const char *at, *end;
};

template <QuantizedForm kForm, int kRows, int kPanels>
void multiply_quantized_tile(const QuantizedWork& work, int64_t row, int64_t panel, FetchBytes fetch) {
  constexpr bool kMinima = kvyard::has_minima(kForm);
  constexpr int kBits = kvyard::bits_of(kForm), kVectors = kPanels * kPanelVectors;
  constexpr int64_t kScaleGroup = kvyard::group_of(kForm), kPerVector = 32 / kBits;  // inputs of 64 bytes
  const QuantizedRows& in = work.rows_in;
  const int64_t groups = work.inputs / kQuantizedGroup, scale_groups = work.inputs / kScaleGroup;
  const int8_t* x = in.codes + row * work.inputs;
  const float *x_scales = in.scales + row * groups, *x_sums = in.sums + row * groups;
  const int32_t* x_offsets = in.offsets + row * scale_groups;
  const PanelParts<kForm> first(work, panel);
  const int64_t per_group = (fetch.end - fetch.at) / scale_groups + 1;
  const char* fetched = fetch.at;
  F32 sums[kRows][kVectors] = {};
  for (int64_t group = 0; group < scale_groups; ++group) {
    const int64_t x_group = group * kScaleGroup / kQuantizedGroup;
    const char* fetch_until = fetch.at + per_group * (group + 1);
    fetch_until = fetch_until < fetch.end ? fetch_until : fetch.end;
    for (; fetched < fetch_until; fetched += 64) __builtin_prefetch(fetched, 0, 2);
    I32 dots[kRows][kVectors];
#pragma GCC unroll 4
    for (int index = 0; index < kRows; ++index)
#pragma GCC unroll 8
      for (int column = 0; column < kVectors; ++column)
        dots[index][column] = kMinima ? I32{} : I32{} + x_offsets[index * scale_groups + group];
#pragma GCC unroll 8
    for (int64_t at = 0; at < kScaleGroup; at += kPerVector) {
      const int64_t input = group * kScaleGroup + at;
      U32 units[kVectors];
#pragma GCC unroll 8
      for (int column = 0; column < kVectors; ++column)
        units[column] = load_raw<U32>(first.codes + column / kPanelVectors * work.panel_bytes + input / kPerVector * 64 +
                                      column % kPanelVectors * 4 * kLanes);
#pragma GCC unroll 2
      for (int half = 0; half < kPerVector / 4; ++half) {
#pragma GCC unroll 4
        for (int index = 0; index < kRows; ++index) {
          const Activations four(x + index * work.inputs + input + 4 * half);
#pragma GCC unroll 8
          for (int column = 0; column < kVectors; ++column) {
            const U32 codes = kBits == 8 ? units[column] : (half == 0 ? units[column] : units[column] >> 4) & 0x0F0F0F0F;
            add_products(dots[index][column], CodeVector(codes), four);
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int column = 0; column < kVectors; ++column) {
      const int64_t at = column / kPanelVectors * work.panel_bytes / 2 + group * kPanel + column % kPanelVectors * kLanes;
      const F32 scale = load_halves(first.scales + at);
      const F32 minimum = kMinima ? load_halves(first.minima + at) : F32{};
#pragma GCC unroll 4
      for (int index = 0; index < kRows; ++index) {
        const F32 factor = scale * x_scales[index * groups + x_group];
        F32 sum = sums[index][column] + __builtin_convertvector(dots[index][column], F32) * factor;
        if (kMinima) sum = sum + minimum * x_sums[index * groups + x_group];
        sums[index][column] = sum;
      }
    }
  }
  for (int index = 0; index < kRows; ++index) {
    char* to = static_cast<char*>(work.out) + (row + index) * work.out_stride_bytes;
    for (int column = 0; column < kVectors; ++column) {
      const int64_t output = panel * kPanel + column * kLanes;
      if (output >= work.outputs) break;
      if (work.to_bfloat16) {
        store(reinterpret_cast<BFloat16*>(to) + output, sums[index][column], work.outputs - output);
      } else {
        store(reinterpret_cast<float*>(to) + output, sums[index][column], work.outputs - output);
      }
    }
  }
}

template <QuantizedForm kForm, int kRows, int kPanels = tile_panels(kRows)>
INLINE void multiply_quantized_panels(const QuantizedWork& work, int64_t row, int64_t panel, int64_t panels,
                                      FetchBytes fetch) {
  if constexpr (kPanels > 0) {
    if (panels == kPanels) return multiply_quantized_tile<kForm, kRows, kPanels>(work, row, panel, fetch);
    multiply_quantized_panels<kForm, kRows, kPanels - 1>(work, row, panel, panels, fetch);
  }
}

template <QuantizedForm kForm, int kRows = kTileRows>
void multiply_quantized_rows(const QuantizedWork& work, int64_t row, int64_t rows, int64_t panel, int64_t panels,
                             FetchBytes fetch) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return multiply_quantized_panels<kForm, kRows>(work, row, panel, panels, fetch);
    multiply_quantized_rows<kForm, kRows - 1>(work, row, rows, panel, panels, fetch);
  }
}

// Groups of panels stay in the cache until all rows have had them; the next group is fetched meanwhile.
template <QuantizedForm kForm>
void multiply_form(const QuantizedWork& work, int64_t first, int64_t last) {
  const int64_t passes = (work.rows + kTileRows - 1) / kTileRows;
  const int64_t most_rows = (work.rows + passes - 1) / passes;
  const int64_t most = tile_panels(static_cast<int>(most_rows)), groups = (last - first + most - 1) / most;
  const int64_t all = (work.outputs + kPanel - 1) / kPanel;
  const char* panels_at = static_cast<const char*>(work.panels);
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t panel = first + (last - first) * group / groups;
    const int64_t panels = first + (last - first) * (group + 1) / groups - panel;
    const int64_t later = panel + panels, later_end = later + panels < all ? later + panels : all;
    const int64_t bytes = (later_end - later) * work.panel_bytes;
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t row = work.rows * pass / passes, rows = work.rows * (pass + 1) / passes - row;
      const char* from = panels_at + later * work.panel_bytes;
      multiply_quantized_rows<kForm>(work, row, rows, panel, panels,
                                        {from + bytes * pass / passes, from + bytes * (pass + 1) / passes});
    }
  }
}

void multiply_quantized(const QuantizedWork& work, int64_t first, int64_t last) {
  switch (work.form) {
    case QuantizedForm::kFourBits: return multiply_form<QuantizedForm::kFourBits>(work, first, last);
    case QuantizedForm::kFourBitsMinima: return multiply_form<QuantizedForm::kFourBitsMinima>(work, first, last);
    case QuantizedForm::kEightBits: return multiply_form<QuantizedForm::kEightBits>(work, first, last);
    case QuantizedForm::kEightBitsOf16: return multiply_form<QuantizedForm::kEightBitsOf16>(work, first, last);
  }
}

// One row as whole numbers. A group with a value that is not finite gets the scale NaN, which every output then shows.
template <class T>
void quantize_row(const void* row, int64_t inputs, QuantizedForm form, const QuantizedRows& to) {
  const T* in = static_cast<const T*>(row);
  constexpr int kVectors = static_cast<int>(kQuantizedGroup) / kLanes;
  const int32_t zero = kvyard::zero_of(form);
  const int64_t scale_group = kvyard::group_of(form);
  for (int64_t group = 0; group < inputs / kQuantizedGroup; ++group) {
    F32 values[kVectors], largest{}, nothing{};
    for (int at = 0; at < kVectors; ++at) {
      values[at] = load(in + group * kQuantizedGroup + at * kLanes, kLanes);
      largest = larger(largest, values[at] < 0.0f ? -values[at] : values[at]);
      nothing += values[at] - values[at];
    }
    const float most = maximum(largest), poison = sum(nothing);
    const bool counts = most > kvyard::kSmallestActivation && poison == 0.0f;
    const float per_code = counts ? 127.0f / most : 0.0f, scale = counts ? most / 127.0f : poison;
    int8_t* codes = to.codes + group * kQuantizedGroup;
    int32_t halves[2] = {};
    for (int at = 0; at < kVectors; ++at) {
      const I32 code = counts ? whole(values[at] * per_code) : I32{};
      for (int lane = 0; lane < kLanes; ++lane) codes[at * kLanes + lane] = static_cast<int8_t>(code[lane]);
      halves[at >= kVectors / 2] += sum(code);
    }
    to.scales[group] = scale;
    if (kvyard::has_minima(form)) {
      to.sums[group] = scale * static_cast<float>(halves[0] + halves[1]);
    } else if (scale_group == kQuantizedGroup) {
      to.offsets[group] = -zero * (halves[0] + halves[1]);
    } else {
      for (int half = 0; half < 2; ++half) to.offsets[2 * group + half] = -zero * halves[half];
    }
  }
}

}  // namespace
