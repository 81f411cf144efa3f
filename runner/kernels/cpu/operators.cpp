// The CPU kernels as torch operators: checks what the caller hands over, cuts the work into pieces and gives them to
// the threads of threads.h. Written against torch's stable ABI, whose headers compile in seconds and which outlives torch versions.
//
// Schemas, fake implementations and the reference in plain torch are in operators.py; this file adds the CPU key.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "threads.h"
#include "tiers.h"
#include "weight_packer.h"
#include "work.h"

namespace kvyard {
namespace {

using torch::stable::Tensor;

// Fewer elements of a row-wise operator than this are done before a second thread would wake up.
constexpr int64_t kElementsPerThread = 1 << 15;

// Likewise of products; a thread reads their weights too.
constexpr int64_t kMultiplicationsPerThread = 1 << 17;
// A product's pieces: several for each thread, so that one that comes late finds its share, but not too small ones.
constexpr int64_t kPiecesPerThread = 3, kPanelsPerPiece = 6;

// As many for each thread: with one more than that, all wait for the thread that has it.
int64_t product_pieces(int64_t panels, int64_t multiplications) {
  const int64_t threads = std::min(num_threads(), 1 + multiplications / kMultiplicationsPerThread);
  const int64_t for_each = std::clamp<int64_t>(panels / (kPanelsPerPiece * threads), 1, kPiecesPerThread);
  return threads == 1 ? 1 : std::min(panels, threads * for_each);
}

const Kernels& kernels_for(const Tensor& tensor) {
  const auto type = tensor.scalar_type();
  const bool bfloat16 = type == torch::headeronly::ScalarType::BFloat16;
  STD_TORCH_CHECK(bfloat16 || type == torch::headeronly::ScalarType::Float, "kvyard: only float32 and bfloat16");
  return current_tier()[bfloat16];
}

// [rows, width], rows `stride` elements apart.
struct Rows {
  char* data;
  int64_t count, width, stride_bytes;
  char* operator[](int64_t row) const { return data + row * stride_bytes; }
};

Rows rows_of(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.dim() == 2 && tensor.stride(1) == 1, "kvyard: ", name, " must be [rows, width], rows dense");
  const auto element = static_cast<int64_t>(tensor.element_size());
  return {static_cast<char*>(tensor.data_ptr()), tensor.size(0), tensor.size(1), tensor.stride(0) * element};
}

Tensor empty(const Tensor& model, int64_t dimensions, const int64_t* sizes, const int64_t* strides, int32_t dtype) {
  int32_t device_type, device_index;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(model.get(), &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(model.get(), &device_index));
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dimensions, sizes, strides, dtype, device_type,
                                                         device_index, &made));
  return Tensor(made);
}

Tensor empty_rows(const Tensor& model, int64_t rows, int64_t width, int32_t dtype) {
  const int64_t sizes[] = {rows, width}, strides[] = {width, 1};
  return empty(model, 2, sizes, strides, dtype);
}

Tensor empty_like(const Tensor& model, int64_t rows, int64_t width) {
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(model.get(), &dtype));
  return empty_rows(model, rows, width, dtype);
}

// Of a product: float32 when that is asked for.
Tensor empty_product(const Tensor& in, int64_t rows, int64_t outputs, bool to_float32) {
  return to_float32 ? empty_rows(in, rows, outputs, aoti_torch_dtype_float32()) : empty_like(in, rows, outputs);
}

Tensor empty_vector(const Tensor& model, int64_t length, int32_t dtype) {
  const int64_t stride = 1;
  return empty(model, 1, &length, &stride, dtype);
}

template <class F>
void for_each_row(int64_t rows, int64_t width, const F& work) {
  const int64_t pieces = std::min({rows, 2 * num_threads(), 1 + rows * width / kElementsPerThread});
  run_ranges(rows, pieces, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) work(row);
  });
}

Tensor add_rms_norm(Tensor residual, std::optional<Tensor> delta, Tensor weight, double epsilon) {
  const Kernels& kernels = kernels_for(residual);
  const Rows in = rows_of(residual, "residual");
  STD_TORCH_CHECK(weight.dim() == 1 && weight.size(0) == in.width && weight.is_contiguous() &&
                      weight.scalar_type() == residual.scalar_type(),
                  "kvyard: the norm's weight does not fit");
  std::optional<Rows> added;
  if (delta.has_value()) {
    added = rows_of(*delta, "delta");
    STD_TORCH_CHECK(added->count == in.count && added->width == in.width &&
                        delta->scalar_type() == residual.scalar_type(),
                    "kvyard: delta does not fit");
  }
  Tensor result = empty_like(residual, in.count, in.width);
  const Rows out = rows_of(result, "out");
  const void* factors = weight.data_ptr();
  for_each_row(in.count, in.width, [&](int64_t row) {
    kernels.add_rms_norm(in[row], added ? (*added)[row] : nullptr, factors, out[row], in.width,
                         static_cast<float>(epsilon));
  });
  return result;
}

Tensor swiglu(Tensor gate_up) {
  const Kernels& kernels = kernels_for(gate_up);
  const Rows in = rows_of(gate_up, "gate_up");
  Tensor result = empty_like(gate_up, in.count, in.width / 2);
  const Rows out = rows_of(result, "out");
  for_each_row(in.count, in.width, [&](int64_t row) { kernels.swiglu(in[row], out[row], out.width); });
  return result;
}

// Whole, as the views of kernels.h see it from layer 0; strides in bytes.
struct Pool {
  char *data, *scales;
  int64_t blocks, kv_heads, layers, block_size, head_size, row_bytes, head_stride, scale_head_stride;
  int64_t tile_bytes() const { return block_size * row_bytes; }
  int64_t scale_tile_bytes() const { return block_size * static_cast<int64_t>(sizeof(uint16_t)); }
  char* keys_of(int64_t layer) const { return data + 2 * layer * tile_bytes(); }
  char* scales_of(int64_t layer) const { return scales == nullptr ? nullptr : scales + 2 * layer * scale_tile_bytes(); }
};

// Bytes from head to head of [blocks, kv_heads, ...], where blocks follow each other and so do the heads of one. -1 when
// they do not, or what lies behind the heads is not dense. Strides of dimensions of size 1 mean nothing.
int64_t head_stride_of(const Tensor& tensor) {
  int64_t dense = 1;
  for (int64_t dimension = tensor.dim() - 1; dimension >= 2; --dimension) {
    if (tensor.size(dimension) != 1 && tensor.stride(dimension) != dense) return -1;
    dense *= tensor.size(dimension);
  }
  const int64_t blocks = tensor.size(0), heads = tensor.size(1);
  const int64_t stride = heads != 1 ? tensor.stride(1) : blocks != 1 ? tensor.stride(0) : dense;
  if (blocks != 1 && tensor.stride(0) != heads * stride) return -1;
  return stride * static_cast<int64_t>(tensor.element_size());
}

// `scales` of an int8 pool.
Pool pool_of(const Tensor& pool, const std::optional<Tensor>& scales, const Tensor& like, int64_t layer) {
  using Type = torch::headeronly::ScalarType;
  STD_TORCH_CHECK(pool.dim() == 6 && pool.size(1) > 0 && pool.size(3) == 2 && head_stride_of(pool) > 0,
                  "kvyard: the pool must be [blocks, kv_heads, layers, 2, block_size, head_size], heads dense");
  STD_TORCH_CHECK(pool.scalar_type() == (scales.has_value() ? Type::Char : like.scalar_type()),
                  "kvyard: the pool is of another dtype");
  STD_TORCH_CHECK(layer >= 0 && layer < pool.size(2), "kvyard: there is no layer ", layer);
  STD_TORCH_CHECK(pool.size(5) <= kMaxHeadSize && pool.size(5) % 2 == 0, "kvyard: head size ", pool.size(5));
  Pool view{static_cast<char*>(pool.data_ptr()), nullptr, pool.size(0), pool.size(1), pool.size(2), pool.size(4), pool.size(5),
            pool.size(5) * static_cast<int64_t>(pool.element_size()), head_stride_of(pool), 0};
  if (scales.has_value()) {
    bool fits = scales->dim() == 5 && scales->scalar_type() == Type::BFloat16 && head_stride_of(*scales) > 0;
    for (int64_t dimension = 0; fits && dimension < 5; ++dimension)
      fits = scales->size(dimension) == pool.size(dimension);
    STD_TORCH_CHECK(fits, "kvyard: the scales do not fit the pool");
    view.scales = static_cast<char*>(scales->data_ptr());
    view.scale_head_stride = head_stride_of(*scales);
  }
  return view;
}

template <class T>
const T* vector_of(const Tensor& tensor, int64_t length, torch::headeronly::ScalarType type, const char* name) {
  STD_TORCH_CHECK(tensor.scalar_type() == type && tensor.is_contiguous() && tensor.numel() == length, "kvyard: ", name,
                  " does not fit");
  return static_cast<const T*>(tensor.data_ptr());
}

void rotate_and_store(Tensor qkv, Tensor angles, Tensor positions, Tensor pool, Tensor stored, int64_t layer,
                      std::optional<Tensor> scales) {
  const Kernels& kernels = kernels_for(qkv);
  const Rows tokens = rows_of(qkv, "qkv"), table = rows_of(angles, "angles");
  const Pool view = pool_of(pool, scales, qkv, layer);
  const int64_t heads = tokens.width / view.head_size - 2 * view.kv_heads;
  STD_TORCH_CHECK(heads > 0 && tokens.width % view.head_size == 0, "kvyard: qkv does not fit the pool");
  STD_TORCH_CHECK(table.width == view.head_size && angles.scalar_type() == qkv.scalar_type(),
                  "kvyard: the table of angles does not fit");
  using Type = torch::headeronly::ScalarType;
  const auto* at = vector_of<int64_t>(positions, tokens.count, Type::Long, "positions");
  const auto* to = vector_of<int64_t>(stored, tokens.count * view.kv_heads, Type::Long, "stored");
  const StoreView store{view.keys_of(layer), 2 * view.layers * view.block_size, view.head_stride, view.tile_bytes(),
                        view.row_bytes, view.scales_of(layer), view.scale_head_stride, view.scale_tile_bytes()};
  for (int64_t token = 0; token < tokens.count; ++token)
    STD_TORCH_CHECK(at[token] >= 0 && at[token] < table.count, "kvyard: no angle for position ", at[token]);
  // `stored` counts rows from the first layer's keys on: those of the last layer's values lie so much further.
  const int64_t rows = view.blocks * view.kv_heads * 2 * view.layers * view.block_size;
  const int64_t end = rows - (2 * view.layers - 1) * view.block_size;
  for (int64_t index = 0; index < tokens.count * view.kv_heads; ++index)
    STD_TORCH_CHECK(to[index] >= 0 && to[index] < end, "kvyard: row ", to[index], " lies beyond the pool");
  for_each_row(tokens.count, tokens.width, [&](int64_t token) {
    kernels.rotate_and_store(tokens[token], table[at[token]], store, to + token * view.kv_heads, heads, view.kv_heads,
                             view.head_size);
  });
}

Tensor paged_attention(Tensor qkv, Tensor pool, Tensor block_tables, Tensor starts, Tensor contexts, int64_t layer,
                       double scale, std::optional<Tensor> scales) {
  const Kernels& kernels = kernels_for(qkv);
  const Rows tokens = rows_of(qkv, "qkv"), tables = rows_of(block_tables, "block_tables");
  const Pool view = pool_of(pool, scales, qkv, layer);
  const int64_t heads = tokens.width / view.head_size - 2 * view.kv_heads;
  STD_TORCH_CHECK(heads > 0 && tokens.width % view.head_size == 0 && heads % view.kv_heads == 0,
                  "kvyard: qkv does not fit the pool");
  using Type = torch::headeronly::ScalarType;
  STD_TORCH_CHECK(block_tables.scalar_type() == Type::Int, "kvyard: block tables must be int32");
  const auto* begin = vector_of<int32_t>(starts, tables.count + 1, Type::Int, "starts");
  const auto* before = vector_of<int32_t>(contexts, tables.count, Type::Int, "contexts");
  Tensor result = empty_like(qkv, tokens.count, heads * view.head_size);
  const Rows out = rows_of(result, "out");
  const PoolView seen{view.keys_of(layer), view.kv_heads * view.head_stride, view.head_stride, view.tile_bytes(),
                      view.row_bytes, view.block_size, view.head_size, view.scales_of(layer),
                      view.kv_heads * view.scale_head_stride, view.scale_head_stride};
  AttentionCall call(kernels, {seen, heads, heads / view.kv_heads, static_cast<float>(scale),
                               static_cast<int64_t>(qkv.element_size()), tokens.data, out.data, tokens.stride_bytes,
                               out.stride_bytes});
  for (int64_t row = 0; row < tables.count; ++row) {
    const int64_t count = begin[row + 1] - begin[row], end = before[row] + count;
    STD_TORCH_CHECK(begin[row] >= 0 && count > 0 && begin[row + 1] <= tokens.count && before[row] >= 0 &&
                        end <= tables.width * view.block_size,
                    "kvyard: row ", row, " reaches beyond its tokens or its block table");
    const auto* blocks = reinterpret_cast<const int32_t*>(tables[row]);
    for (int64_t index = 0; index * view.block_size < end; ++index)
      STD_TORCH_CHECK(blocks[index] >= 0 && blocks[index] < view.blocks, "kvyard: row ", row, " names block ",
                      blocks[index], " of a pool of ", view.blocks);
    call.add_row(blocks, begin[row], count, before[row]);
  }
  call.run();
  return result;
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

Tensor draw(Tensor logits, Tensor temperatures, Tensor top_k, Tensor top_p, Tensor keys) {
  using Type = torch::headeronly::ScalarType;
  STD_TORCH_CHECK(logits.scalar_type() == Type::Float, "kvyard: logits must be float32");
  const Kernels& kernels = kernels_for(logits);
  const Rows in = rows_of(logits, "logits");
  const auto* temperature = vector_of<float>(temperatures, in.count, Type::Float, "temperatures");
  const auto* most_likely = vector_of<int64_t>(top_k, in.count, Type::Long, "top_k");
  const auto* mass = vector_of<float>(top_p, in.count, Type::Float, "top_p");
  const auto* key = vector_of<int32_t>(keys, 2 * in.count, Type::Int, "keys");
  Tensor result = empty_vector(logits, in.count, aoti_torch_dtype_int64());
  auto* chosen = static_cast<int64_t*>(result.data_ptr());
  for_each_row(in.count, in.width, [&](int64_t row) {
    static thread_local std::vector<float> scratch;
    scratch.resize(static_cast<size_t>(2 * in.width));
    const Draw own{temperature[row], mass[row], most_likely[row], static_cast<uint32_t>(key[2 * row]),
                   static_cast<uint32_t>(key[2 * row + 1])};
    chosen[row] = kernels.draw(reinterpret_cast<const float*>(in[row]), in.width, own, scratch.data());
  });
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvyard, CPU, library) {
  library.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  library.impl("rotate_and_store", TORCH_BOX(&rotate_and_store));
  library.impl("paged_attention", TORCH_BOX(&paged_attention));
  library.impl("swiglu", TORCH_BOX(&swiglu));
  library.impl("draw", TORCH_BOX(&draw));
  library.impl("pack_weight", TORCH_BOX(&pack_weight));
  library.impl("packed_linear", TORCH_BOX(&packed_linear));
  library.impl("packed_embedding", TORCH_BOX(&packed_embedding));
  library.impl("quantized_linear", TORCH_BOX(&quantized_linear));
  library.impl("quantized_embedding", TORCH_BOX(&quantized_embedding));
}

}  // namespace kvyard
