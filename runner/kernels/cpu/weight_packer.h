// Packs a weight matrix of bfloat16 as packed_weight.h says, and takes rows out again.
#pragma once

#include <vector>

#include "packed_weight.h"

namespace kvyard {

// How one matrix is packed: found out first, so that it is known how large it gets.
class WeightPacker {
 public:
  // `weight` [outputs, inputs], rows `stride` elements apart; inputs a multiple of 8.
  WeightPacker(const uint16_t* weight, int64_t outputs, int64_t inputs, int64_t stride);
  int64_t num_bytes() const;
  void write(char* to) const;

 private:
  void choose_exponents();
  void find_outliers();
  void write_panel(int64_t panel, char* to) const;
  const uint16_t* row(int64_t output) const { return weight_ + output * stride_; }

  const uint16_t* weight_;
  const int64_t outputs_, inputs_, stride_;
  const PackedLayout layout_;
  uint16_t exponents_[kExponents];  // in their place in a bfloat16
  uint8_t codes_[256];              // of every exponent
  std::vector<int32_t> first_outliers_;
  std::vector<Outlier> outliers_;
};

// Row `output` of a packed matrix as it was, `inputs` values.
void unpack_row(const char* packed, const PackedLayout& layout, int64_t output, int64_t inputs, uint16_t* to);

}  // namespace kvyard
