// What one machine tier offers: plain functions over raw pointers, one row or one piece of work each. No torch here.
//
// tier.cpp makes a `Kernels` of every dtype and is compiled once per tier with that tier's instruction set; operators.cpp
// chooses the tier when it is loaded and hands the work out to threads. Invariant: what a function computes for a row
// depends on that row alone, in an order that is fixed by absolute positions, whatever else is in the batch.
#pragma once

#include <cstdint>

#include "packed_weight.h"

namespace kvyard {

constexpr int kMaxQueries = 64;      // query vectors (token x head) of one piece of attention work
constexpr int kChunkTokens = 128;    // keys that are packed, scored and weighted at a time
constexpr int kPartTokens = 512;     // context is summed up part by part, so that parts can be had by different threads
constexpr int kMaxHeadSize = 256;

// The KV pool as [blocks, kv_heads, layers, 2, block_size, head_size], seen from one layer. Strides in bytes.
struct PoolView {
  const char* base;  // block 0, head 0, this layer, keys
  int64_t block_stride, head_stride, value_offset, row_bytes;
  int64_t block_size, head_size;
  // Of int8: bfloat16 [blocks, kv_heads, layers, 2, block_size], likewise. Null: stored as computed with.
  const char* scales;
  int64_t scale_block_stride, scale_head_stride;
};

// The same to write to. A row of `stored` counts blocks x heads of `span_rows` rows each.
struct StoreView {
  char* base;
  int64_t span_rows, span_bytes, value_offset, row_bytes;
  char* scales;  // null: stored as computed with
  int64_t scale_span_bytes, value_scales;
};

// Query vectors of `num_tokens` consecutive tokens and `num_heads` consecutive heads that share one KV head.
struct AttentionWork {
  PoolView pool;
  const int32_t* block_table;
  int64_t kv_head;
  const void* query;  // of the first token and head; heads lie head_size apart
  void* out;          // likewise
  int64_t query_stride, out_stride;  // from token to token, in elements
  int32_t num_tokens, num_heads;
  int64_t first_position;  // of the first token; the token at position p sees keys 0..p
  float scale;
};

// A running softmax over the keys seen so far: sums of weights and of weighted values, relative to the maximum.
struct Partial {
  float* values;   // [queries, head_size rounded up to whole vectors]
  float* maximum;  // [queries]
  float* total;    // [queries]
};

// Keys [begin, end) of a work's context, both of one part.
struct Part {
  const AttentionWork* work;
  int64_t begin, end;
};

// out [rows, outputs] = in [rows, 2 * pairs] x a packed weight matrix, see packed_weight.h. bfloat16.
constexpr int64_t kMostExpanded = 4;  // panels

struct ProductWork {
  const void* in;
  const void* panels;
  const uint16_t* exponents;
  const int32_t* first_outliers;
  const Outlier* outliers;
  void* out;
  int64_t rows, pairs, outputs, in_stride_bytes, out_stride_bytes;
  bool to_float32;  // else bfloat16
};

// How one row is drawn: temperature 0 takes the largest logit; top_k and top_p that leave everything are >= the number
// of tokens and >= 1.
struct Draw {
  float temperature, top_p;
  int64_t top_k;
  uint32_t first_key, second_key;
};

struct Kernels {
  // A part into `partial`. What the same thread will probably do next is fetched into the cache meanwhile: blocks lie far
  // apart, so the processor does not guess it. `scratch`: scratch_bytes(), 64-aligned.
  void (*attend_part)(Part part, Part next, Partial partial, void* scratch);
  // Joins the next part to those before it.
  void (*merge)(Partial total, Partial part, int64_t queries, int64_t head_size);
  // Divides by the sum of weights and writes the work's outputs.
  void (*finish)(const AttentionWork&, Partial total);
  // residual += delta (may be null) in place; out = residual / rms(residual) * weight.
  void (*add_rms_norm)(void* residual, const void* delta, const void* weight, void* out, int64_t width, float epsilon);
  // One token: its queries and keys are turned in place, keys and values also stored. `angles`: cosines, then sines.
  // `stored`: the row of each KV head, of layer 0.
  void (*rotate_and_store)(void* qkv, const void* angles, const StoreView& store, const int64_t* stored, int64_t heads,
                           int64_t kv_heads, int64_t head_size);
  // gate and up lie one after the other; out = silu(gate) * up.
  void (*swiglu)(const void* gate_up, void* out, int64_t width);
  // `scratch`: 2 * size floats.
  int64_t (*draw)(const float* logits, int64_t size, const Draw&, float* scratch);
  // Panels [first, last). Null where the tier does not multiply pairs of bfloat16, and for float32. `scratch`: 64 bytes
  // for each of kMostExpanded * pairs, 64-aligned.
  void (*multiply)(const ProductWork&, int64_t first, int64_t last, void* scratch);
};

int64_t scratch_bytes();

// [0] float32, [1] bfloat16.
extern const Kernels kPortable[2];
#ifdef __x86_64__
extern const Kernels kAvx2[2];
extern const Kernels kAvx512[2];
extern const Kernels kAvx512Bf16[2];
#endif

}  // namespace kvyard
