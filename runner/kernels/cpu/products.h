// Products with a weight matrix in bfloat16, for tiers that multiply pairs of bfloat16.
//
// The matrix is laid out once in panels of 16 outputs, a vector: for each pair of inputs, 16 outputs x 2 inputs lie
// together. A row's output is one sum over the inputs in their order, so it is the same to the bit in any company: alone,
// in a batch, in any chunk of a prompt.
//
//      tile in registers     rows x panels, about 24 sums: a multiplication takes some 13 cycles and two begin in each
//      group in the cache    the panels of a tile, until all rows have had them; the next group is fetched meanwhile
#pragma once

#include "kernels.h"
#include "vector.h"

namespace {

#if defined(__AVX512BF16__)

using kvyard::ProductWork;

// Rows of one pass, when they are all, and when there are more.
constexpr int kMostRows = 12, kRowsOfMany = 9;
// Rows whose inputs stay in the second-level cache beside a group of panels.
constexpr int kBlockRows = 270;

// Panels side by side for so many rows: up to 27 sums leave registers for weights and input.
constexpr int most_panels(int rows) { return rows <= 6 ? 4 : rows <= 9 ? 3 : 2; }

// What to fetch of the next group, which is the same thread's as a rule: as many panels as this one has, each pass its
// share of their pairs.
struct Fetch {
  int64_t panel, passes, pass;
};

template <int kRows, int kPanels>
void multiply_tile(const ProductWork& work, int64_t row, int64_t panel, Fetch fetch) {
  const char* in = static_cast<const char*>(work.in) + row * work.in_stride_bytes;
  const U32* weights = static_cast<const U32*>(work.panels) + panel * work.pairs;
  const U32* later = static_cast<const U32*>(work.panels) + fetch.panel * work.pairs + work.pairs * fetch.pass / fetch.passes;
  int64_t until_fetch = 1;
  F32 sums[kRows][kPanels] = {};
  for (int64_t pair = 0; pair < work.pairs; ++pair) {
    __m512bh units[kPanels];
#pragma GCC unroll 4
    for (int column = 0; column < kPanels; ++column) {
      units[column] = (__m512bh)weights[column * work.pairs + pair];
    }
    if (--until_fetch == 0) {
      until_fetch = fetch.passes;
#pragma GCC unroll 4
      for (int column = 0; column < kPanels; ++column) __builtin_prefetch(later + column * work.pairs, 0, 2);
      ++later;
    }
#pragma GCC unroll 12
    for (int index = 0; index < kRows; ++index) {
      uint32_t unit;
      std::memcpy(&unit, in + index * work.in_stride_bytes + pair * 4, sizeof unit);
      const __m512bh both = (__m512bh)(U32{} + unit);
#pragma GCC unroll 4
      for (int column = 0; column < kPanels; ++column)
        sums[index][column] = (F32)_mm512_dpbf16_ps((__m512)sums[index][column], both, units[column]);
    }
  }
  for (int index = 0; index < kRows; ++index) {
    auto* to = reinterpret_cast<BFloat16*>(static_cast<char*>(work.out) + (row + index) * work.out_stride_bytes);
    for (int column = 0; column < kPanels; ++column) {
      const int64_t output = (panel + column) * kLanes;
      store(to + output, sums[index][column], work.outputs - output);
    }
  }
}

template <int kRows, int kPanels = most_panels(kRows)>
INLINE void multiply_panels(const ProductWork& work, int64_t row, int64_t panel, int64_t panels, Fetch fetch) {
  if constexpr (kPanels > 0) {
    if (panels == kPanels) return multiply_tile<kRows, kPanels>(work, row, panel, fetch);
    multiply_panels<kRows, kPanels - 1>(work, row, panel, panels, fetch);
  }
}

template <int kRows = kMostRows>
void multiply_rows(const ProductWork& work, int64_t row, int64_t rows, int64_t panel, int64_t panels, Fetch fetch) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return multiply_panels<kRows>(work, row, panel, panels, fetch);
    multiply_rows<kRows - 1>(work, row, rows, panel, panels, fetch);
  }
}

// Passes over the rows and groups of panels are as equal as can be.
void multiply_block(const ProductWork& work, int64_t first, int64_t last) {
  const int64_t passes = work.rows <= kMostRows ? 1 : (work.rows + kRowsOfMany - 1) / kRowsOfMany;
  const int64_t all = (work.outputs + kLanes - 1) / kLanes;
  const int64_t most_rows = (work.rows + passes - 1) / passes;
  const int64_t most = most_panels(static_cast<int>(most_rows)), groups = (last - first + most - 1) / most;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t panel = first + (last - first) * group / groups;
    const int64_t panels = first + (last - first) * (group + 1) / groups - panel;
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t row = work.rows * pass / passes, rows = work.rows * (pass + 1) / passes - row;
      multiply_rows(work, row, rows, panel, panels, {panel + 2 * panels <= all ? panel + panels : panel, passes, pass});
    }
  }
}

void multiply(const ProductWork& work, int64_t first, int64_t last) {
  static_assert(kvyard::kPanel == kLanes, "a panel is a vector");
  const int64_t blocks = (work.rows + kBlockRows - 1) / kBlockRows;
  for (int64_t index = 0; index < blocks; ++index) {
    const int64_t row = work.rows * index / blocks;
    ProductWork block = work;
    block.in = static_cast<const char*>(work.in) + row * work.in_stride_bytes;
    block.out = static_cast<char*>(work.out) + row * work.out_stride_bytes;
    block.rows = work.rows * (index + 1) / blocks - row;
    multiply_block(block, first, last);
  }
}

constexpr auto* kMultiply = &multiply;
#else
constexpr void (*kMultiply)(const kvyard::ProductWork&, int64_t, int64_t) = nullptr;
#endif

}  // namespace
