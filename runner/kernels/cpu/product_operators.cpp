// Weight products and look-ups as torch operators, of packed and of quantised matrices; operators.cpp has the others.
#include <torch/headeronly/util/BFloat16.h>

#include <cmath>
#include <vector>

#include "torch_tensors.h"
#include "weight_packer.h"

namespace kvyard {
namespace {

// Fewer multiplications than this are done before a second thread would wake up; it reads their weights too.
constexpr int64_t kMultiplicationsPerThread = 1 << 17;
// A product's pieces: several for each thread, so that one that comes late finds its share, but not too small ones.
constexpr int64_t kPiecesPerThread = 3, kPanelsPerPiece = 6;

// As many for each thread: with one more than that, all wait for the thread that has it.
int64_t product_pieces(int64_t panels, int64_t multiplications) {
  const int64_t threads = std::min(num_threads(), 1 + multiplications / kMultiplicationsPerThread);
  const int64_t for_each = std::clamp<int64_t>(panels / (kPanelsPerPiece * threads), 1, kPiecesPerThread);
  return threads == 1 ? 1 : std::min(panels, threads * for_each);
}

// Of a product: float32 when that is asked for.
Tensor empty_product(const Tensor& in, int64_t rows, int64_t outputs, bool to_float32) {
  return to_float32 ? empty_rows(in, rows, outputs, aoti_torch_dtype_float32()) : empty_like(in, rows, outputs);
}

// weight [outputs, inputs] -> its bytes as packed_weight.h says.
Tensor pack_weight(Tensor weight) {
  STD_TORCH_CHECK(kernels_for(weight).multiply != nullptr, "kvyard: this CPU has no products of bfloat16");
  const Rows in = rows_of(weight, "weight");
  STD_TORCH_CHECK(in.count > 0, "kvyard: no outputs");
  STD_TORCH_CHECK(in.width > 0 && in.width % 8 == 0, "kvyard: the number of inputs is not a multiple of 8");
  const WeightPacker packer(reinterpret_cast<const uint16_t*>(in.data), in.count, in.width, in.stride_bytes / 2);
  Tensor result = empty_vector(weight, packer.num_bytes(), aoti_torch_dtype_uint8());
  packer.write(static_cast<char*>(result.data_ptr()));
  return result;
}

PackedLayout layout_of(const Tensor& packed, int64_t outputs, int64_t inputs) {
  // No more of either than the bytes can hold, whatever the other: so no size overflows.
  const bool sizes = inputs > 0 && inputs % 8 == 0 && outputs > 0 &&
                     outputs <= packed.numel() / kPackedFourBytes * kPanel && inputs <= packed.numel();
  const PackedLayout layout(sizes ? outputs : 0, sizes ? inputs : 0);
  bool fits = sizes && packed.dim() == 1 && packed.is_contiguous() && packed.scalar_type() == torch::headeronly::ScalarType::Byte &&
              packed.numel() >= layout.outliers;
  if (fits) {
    const auto* first = reinterpret_cast<const int32_t*>(static_cast<const char*>(packed.data_ptr()) + layout.first_outliers);
    const int64_t outliers = first[(outputs + kPanel - 1) / kPanel];
    fits = packed.numel() == layout.outliers + outliers * static_cast<int64_t>(sizeof(Outlier));
  }
  STD_TORCH_CHECK(fits, "kvyard: the packed weight does not fit");
  return layout;
}

// The calling thread's memory for weights as they are multiplied, kept between calls.
void* expanded_weights(int64_t pairs) {
  struct alignas(64) Line {
    char bytes[64];
  };
  static thread_local std::vector<Line> memory;
  memory.resize(std::max(memory.size(), static_cast<size_t>(kMostExpanded * pairs)));
  return memory.data();
}

Tensor packed_linear(Tensor in, Tensor packed, int64_t outputs, bool to_float32) {
  const Kernels& kernels = kernels_for(in);
  STD_TORCH_CHECK(kernels.multiply != nullptr, "kvyard: this CPU has no products of bfloat16");
  const Rows from = rows_of(in, "in");
  STD_TORCH_CHECK(from.count > 0, "kvyard: no rows");
  const PackedLayout layout = layout_of(packed, outputs, from.width);
  Tensor result = empty_product(in, from.count, outputs, to_float32);
  const Rows to = rows_of(result, "out");
  const auto* weight = static_cast<const char*>(packed.data_ptr());
  const ProductWork work{from.data,
                         weight + layout.panels,
                         reinterpret_cast<const uint16_t*>(weight),
                         reinterpret_cast<const int32_t*>(weight + layout.first_outliers),
                         reinterpret_cast<const Outlier*>(weight + layout.outliers),
                         to.data,
                         from.count,
                         from.width / 2,
                         outputs,
                         from.stride_bytes,
                         to.stride_bytes,
                         to_float32};
  const int64_t panels = (outputs + kPanel - 1) / kPanel;
  run_ranges(panels, product_pieces(panels, from.count * from.width * outputs),
             [&](int64_t begin, int64_t end) { kernels.multiply(work, begin, end, expanded_weights(work.pairs)); });
  return result;
}

// Rows of a packed matrix of so many outputs. `like` [inputs] says the width.
Tensor packed_embedding(Tensor token_ids, Tensor packed, int64_t outputs, Tensor like) {
  const int64_t inputs = like.numel(), tokens = token_ids.numel();
  STD_TORCH_CHECK(like.scalar_type() == torch::headeronly::ScalarType::BFloat16, "kvyard: only bfloat16 is packed");
  const PackedLayout layout = layout_of(packed, outputs, inputs);
  const auto* at = vector_of<int64_t>(token_ids, tokens, torch::headeronly::ScalarType::Long, "token_ids");
  for (int64_t token = 0; token < tokens; ++token)
    STD_TORCH_CHECK(at[token] >= 0 && at[token] < outputs, "kvyard: there is no token ", at[token]);
  Tensor result = empty_like(like, tokens, inputs);
  const Rows to = rows_of(result, "out");
  const auto* weight = static_cast<const char*>(packed.data_ptr());
  for_each_row(tokens, inputs, [&](int64_t token) {
    unpack_row(weight, layout, at[token], inputs, reinterpret_cast<uint16_t*>(to[token]));
  });
  return result;
}

// The form of a packed quantised matrix, and the bytes of its panels for so many inputs.
QuantizedForm form_of(int64_t bits, int64_t group, bool minima) {
  for (const auto form : {QuantizedForm::kFourBits, QuantizedForm::kFourBitsMinima, QuantizedForm::kEightBits,
                          QuantizedForm::kEightBitsOf16})
    if (bits == bits_of(form) && group == group_of(form) && minima == has_minima(form)) return form;
  STD_TORCH_CHECK(false, "kvyard: no products with codes of ", bits, " bits in groups of ", group);
  return QuantizedForm::kEightBits;
}

Rows panels_of(const Tensor& panels, QuantizedForm form, int64_t inputs, int64_t outputs) {
  const int64_t scales = inputs / group_of(form) * (1 + has_minima(form)) * 2 * kPanel;
  const int64_t bytes = (inputs * kPanel * bits_of(form) / 8 + scales + 63) / 64 * 64;
  const Rows rows = rows_of(panels, "panels");
  STD_TORCH_CHECK(panels.scalar_type() == torch::headeronly::ScalarType::Byte && inputs % kQuantizedGroup == 0 &&
                      rows.width == bytes && rows.stride_bytes == bytes && rows.count * kPanel >= outputs,
                  "kvyard: the packed weight does not fit");
  return rows;
}

// The calling thread's memory for activations, kept between calls.
QuantizedRows activations(int64_t rows, int64_t inputs) {
  static thread_local std::vector<int32_t> memory;
  const int64_t groups = rows * inputs / kQuantizedGroup, codes = rows * inputs / 4;
  memory.resize(std::max(memory.size(), static_cast<size_t>(codes + 4 * groups)));
  int32_t* rest = memory.data() + codes;
  return {reinterpret_cast<int8_t*>(memory.data()), reinterpret_cast<float*>(rest),
          reinterpret_cast<float*>(rest + groups), rest + 2 * groups};
}

QuantizedRows row_of(const QuantizedRows& rows, int64_t row, int64_t inputs, QuantizedForm form) {
  const int64_t groups = inputs / kQuantizedGroup;
  return {rows.codes + row * inputs, rows.scales + row * groups, rows.sums + row * groups,
          rows.offsets + row * inputs / group_of(form)};
}

Tensor quantized_linear(Tensor in, Tensor panels, int64_t outputs, int64_t bits, int64_t group, bool minima,
                        bool to_float32) {
  const bool bfloat16 = &kernels_for(in) != &current_tier()[0];
  const QuantizedKernels& kernels = *current_quantized();
  const QuantizedForm form = form_of(bits, group, minima);
  const Rows from = rows_of(in, "in"), packed = panels_of(panels, form, from.width, outputs);
  STD_TORCH_CHECK(from.count > 0, "kvyard: no rows");
  Tensor result = empty_product(in, from.count, outputs, to_float32);
  const Rows to = rows_of(result, "out");
  const QuantizedRows whole = activations(from.count, from.width);
  for_each_row(from.count, from.width, [&](int64_t row) {
    kernels.quantize_row[bfloat16](from[row], from.width, form, row_of(whole, row, from.width, form));
  });
  const QuantizedWork work{form,       whole,   packed.data,  to.data,        from.count,
                           from.width, outputs, packed.width, to.stride_bytes, bfloat16 && !to_float32};
  run_ranges(packed.count, product_pieces(packed.count, from.count * from.width * outputs),
             [&](int64_t begin, int64_t end) { kernels.multiply(work, begin, end); });
  return result;
}

float from_half(uint16_t bits) {
  const uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                        : std::ldexp(static_cast<float>(1024 + fraction), static_cast<int>(exponent) - 25);
  return bits >> 15 ? -magnitude : magnitude;
}

// `like` [hidden] says the width and the dtype of the result.
Tensor quantized_embedding(Tensor token_ids, Tensor panels, Tensor like, int64_t bits, int64_t group, bool minima) {
  const bool bfloat16 = &kernels_for(like) != &current_tier()[0];
  const QuantizedForm form = form_of(bits, group, minima);
  const int64_t inputs = like.numel(), tokens = token_ids.numel();
  const Rows packed = panels_of(panels, form, inputs, 1);
  const auto* at = vector_of<int64_t>(token_ids, tokens, torch::headeronly::ScalarType::Long, "token_ids");
  Tensor result = empty_like(like, tokens, inputs);
  const Rows to = rows_of(result, "out");
  for (int64_t token = 0; token < tokens; ++token)
    STD_TORCH_CHECK(at[token] >= 0 && at[token] < packed.count * kPanel, "kvyard: there is no token ", at[token]);
  for_each_row(tokens, inputs, [&](int64_t token) {
    const auto* codes = reinterpret_cast<const uint8_t*>(packed[at[token] / kPanel]);
    const auto* scales = reinterpret_cast<const uint16_t*>(codes + inputs * kPanel * bits / 8);
    const int64_t lane = at[token] % kPanel, per_vector = 32 / bits;
    for (int64_t input = 0; input < inputs; ++input) {
      const int64_t within = input % per_vector, scale_at = input / group * kPanel + lane;
      const uint8_t byte = codes[input / per_vector * 64 + lane * 4 + within % 4];
      const int code = bits == 8 ? byte : within < 4 ? byte & 15 : byte >> 4;
      float value = static_cast<float>(code - zero_of(form)) * from_half(scales[scale_at]);
      if (minima) value += from_half(scales[inputs / group * kPanel + scale_at]);
      if (bfloat16) {
        reinterpret_cast<uint16_t*>(to[token])[input] = torch::headeronly::BFloat16(value).x;
      } else {
        reinterpret_cast<float*>(to[token])[input] = value;
      }
    }
  });
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvyard, CPU, library) {
  library.impl("pack_weight", TORCH_BOX(&pack_weight));
  library.impl("packed_linear", TORCH_BOX(&packed_linear));
  library.impl("packed_embedding", TORCH_BOX(&packed_embedding));
  library.impl("quantized_linear", TORCH_BOX(&quantized_linear));
  library.impl("quantized_embedding", TORCH_BOX(&quantized_embedding));
}

}  // namespace kvyard
