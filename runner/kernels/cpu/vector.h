// Vectors of float32 or 32-bit integers as the compiler knows them; intrinsics only where it does not do well by itself.
// Everything is inlined and internal, so that code of one tier can never be linked into another.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#define INLINE inline __attribute__((always_inline))

// As many lanes as the tier has in one register: wider vectors would live in memory.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float F32 __attribute__((vector_size(4 * kLanes)));
typedef int32_t I32 __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U32 __attribute__((vector_size(4 * kLanes)));
typedef uint16_t U16 __attribute__((vector_size(2 * kLanes)));
typedef int8_t I8 __attribute__((vector_size(kLanes)));

constexpr float kInfinity = __builtin_inff();
constexpr float kSmallestNormal = 1.17549435e-38f;

struct BFloat16 {
  uint16_t bits;
};

INLINE F32 splat(float value) { return F32{} + value; }

INLINE I32 lane_numbers() {
  I32 numbers{};
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
  return numbers;
}

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

// GCC does not find the single instruction behind __builtin_convertvector.
INLINE U32 zero_extend(U16 bits) {
#if defined(__AVX512F__)
  return (U32)_mm512_cvtepu16_epi32((__m256i)bits);
#else
  return __builtin_convertvector(bits, U32);
#endif
}

INLINE F32 widen(U16 bits) { return reinterpret_cast<F32>(zero_extend(bits) << 16); }

// To nearest, ties to even; NaN stays NaN.
INLINE U16 narrow(F32 value) {
#if defined(__AVX512BF16__)
  return (U16)_mm512_cvtneps_pbh((__m512)value);
#else
  U32 bits = reinterpret_cast<U32>(value);
  U32 rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  rounded = value == value ? rounded : (bits >> 16) | 0x40;
#if defined(__AVX512F__)
  return (U16)_mm512_cvtepi32_epi16((__m512i)rounded);
#else
  return __builtin_convertvector(rounded, U16);
#endif
#endif
}

INLINE F32 load(const float* from, int64_t count) {
  return count >= kLanes ? load_raw<F32>(from) : load_some<F32>(from, count);
}

INLINE F32 load(const BFloat16* from, int64_t count) {
  return widen(count >= kLanes ? load_raw<U16>(from) : load_some<U16>(from, count));
}

INLINE F32 load(const int8_t* from, int64_t count) {
  const I8 bytes = count >= kLanes ? load_raw<I8>(from) : load_some<I8>(from, count);
#if defined(__AVX512F__)
  return (F32)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#elif defined(__AVX2__)
  int64_t low;
  std::memcpy(&low, &bytes, sizeof low);
  return (F32)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(low)));
#else
  return __builtin_convertvector(bytes, F32);
#endif
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

// To nearest, ties to even; of values in [-127.5, 127.5]. Not by adding a large number: that may be fused with the
// product that the value comes from, which rounds differently.
INLINE void store(int8_t* to, F32 value, int64_t count) {
#if defined(__AVX512F__)
  const I8 bytes = (I8)_mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)value));
#elif defined(__AVX2__)
  const I8 bytes = __builtin_convertvector((I32)_mm256_cvtps_epi32((__m256)value), I8);
#else
  I8 bytes{};
  for (int lane = 0; lane < kLanes; ++lane) bytes[lane] = static_cast<int8_t>(__builtin_rintf(value[lane]));
#endif
  std::memcpy(to, &bytes, count >= kLanes ? sizeof bytes : static_cast<size_t>(count));
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

// Natural logarithm to about one unit in the last place, of positive normal numbers; log 0 and log inf are infinite.
// Mantissa and exponent apart, then the minimax polynomial of the Cephes library (logf).
INLINE F32 logarithm(F32 x) {
  const U32 bits = reinterpret_cast<U32>(x);
  F32 mantissa = reinterpret_cast<F32>((bits & 0x007FFFFF) | 0x3F000000);  // in [0.5, 1)
  F32 exponent = __builtin_convertvector(reinterpret_cast<I32>(bits >> 23) - 126, F32);
  const I32 small = mantissa < 0.707106781f;
  exponent = small ? exponent - 1.0f : exponent;
  mantissa = small ? mantissa + mantissa - 1.0f : mantissa - 1.0f;
  const F32 square = mantissa * mantissa;
  F32 polynomial = mantissa * 7.0376836292e-2f - 1.1514610310e-1f;
  polynomial = polynomial * mantissa + 1.1676998740e-1f;
  polynomial = polynomial * mantissa - 1.2420140846e-1f;
  polynomial = polynomial * mantissa + 1.4249322787e-1f;
  polynomial = polynomial * mantissa - 1.6668057665e-1f;
  polynomial = polynomial * mantissa + 2.0000714765e-1f;
  polynomial = polynomial * mantissa - 2.4999993993e-1f;
  polynomial = polynomial * mantissa + 3.3333331174e-1f;
  F32 result = polynomial * mantissa * square + exponent * -2.12194440e-4f - square * 0.5f;
  result = result + mantissa + exponent * 0.693359375f;
  result = x == 0.0f ? splat(-kInfinity) : result;
  return x == kInfinity ? splat(kInfinity) : result;
}

// Lanes of `a` and `b` in turns: the lower halves (kHigh false) or the upper ones.
template <bool kHigh>
INLINE U32 interleave(U32 a, U32 b) {
#if defined(__AVX512F__)
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  return (U32)_mm512_permutex2var_epi32((__m512i)a, kHigh ? high : low, (__m512i)b);
#elif defined(__AVX2__)
  const __m256i low = _mm256_unpacklo_epi32((__m256i)a, (__m256i)b), high = _mm256_unpackhi_epi32((__m256i)a, (__m256i)b);
  return (U32)_mm256_permute2x128_si256(low, high, kHigh ? 0x31 : 0x20);
#else
  constexpr int from = kHigh ? kLanes / 2 : 0;
  U32 mixed{};
  for (int lane = 0; lane < kLanes / 2; ++lane) {
    mixed[2 * lane] = a[from + lane];
    mixed[2 * lane + 1] = b[from + lane];
  }
  return mixed;
#endif
}

// kLanes rows of kLanes units: rows become columns, by perfect shuffles of row i with row i + kLanes / 2.
INLINE void transpose(U32 (&rows)[kLanes]) {
  U32 shuffled[kLanes];
#pragma GCC unroll 4
  for (int width = kLanes; width > 1; width /= 2) {
#pragma GCC unroll 8
    for (int row = 0; row < kLanes / 2; ++row) {
      shuffled[2 * row] = interleave<false>(rows[row], rows[row + kLanes / 2]);
      shuffled[2 * row + 1] = interleave<true>(rows[row], rows[row + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int row = 0; row < kLanes; ++row) rows[row] = shuffled[row];
  }
}

}  // namespace
