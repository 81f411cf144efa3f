// Products with a weight matrix of bfloat16 that is kept in three quarters of its bytes, for tiers that multiply pairs of
// bfloat16. One row at a time is bound by reading the weights, so fewer bytes are a faster token.
//
// The exponents of a trained matrix are few: 15 of the 256 serve all but a few weights in ten thousand. So 4 bits name
// a weight's exponent, and its sign and mantissa stand beside in 8. Nothing is rounded: weights of other exponents, the
// outliers, are zero in the panels and are added at the end. packed_weight.h says how the matrix lies.
//
// A row's output is one sum over the inputs in their order, the outliers behind, so it is the same to the bit in any
// company: alone, in a batch, in any chunk of a prompt.
//
//      tile in registers     rows x panels, about 24 sums: a multiplication takes some 13 cycles and two begin in each
//      group in the cache    the panels of a tile, until all rows have had them; the next group is fetched meanwhile.
//                            For rows of more than one pass its weights are expanded in the first
#pragma once

#include <type_traits>

#include "kernels.h"
#include "vector.h"

namespace {

#if defined(__AVX512BF16__)

using kvyard::Outlier;
using kvyard::ProductWork;

// Rows of one pass, when they are all, and when there are more.
constexpr int kMostRows = 12, kRowsOfMany = 9;
// Inputs that stay in the second-level cache beside a group of panels.
constexpr int64_t kBlockBytes = 810 << 10;

// Panels side by side for so many rows: up to 27 sums leave registers for weights and input.
constexpr int most_panels(int rows) { return rows <= 6 ? 4 : rows <= 9 ? 3 : 2; }

typedef uint16_t U16x32 __attribute__((vector_size(64)));

// Four pairs of inputs at a time, of kPanels panels side by side, one way or the other.
struct PackedPanels {
  const char* at;
  int64_t panel_bytes;
  U16x32 exponents;

  template <int kPanels>
  struct Four {
    const char* at;
    int64_t panel_bytes;
    __m512i exponents;
    U16x32 codes[kPanels];

    INLINE Four(const PackedPanels& panels, int64_t four)
        : at(panels.at + four * kvyard::kPackedFourBytes), panel_bytes(panels.panel_bytes), exponents((__m512i)panels.exponents) {
#pragma GCC unroll 4
      for (int column = 0; column < kPanels; ++column) codes[column] = load_raw<U16x32>(at + column * panel_bytes);
    }
    // The table repeats itself behind 16 entries, so that the codes above the pair's need not be cut off.
    INLINE __m512bh units(int column, int pair) const {
      const auto rest = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + column * panel_bytes + 64 + 32 * pair));
      const __m512i exponent = _mm512_permutexvar_epi16((__m512i)(codes[column] >> 4 * pair), exponents);
      // rest & 0x807F | exponent
      return (__m512bh)_mm512_ternarylogic_epi32(_mm512_cvtepi8_epi16(rest), _mm512_set1_epi16(static_cast<int16_t>(0x807F)),
                                                 exponent, 0xEA);
    }
  };
};

// The same, and what is multiplied is kept for the passes that follow.
struct KeptPanels : PackedPanels {
  U32* to;
};

struct ExpandedPanels {
  const U32* at;
  int64_t pairs;

  template <int kPanels>
  struct Four {
    const U32* at;
    int64_t pairs;

    INLINE Four(const ExpandedPanels& panels, int64_t four) : at(panels.at + 4 * four), pairs(panels.pairs) {}
    INLINE __m512bh units(int column, int pair) const { return (__m512bh)at[column * pairs + pair]; }
  };
};

// Bytes that come next for this thread, a share of them in each pass over the rows.
struct Fetch {
  const char *at, *end;
};

// `panel` is the first of `panels`.
template <int kRows, int kPanels, class Panels>
void multiply_tile(const ProductWork& work, const Panels& panels, int64_t row, int64_t panel, Fetch fetch) {
  const char* in = static_cast<const char*>(work.in) + row * work.in_stride_bytes;
  const int64_t fours = work.pairs / 4, bytes_at_once = ((fetch.end - fetch.at) / fours / 64 + 1) * 64;
  F32 sums[kRows][kPanels] = {};
  const auto input = [&](int index, int64_t pair) {
    uint32_t unit;
    std::memcpy(&unit, in + index * work.in_stride_bytes + pair * 4, sizeof unit);
    return (__m512bh)(U32{} + unit);
  };
  for (int64_t four = 0; four < fours; ++four) {
    const typename Panels::template Four<kPanels> weights(panels, four);
    const char* until = fetch.at + bytes_at_once < fetch.end ? fetch.at + bytes_at_once : fetch.end;
    for (; fetch.at < until; fetch.at += 64) __builtin_prefetch(fetch.at, 0, 2);
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; ++pair) {
      __m512bh units[kPanels];
#pragma GCC unroll 4
      for (int column = 0; column < kPanels; ++column) {
        units[column] = weights.units(column, pair);
        if constexpr (std::is_same_v<Panels, KeptPanels>) panels.to[column * work.pairs + 4 * four + pair] = (U32)units[column];
      }
#pragma GCC unroll 12
      for (int index = 0; index < kRows; ++index) {
        const __m512bh both = input(index, 4 * four + pair);
#pragma GCC unroll 4
        for (int column = 0; column < kPanels; ++column)
          sums[index][column] = (F32)_mm512_dpbf16_ps((__m512)sums[index][column], both, units[column]);
      }
    }
  }
  F32 totals[kRows][kPanels];
#pragma GCC unroll 12
  for (int index = 0; index < kRows; ++index)
#pragma GCC unroll 4
    for (int column = 0; column < kPanels; ++column) totals[index][column] = sums[index][column];
  for (int column = 0; column < kPanels; ++column) {
    const Outlier* last = work.outliers + work.first_outliers[panel + column + 1];
    for (const Outlier* outlier = work.outliers + work.first_outliers[panel + column]; outlier < last; ++outlier) {
      const I32 lane = I32{} + static_cast<int32_t>(outlier->place % kLanes);
      const U32 unit = (U32)(lane_numbers() == lane) & outlier->pair;
      for (int index = 0; index < kRows; ++index)
        totals[index][column] = (F32)_mm512_dpbf16_ps((__m512)totals[index][column], input(index, outlier->place / kLanes), (__m512bh)unit);
    }
  }
  for (int index = 0; index < kRows; ++index) {
    char* to = static_cast<char*>(work.out) + (row + index) * work.out_stride_bytes;
    for (int column = 0; column < kPanels; ++column) {
      const int64_t output = (panel + column) * kLanes;
      if (work.to_float32) {
        store(reinterpret_cast<float*>(to) + output, totals[index][column], work.outputs - output);
      } else {
        store(reinterpret_cast<BFloat16*>(to) + output, totals[index][column], work.outputs - output);
      }
    }
  }
}

template <int kRows, int kPanels = most_panels(kRows), class Panels>
INLINE void multiply_panels(const ProductWork& work, const Panels& from, int64_t row, int64_t panel, int64_t panels,
                            Fetch fetch) {
  if constexpr (kPanels > 0) {
    if (panels == kPanels) return multiply_tile<kRows, kPanels>(work, from, row, panel, fetch);
    multiply_panels<kRows, kPanels - 1>(work, from, row, panel, panels, fetch);
  }
}

template <int kRows = kMostRows, class Panels>
void multiply_rows(const ProductWork& work, const Panels& from, int64_t row, int64_t rows, int64_t panel, int64_t panels,
                   Fetch fetch) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return multiply_panels<kRows>(work, from, row, panel, panels, fetch);
    multiply_rows<kRows - 1>(work, from, row, rows, panel, panels, fetch);
  }
}

// Passes over the rows and groups of panels are as equal as can be.
void multiply_block(const ProductWork& work, int64_t first, int64_t last, void* scratch) {
  const int64_t passes = work.rows <= kMostRows ? 1 : (work.rows + kRowsOfMany - 1) / kRowsOfMany;
  const int64_t all = (work.outputs + kLanes - 1) / kLanes, panel_bytes = work.pairs / 4 * kvyard::kPackedFourBytes;
  const int64_t most_rows = (work.rows + passes - 1) / passes;
  const int64_t most = most_panels(static_cast<int>(most_rows)), groups = (last - first + most - 1) / most;
  const auto exponents = load_raw<U16x32>(work.exponents);
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t panel = first + (last - first) * group / groups;
    const int64_t panels = first + (last - first) * (group + 1) / groups - panel;
    const int64_t later_end = panel + 2 * panels < all ? panel + 2 * panels : all;
    const PackedPanels packed{static_cast<const char*>(work.panels) + panel * panel_bytes, panel_bytes, exponents};
    const char* later = packed.at + panels * panel_bytes;
    const int64_t bytes = (later_end - panel - panels) * panel_bytes;
    auto* expanded = static_cast<U32*>(scratch);
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t row = work.rows * pass / passes, rows = work.rows * (pass + 1) / passes - row;
      const Fetch fetch{later + bytes * pass / passes, later + bytes * (pass + 1) / passes};
      if (passes == 1) {
        multiply_rows(work, packed, row, rows, panel, panels, fetch);
      } else if (pass == 0) {
        multiply_rows(work, KeptPanels{packed, expanded}, row, rows, panel, panels, fetch);
      } else {
        multiply_rows(work, ExpandedPanels{expanded, work.pairs}, row, rows, panel, panels, fetch);
      }
    }
  }
}

void multiply(const ProductWork& work, int64_t first, int64_t last, void* scratch) {
  static_assert(kvyard::kPanel == kLanes, "a panel is a vector");
  const int64_t blocks = (work.rows * work.pairs * 4 + kBlockBytes - 1) / kBlockBytes;
  for (int64_t index = 0; index < blocks; ++index) {
    const int64_t row = work.rows * index / blocks;
    ProductWork block = work;
    block.in = static_cast<const char*>(work.in) + row * work.in_stride_bytes;
    block.out = static_cast<char*>(work.out) + row * work.out_stride_bytes;
    block.rows = work.rows * (index + 1) / blocks - row;
    multiply_block(block, first, last, scratch);
  }
}

constexpr auto* kMultiply = &multiply;
#else
constexpr void (*kMultiply)(const kvyard::ProductWork&, int64_t, int64_t, void*) = nullptr;
#endif

}  // namespace
