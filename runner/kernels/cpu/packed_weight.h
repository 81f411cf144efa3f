// A weight matrix of bfloat16 in 12 bits of each 16, without loss.
//
//      exponents     32 words, see below; entry 0 is exponent 0, so code 0 with nothing beside it is weight 0
//      panels        of 16 outputs, one behind the other. For each 8 inputs, which are four pairs, 192 bytes:
//                        32 words    of output o, place p in its pair at o * 2 + p: 4 bits for each pair, the weight's
//                                    exponent by its number in the table, the first pair lowest
//                        4 x 32      for each pair, in the same order: sign and mantissa in a byte
//      outliers      where those of each panel begin and the last one's end, int32; then they themselves
#pragma once

#include <cstdint>

namespace kvyard {

constexpr int64_t kPanel = 16, kPackedFourBytes = 192;
constexpr int kExponents = 16;

// Two weights of an output, of which one at least has an exponent that is not in the table; the other one is zero then.
struct Outlier {
  uint32_t place;  // pair of inputs * 16 + output in the panel
  uint32_t pair;
};

// Where the parts of a packed matrix begin, in bytes, each 64-aligned.
struct PackedLayout {
  int64_t panels, panel_bytes, first_outliers, outliers;

  PackedLayout(int64_t outputs, int64_t inputs)
      : panels(2 * kExponents * 2), panel_bytes(inputs / 8 * kPackedFourBytes) {
    const int64_t count = (outputs + kPanel - 1) / kPanel;
    first_outliers = panels + count * panel_bytes;
    outliers = (first_outliers + (count + 1) * 4 + 63) / 64 * 64;
  }
};

}  // namespace kvyard
