// Sixteen lanes of float32 or 32-bit integers as the compiler's own vectors: it lowers them to whatever the tier has.
// Everything is inlined and internal, so that code of one tier can never be linked into another.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

#define INLINE inline __attribute__((always_inline))

typedef float F32 __attribute__((vector_size(64)));
typedef int32_t I32 __attribute__((vector_size(64)));
typedef uint32_t U32 __attribute__((vector_size(64)));
typedef uint16_t U16 __attribute__((vector_size(32)));

constexpr int kLanes = 16;
constexpr float kInfinity = __builtin_inff();

struct BFloat16 {
  uint16_t bits;
};

INLINE F32 splat(float value) { return F32{} + value; }

INLINE I32 lane_numbers() { return I32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

INLINE F32 larger(F32 a, F32 b) { return a > b ? a : b; }

template <class V>
INLINE V load_raw(const void* from) {
  V vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

template <class V>
INLINE void store_raw(void* to, V vector) {
  std::memcpy(to, &vector, sizeof vector);
}

// The first `count` lanes, zeros behind.
template <class V, class T>
INLINE V load_some(const T* from, int64_t count) {
  V vector{};
  std::memcpy(&vector, from, static_cast<size_t>(count) * sizeof(T));
  return vector;
}

INLINE F32 widen(U16 bits) { return reinterpret_cast<F32>(__builtin_convertvector(bits, U32) << 16); }

// To nearest, ties to even; NaN stays NaN.
INLINE U16 narrow(F32 value) {
#if defined(__AVX512BF16__)
  return (U16)_mm512_cvtneps_pbh((__m512)value);
#else
  U32 bits = reinterpret_cast<U32>(value);
  U32 rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  rounded = value == value ? rounded : (bits >> 16) | 0x40;
  return __builtin_convertvector(rounded, U16);
#endif
}

INLINE F32 load(const float* from, int64_t count) {
  return count >= kLanes ? load_raw<F32>(from) : load_some<F32>(from, count);
}

INLINE F32 load(const BFloat16* from, int64_t count) {
  return widen(count >= kLanes ? load_raw<U16>(from) : load_some<U16>(from, count));
}

INLINE void store(float* to, F32 value, int64_t count) {
  std::memcpy(to, &value, count >= kLanes ? sizeof value : static_cast<size_t>(count) * sizeof(float));
}

INLINE void store(BFloat16* to, F32 value, int64_t count) {
  const U16 bits = narrow(value);
  if (count >= kLanes) {
    store_raw(to, bits);
  } else {
    std::memcpy(to, &bits, static_cast<size_t>(count) * sizeof(BFloat16));
  }
}

// What a value becomes when it is kept in the dtype.
INLINE F32 rounded_to(const float*, F32 value) { return value; }
INLINE F32 rounded_to(const BFloat16*, F32 value) { return widen(narrow(value)); }

INLINE float sum(F32 value) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)value);
#else
  float lanes[kLanes];
  std::memcpy(lanes, &value, sizeof lanes);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
#endif
}

INLINE float maximum(F32 value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)value);
#else
  float lanes[kLanes], largest = -kInfinity;
  std::memcpy(lanes, &value, sizeof lanes);
  for (float lane : lanes) largest = lane > largest ? lane : largest;
  return largest;
#endif
}

// e^x to about one unit in the last place; 0 below -87.3, e^88.3 above 88.3.
// Range reduction by ln 2 in two pieces and the minimax polynomial of the Cephes library (expf).
INLINE F32 exponential(F32 x) {
  const I32 vanishes = x < -87.33f;
  F32 bounded = x < -87.33f ? splat(-87.33f) : x;
  bounded = bounded > 88.37f ? splat(88.37f) : bounded;
  const F32 shifted = bounded * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const F32 power = shifted - 12582912.0f;
  const F32 rest = (bounded - power * 0.693359375f) - power * -2.12194440e-4f;
  F32 polynomial = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  polynomial = polynomial * rest + 8.3334519073e-3f;
  polynomial = polynomial * rest + 4.1665795894e-2f;
  polynomial = polynomial * rest + 1.6666665459e-1f;
  polynomial = polynomial * rest + 5.0000001201e-1f;
  polynomial = polynomial * (rest * rest) + rest + 1.0f;
  const I32 exponent = (__builtin_convertvector(power, I32) + 127) << 23;
  const F32 result = polynomial * reinterpret_cast<F32>(exponent);
  return vanishes ? F32{} : result;
}

// 16 rows of 16 32-bit units: rows become columns.
INLINE void transpose(U32 (&rows)[kLanes]) {
#if defined(__AVX512F__)
  // Four perfect shuffles: each interleaves row i with row i + 8.
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  U32 other[kLanes];
  U32 *from = rows, *to = other;
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
#pragma GCC unroll 8
    for (int row = 0; row < 8; ++row) {
      to[2 * row] = (U32)_mm512_permutex2var_epi32((__m512i)from[row], low, (__m512i)from[row + 8]);
      to[2 * row + 1] = (U32)_mm512_permutex2var_epi32((__m512i)from[row], high, (__m512i)from[row + 8]);
    }
    U32* swapped = from;
    from = to;
    to = swapped;
  }
#else
  uint32_t in[kLanes][kLanes], out[kLanes][kLanes];
  std::memcpy(in, rows, sizeof in);
  for (int row = 0; row < kLanes; ++row)
    for (int column = 0; column < kLanes; ++column) out[column][row] = in[row][column];
  std::memcpy(rows, out, sizeof out);
#endif
}

}  // namespace
