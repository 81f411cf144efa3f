// A chunk of consecutive tokens of a context: where its keys and values lie in the pool, and how stored elements become
// the units that are multiplied, see attention.h.
//
// Stored elements are of the compute dtype, or int8 with one bfloat16 scale per token and of keys and values each. An
// int8 is exact in bfloat16, so it is multiplied as it is: scales go to the scores and to the weights, once per token.
#pragma once

#include "kernels.h"
#include "vector.h"

namespace {

using kvyard::AttentionWork;
using kvyard::kChunkTokens;
using kvyard::PoolView;

struct Chunk {
  const char* keys[kChunkTokens];  // a token's values lie value_offset behind
  int64_t tokens, value_offset, row_bytes;
  int64_t fetched, byte;

  void locate(const AttentionWork& work, int64_t begin, int64_t end) {
    const PoolView& pool = work.pool;
    tokens = end - begin < kChunkTokens ? end - begin : kChunkTokens;
    value_offset = pool.value_offset;
    row_bytes = pool.row_bytes;
    fetched = byte = 0;
    for (int64_t token = 0; token < tokens;) {
      const int64_t block = (begin + token) / pool.block_size, offset = (begin + token) % pool.block_size;
      if (pool.scales != nullptr) __builtin_prefetch(scales_of(work, block), 0, 2);
      const char* row = pool.base + work.block_table[block] * pool.block_stride + work.kv_head * pool.head_stride +
                        offset * row_bytes;
      for (int64_t left = pool.block_size - offset; left > 0 && token < tokens; --left, ++token, row += row_bytes)
        keys[token] = row;
    }
  }

  // Of the keys of a block.
  static const char* scales_of(const AttentionWork& work, int64_t block) {
    const PoolView& pool = work.pool;
    return pool.scales + work.block_table[block] * pool.scale_block_stride + work.kv_head * pool.scale_head_stride;
  }

  // One float per token; zeros behind the last, up to a whole vector. `begin` as it was located.
  void load_scales(const AttentionWork& work, int64_t begin, float* of_keys, float* of_values) const {
    const int64_t size = work.pool.block_size;
    for (int64_t token = 0; token < tokens;) {
      const int64_t block = (begin + token) / size, offset = (begin + token) % size;
      const auto* from = reinterpret_cast<const BFloat16*>(scales_of(work, block)) + offset;
      const int64_t left = size - offset < tokens - token ? size - offset : tokens - token;
      for (int64_t at = 0; at < left; at += kLanes) {
        store(of_keys + token + at, load(from + at, left - at), left - at);
        store(of_values + token + at, load(from + size + at, left - at), left - at);
      }
      token += left;
    }
    for (int64_t token = tokens; token % kLanes; ++token) of_keys[token] = of_values[token] = 0;
  }

  // So many cache lines of keys, and as many of values.
  INLINE void fetch(int64_t lines) {
    for (; lines > 0 && fetched < tokens; --lines) {
      const char* line = keys[fetched] + byte;
      __builtin_prefetch(line, 0, 2);
      __builtin_prefetch(line + value_offset, 0, 2);
      byte += 64;
      if (byte >= row_bytes) {
        byte = 0;
        ++fetched;
      }
    }
  }
};

// A vector of units from consecutive elements; fewer than asked for are followed by zeros.
template <bool kPairs, class S>
INLINE U32 load_units(const S* from, int64_t elements) {
  if constexpr (!kPairs) {
    return reinterpret_cast<U32>(load(from, elements > 0 ? elements : 0));
#if defined(__AVX512BF16__)
  } else if constexpr (sizeof(S) == 1) {
    const F32 first = load(from, elements > 0 ? elements : 0);
    const F32 second = load(from + kLanes, elements > kLanes ? elements - kLanes : 0);
    return (U32)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#endif
  } else {
    return elements >= 2 * kLanes ? load_raw<U32>(from) : load_some<U32>(from, elements > 0 ? elements : 0);
  }
}

// The bfloat16 of a stored element in the lower half of a lane.
INLINE U32 load_bfloat16(const BFloat16* from, int64_t count) {
  return zero_extend(count == kLanes ? load_raw<U16>(from) : load_some<U16>(from, count));
}

INLINE U32 load_bfloat16(const int8_t* from, int64_t count) { return reinterpret_cast<U32>(load(from, count)) >> 16; }

// Elements of two tokens; the second's are zero without `keep_second`.
template <bool kPairs, class S>
INLINE U32 value_units(const S* first, const S* second, int64_t count, uint32_t keep_second) {
  if constexpr (kPairs) {
    return load_bfloat16(first, count) | (load_bfloat16(second, count) << 16 & keep_second);
  } else {
    return reinterpret_cast<U32>(load(first, count));
  }
}

}  // namespace
