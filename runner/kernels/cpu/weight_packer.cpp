#include "weight_packer.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "threads.h"

namespace kvyard {
namespace {

constexpr uint8_t kNoCode = 255;

int exponent_of(uint16_t bits) { return bits >> 7 & 255; }
uint8_t rest_of(uint16_t bits) { return static_cast<uint8_t>((bits >> 8 & 0x80) | (bits & 0x7F)); }

}  // namespace

WeightPacker::WeightPacker(const uint16_t* weight, int64_t outputs, int64_t inputs, int64_t stride)
    : weight_(weight), outputs_(outputs), inputs_(inputs), stride_(stride), layout_(outputs, inputs) {
  choose_exponents();
  find_outliers();
}

// The most frequent ones behind exponent 0; of two equally frequent ones the smaller.
void WeightPacker::choose_exponents() {
  int64_t counts[4][256] = {};  // four, so that one need not wait for the one before
  for (int64_t output = 0; output < outputs_; ++output)
    for (int64_t input = 0; input < inputs_; ++input) ++counts[input % 4][exponent_of(row(output)[input])];
  for (int place = 1; place < 4; ++place)
    for (int exponent = 0; exponent < 256; ++exponent) counts[0][exponent] += counts[place][exponent];
  int order[256];
  std::iota(order, order + 256, 0);
  std::stable_sort(order + 1, order + 256, [&](int a, int b) { return counts[0][a] > counts[0][b]; });
  std::fill_n(codes_, 256, kNoCode);
  for (int code = 0; code < kExponents; ++code) {
    codes_[order[code]] = static_cast<uint8_t>(code);
    exponents_[code] = static_cast<uint16_t>(order[code] << 7);
  }
}

void WeightPacker::find_outliers() {
  const auto outside = [&](uint16_t bits) { return codes_[exponent_of(bits)] == kNoCode ? bits : uint16_t{0}; };
  for (int64_t panel = 0; panel * kPanel < outputs_; ++panel) {
    first_outliers_.push_back(static_cast<int32_t>(outliers_.size()));
    for (int64_t output = panel * kPanel; output < std::min(outputs_, (panel + 1) * kPanel); ++output) {
      for (int64_t input = 0; input < inputs_; input += 2) {
        const uint32_t pair = outside(row(output)[input]) | static_cast<uint32_t>(outside(row(output)[input + 1])) << 16;
        if (pair) outliers_.push_back({static_cast<uint32_t>(input / 2 * kPanel + output % kPanel), pair});
      }
    }
    std::sort(outliers_.begin() + first_outliers_.back(), outliers_.end(),
              [](const Outlier& a, const Outlier& b) { return a.place < b.place; });
  }
  first_outliers_.push_back(static_cast<int32_t>(outliers_.size()));
}

int64_t WeightPacker::num_bytes() const {
  return layout_.outliers + static_cast<int64_t>(outliers_.size() * sizeof(Outlier));
}

void WeightPacker::write_panel(int64_t panel, char* to) const {
  for (int64_t four = 0; four < inputs_ / 8; ++four, to += kPackedFourBytes) {
    uint16_t words[2 * kPanel] = {};
    uint8_t rest[4][2 * kPanel] = {};
    for (int64_t place = 0; place < 2 * kPanel; ++place) {
      const int64_t output = panel * kPanel + place / 2;
      if (output >= outputs_) break;
      for (int64_t pair = 0; pair < 4; ++pair) {
        const uint16_t bits = row(output)[8 * four + 2 * pair + place % 2];
        const uint8_t code = codes_[exponent_of(bits)];
        if (code == kNoCode) continue;
        words[place] = static_cast<uint16_t>(words[place] | code << 4 * pair);
        rest[pair][place] = rest_of(bits);
      }
    }
    std::memcpy(to, words, sizeof words);
    std::memcpy(to + sizeof words, rest, sizeof rest);
  }
}

void WeightPacker::write(char* to) const {
  const int64_t panels = (outputs_ + kPanel - 1) / kPanel;
  std::memset(to, 0, static_cast<size_t>(layout_.panels));
  std::memset(to + layout_.first_outliers, 0, static_cast<size_t>(layout_.outliers - layout_.first_outliers));
  std::memcpy(to, exponents_, sizeof exponents_);
  std::memcpy(to + sizeof exponents_, exponents_, sizeof exponents_);
  run_ranges(panels, std::min(panels, num_threads()), [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) write_panel(panel, to + layout_.panels + panel * layout_.panel_bytes);
  });
  std::memcpy(to + layout_.first_outliers, first_outliers_.data(), first_outliers_.size() * sizeof(int32_t));
  std::memcpy(to + layout_.outliers, outliers_.data(), outliers_.size() * sizeof(Outlier));
}

void unpack_row(const char* packed, const PackedLayout& layout, int64_t output, int64_t inputs, uint16_t* to) {
  const int64_t panel = output / kPanel, lane = output % kPanel;
  const auto* exponents = reinterpret_cast<const uint16_t*>(packed);
  const char* from = packed + layout.panels + panel * layout.panel_bytes;
  for (int64_t input = 0; input < inputs; input += 8, from += kPackedFourBytes) {
    const auto* words = reinterpret_cast<const uint16_t*>(from) + 2 * lane;
    const auto* rest = reinterpret_cast<const uint8_t*>(from) + 64 + 2 * lane;
    for (int64_t at = 0; at < 8; ++at) {
      const int beside = rest[at / 2 * 32 + at % 2];
      to[input + at] = static_cast<uint16_t>(exponents[words[at % 2] >> at / 2 * 4 & 15] | (beside & 0x80) << 8 | (beside & 0x7F));
    }
  }
  const auto* first = reinterpret_cast<const int32_t*>(packed + layout.first_outliers) + panel;
  const auto* outliers = reinterpret_cast<const Outlier*>(packed + layout.outliers);
  for (int32_t index = first[0]; index < first[1]; ++index) {
    const Outlier& outlier = outliers[index];
    if (outlier.place % kPanel != lane) continue;
    uint16_t* pair = to + outlier.place / kPanel * 2;
    pair[0] = static_cast<uint16_t>(pair[0] | (outlier.pair & 0xFFFF));
    pair[1] = static_cast<uint16_t>(pair[1] | outlier.pair >> 16);
  }
}

}  // namespace kvyard
