// The CPU kernels as torch operators: checks what the caller hands over, cuts the work into pieces and gives them to
// the threads of threads.h. Written against torch's stable ABI, whose headers compile in seconds and which outlives torch versions.
//
// Schemas, fake implementations and the reference in plain torch are in operators.py; this file and product_operators.cpp add the CPU key.
#include <optional>
#include <vector>

#include "torch_tensors.h"
#include "work.h"

namespace kvyard {
namespace {

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
}

}  // namespace kvyard
