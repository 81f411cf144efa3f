// Attention of a few query vectors over one part of a paged context, for one dtype, written with vector.h.
//
// Keys are taken in chunks. A chunk is packed once for all query vectors: keys so that tokens are the lanes of a
// vector (no sums across lanes), values so that the lanes are dimensions. Where the tier multiplies pairs of bfloat16,
// a unit of 32 bits is such a pair: two dimensions of a key, two tokens of a value. Elsewhere it is one float32.
//
//      scores [queries, tokens]  = query units  x  packed keys    (6 queries x 4 vectors, or so, in registers)
//      weights                   = exp(scores - running maximum)
//      values [queries, head]   += weights      x  packed values  (likewise)
//
// Of an int8 pool the scores are multiplied by the scales of keys and the weights by those of values, see chunk.h.
//
// What lies behind the end of the context is never multiplied by and may be anything. A token that only a later query
// sees has the weight zero for an earlier one: it must be finite.
#pragma once

#include "chunk.h"
#include "kernels.h"
#include "vector.h"

namespace {

using kvyard::kMaxHeadSize;
using kvyard::kMaxQueries;
using kvyard::Part;
using kvyard::Partial;

constexpr int kChunkTiles = kChunkTokens / kLanes;
// Sums that the registers hold: for so many queries, so many vectors side by side; for a few queries more vectors.
constexpr int kTileQueries = kLanes == 16 ? 6 : 4, kColumns = kLanes == 16 ? 4 : 2;
constexpr int columns_for(int queries) { return queries <= kTileQueries / 2 ? 2 * kColumns : kColumns; }

// A unit as it is multiplied.
template <bool kPairs>
struct Unit;

template <>
struct Unit<false> {
  static constexpr int kWidth = 1;
  static INLINE F32 multiply_add(F32 sum, U32 units, U32 other) {
    return reinterpret_cast<F32>(units) * reinterpret_cast<F32>(other) + sum;
  }
};

#if defined(__AVX512BF16__)
template <>
struct Unit<true> {
  static constexpr int kWidth = 2;
  static INLINE F32 multiply_add(F32 sum, U32 units, U32 other) {
    return (F32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)other, (__m512bh)units);
  }
};
#endif

// Rows lie close together, as long as this head size needs them: power-of-two gaps would share few cache lines.
struct Scratch {
  alignas(64) uint32_t query_units[kMaxQueries * kMaxHeadSize];
  U32 key_units[kChunkTiles * kMaxHeadSize];
  U32 value_units[kChunkTokens * kMaxHeadSize / kLanes];
  alignas(64) float score_rows[kMaxQueries * kChunkTokens];
  alignas(64) float key_scales[kChunkTokens];
  alignas(64) float value_scales[kChunkTokens];
};

// kHeadSize 0: any, known at run time only.
template <class T, bool kPairs, int kHeadSize>
struct Attention {
  using unit = Unit<kPairs>;
  static constexpr int kWidth = unit::kWidth;

  const AttentionWork& work;
  Scratch& scratch;

  Attention(const AttentionWork& work, void* memory) : work(work), scratch(*static_cast<Scratch*>(memory)) {}

  INLINE int64_t size() const { return kHeadSize ? kHeadSize : work.pool.head_size; }
  // Of a query or key, rounded up to whole vectors.
  INLINE int64_t units() const { return (size() + kWidth * kLanes - 1) / (kWidth * kLanes) * kLanes; }
  // Vectors of a value.
  INLINE int64_t columns() const { return (size() + kLanes - 1) / kLanes; }

  INLINE uint32_t* query_row(int64_t query) const { return scratch.query_units + query * units(); }
  INLINE U32* key_tile(int64_t tile) const { return scratch.key_units + tile * units(); }
  INLINE U32* value_row(int64_t row) const { return scratch.value_units + row * columns(); }
  INLINE float* score_row(int64_t query) const { return scratch.score_rows + query * kChunkTokens; }

  void pack_queries() const {
    for (int64_t token = 0, query = 0; token < work.num_tokens; ++token) {
      for (int64_t head = 0; head < work.num_heads; ++head, ++query) {
        const T* from = static_cast<const T*>(work.query) + token * work.query_stride + head * size();
        for (int64_t element = 0; element < size(); element += kWidth * kLanes)
          store_raw(query_row(query) + element / kWidth, load_units<kPairs>(from + element, size() - element));
      }
    }
  }

  // S: as stored.
  template <class S>
  void pack_chunk(const Chunk& chunk, Chunk& next) const {
    const int64_t tokens = chunk.tokens;
    const auto key = [&](int64_t token) { return reinterpret_cast<const S*>(chunk.keys[token]); };
    const auto value = [&](int64_t token) { return reinterpret_cast<const S*>(chunk.keys[token] + chunk.value_offset); };
    for (int64_t first = 0; first < tokens; first += kLanes) {
      next.fetch(kLanes / 2);
      for (int64_t element = 0; element < size(); element += kWidth * kLanes) {
        U32 rows[kLanes];
        for (int lane = 0; lane < kLanes; ++lane)
          rows[lane] = first + lane < tokens ? load_units<kPairs>(key(first + lane) + element, size() - element) : U32{};
        transpose(rows);
        U32* to = key_tile(first / kLanes) + element / kWidth;
        for (int lane = 0; lane < kLanes; ++lane) to[lane] = rows[lane];
      }
    }
    for (int64_t token = 0; token < tokens; token += kWidth) {
      next.fetch(1);
      const bool alone = token + 1 == tokens;  // without a second token for its pairs
      pack_values(value(token), value(token + (alone ? 0 : kWidth - 1)), alone ? 0 : ~uint32_t{0},
                  value_row(token / kWidth));
    }
  }

  template <class S>
  INLINE void pack_values(const S* first, const S* second, uint32_t keep_second, U32* to) const {
    int64_t element = 0;
    for (; element + kLanes <= size(); element += kLanes)
      *to++ = value_units<kPairs>(first + element, second + element, kLanes, keep_second);
    if (element < size()) *to = value_units<kPairs>(first + element, second + element, size() - element, keep_second);
  }

  // scores of kQueries queries from `query` on and kTiles vectors of tokens from tile `tile` on.
  template <int kQueries, int kTiles>
  INLINE void score(int64_t query, int64_t tile, Chunk& next) const {
    const uint32_t* queries = query_row(query);
    const U32* keys = key_tile(tile);
    const int64_t stride = units(), used = (size() + kWidth - 1) / kWidth;
    F32 sums[kQueries][kTiles] = {};
    for (int64_t index = 0; index < used; ++index) {
      if (index % 2) next.fetch(1);
      U32 own[kQueries];
#pragma GCC unroll 6
      for (int row = 0; row < kQueries; ++row) own[row] = U32{} + queries[row * stride + index];
#pragma GCC unroll 8
      for (int column = 0; column < kTiles; ++column) {
        const U32 key = keys[column * stride + index];
#pragma GCC unroll 6
        for (int row = 0; row < kQueries; ++row) sums[row][column] = unit::multiply_add(sums[row][column], key, own[row]);
      }
    }
    for (int row = 0; row < kQueries; ++row)
      for (int column = 0; column < kTiles; ++column)
        store_raw(score_row(query + row) + (tile + column) * kLanes, sums[row][column]);
  }

  template <int kQueries>
  void score_tiles(int64_t query, int64_t tiles, Chunk& next) const {
    int64_t tile = 0;
    constexpr int kMost = columns_for(kQueries);
    for (; tile + kMost <= tiles; tile += kMost) score<kQueries, kMost>(query, tile, next);
    if (kMost > kColumns && tile + kColumns <= tiles) {
      score<kQueries, kColumns>(query, tile, next);
      tile += kColumns;
    }
    for (; tile < tiles; ++tile) score<kQueries, 1>(query, tile, next);
  }

  // The query's scores become weights, zero where it does not see; the sums so far are made relative to the new maximum.
  void weigh(int64_t query, int64_t visible, int64_t tiles, Partial partial) const {
    float* row = score_row(query);
    F32 scores[kChunkTiles], largest = splat(-kInfinity);
    const int64_t seen_tiles = (visible + kLanes - 1) / kLanes;
    const bool quantised = work.pool.scales != nullptr;
    for (int64_t tile = 0; tile < seen_tiles; ++tile) {
      F32 scaled = load_raw<F32>(row + tile * kLanes) * work.scale;
      if (quantised) scaled *= load_raw<F32>(scratch.key_scales + tile * kLanes);
      const int32_t left = static_cast<int32_t>(visible - tile * kLanes);
      scores[tile] = lane_numbers() < left ? scaled : splat(-kInfinity);
      largest = larger(largest, scores[tile]);
    }
    const float before = partial.maximum[query], now = __builtin_fmaxf(before, maximum(largest));
    F32 total{};
    for (int64_t tile = 0; tile < tiles; ++tile) {
      F32 weights = tile < seen_tiles ? exponential(scores[tile] - now) : F32{};
      total += weights;
      if (quantised) weights *= load_raw<F32>(scratch.value_scales + tile * kLanes);
      if constexpr (kPairs) {
        store_raw(reinterpret_cast<uint16_t*>(row) + tile * kLanes, narrow(weights));
      } else {
        store_raw(row + tile * kLanes, weights);
      }
    }
    partial.maximum[query] = now;
    if (now == before) {
      partial.total[query] += sum(total);
      return;
    }
    const float shrunk = exponential(splat(before - now))[0];
    partial.total[query] = partial.total[query] * shrunk + sum(total);
    float* values = partial.values + query * columns() * kLanes;
    for (int64_t column = 0; column < columns(); ++column)
      store_raw(values + column * kLanes, load_raw<F32>(values + column * kLanes) * shrunk);
  }

  template <int kQueries, int kVectors>
  INLINE void add_values(int64_t query, int64_t column, int64_t rows, Partial partial, Chunk& next) const {
    const float* weights = score_row(query);
    const U32* packed = value_row(0) + column;
    const int64_t stride = columns();
    F32 sums[kQueries][kVectors];
    float* values = partial.values + (query * columns() + column) * kLanes;
    for (int row = 0; row < kQueries; ++row)
      for (int index = 0; index < kVectors; ++index)
        sums[row][index] = load_raw<F32>(values + (row * stride + index) * kLanes);
    for (int64_t token = 0; token < rows; ++token) {
      if (token % 2) next.fetch(1);
      U32 own[kQueries];
#pragma GCC unroll 6
      for (int row = 0; row < kQueries; ++row) {
        uint32_t weight;
        std::memcpy(&weight, weights + row * kChunkTokens + token, sizeof weight);
        own[row] = U32{} + weight;
      }
#pragma GCC unroll 8
      for (int index = 0; index < kVectors; ++index) {
        const U32 value = packed[token * stride + index];
#pragma GCC unroll 6
        for (int row = 0; row < kQueries; ++row) sums[row][index] = unit::multiply_add(sums[row][index], value, own[row]);
      }
    }
    for (int row = 0; row < kQueries; ++row)
      for (int index = 0; index < kVectors; ++index)
        store_raw(values + (row * stride + index) * kLanes, sums[row][index]);
  }

  template <int kQueries>
  void add_all_values(int64_t query, int64_t rows, Partial partial, Chunk& next) const {
    int64_t column = 0;
    for (; column + kColumns <= columns(); column += kColumns)
      add_values<kQueries, kColumns>(query, column, rows, partial, next);
    if (columns() % kColumns)
      for (; column < columns(); ++column) add_values<kQueries, 1>(query, column, rows, partial, next);
  }

  // Queries [query, query + kQueries) over a packed chunk that begins at `begin`.
  template <int kQueries>
  void attend_queries(int64_t query, int64_t begin, int64_t tokens, Partial partial, Chunk& next) const {
    const int64_t last_token = (query + kQueries - 1) / work.num_heads;
    int64_t most = work.first_position + last_token + 1 - begin;
    most = most < tokens ? most : tokens;
    const int64_t tiles = (most + kLanes - 1) / kLanes;
    score_tiles<kQueries>(query, tiles, next);
    for (int64_t row = query; row < query + kQueries; ++row) {
      const int64_t visible = work.first_position + row / work.num_heads + 1 - begin;
      weigh(row, visible < tokens ? visible : tokens, tiles, partial);
    }
    add_all_values<kQueries>(query, (most + kWidth - 1) / kWidth, partial, next);
  }

  template <int kQueries>
  INLINE void attend_rest(int64_t queries, int64_t query, int64_t begin, int64_t tokens, Partial partial,
                          Chunk& next) const {
    if constexpr (kQueries > 0) {
      if (queries == kQueries) return attend_queries<kQueries>(query, begin, tokens, partial, next);
      attend_rest<kQueries - 1>(queries, query, begin, tokens, partial, next);
    }
  }

  void attend(int64_t begin, int64_t end, Part following, Partial partial) const {
    const int64_t queries = int64_t{work.num_tokens} * work.num_heads;
    std::memset(partial.values, 0, static_cast<size_t>(queries * columns() * kLanes) * sizeof(float));
    for (int64_t query = 0; query < queries; ++query) {
      partial.maximum[query] = -kInfinity;
      partial.total[query] = 0;
    }
    pack_queries();
    Chunk chunks[2];
    Chunk *current = &chunks[0], *next = &chunks[1];
    current->locate(work, begin, end);
    for (int64_t chunk = begin; chunk < end; chunk += kChunkTokens) {
      const int64_t tokens = current->tokens;
      if (chunk + tokens < end) {
        next->locate(work, chunk + tokens, end);
      } else {
        next->locate(*following.work, following.begin, following.end);
      }
      if (work.pool.scales != nullptr) {
        pack_chunk<int8_t>(*current, *next);
        current->load_scales(work, chunk, scratch.key_scales, scratch.value_scales);
      } else {
        pack_chunk<T>(*current, *next);
      }
      // Tokens in front of the chunk see nothing of it.
      int64_t query = chunk > work.first_position ? (chunk - work.first_position) * work.num_heads : 0;
      for (; query + kTileQueries <= queries; query += kTileQueries)
        attend_queries<kTileQueries>(query, chunk, tokens, partial, *next);
      attend_rest<kTileQueries - 1>(queries - query, query, chunk, tokens, partial, *next);
      next->fetch(kChunkTokens * kMaxHeadSize);  // what is left
      Chunk* done = current;
      current = next;
      next = done;
    }
  }
};

// The usual head sizes have loops of their own.
template <class T, bool kPairs>
void attend_part(Part part, Part next, Partial partial, void* memory) {
  switch (part.work->pool.head_size) {
    case 64: return Attention<T, kPairs, 64>(*part.work, memory).attend(part.begin, part.end, next, partial);
    case 128: return Attention<T, kPairs, 128>(*part.work, memory).attend(part.begin, part.end, next, partial);
    default: return Attention<T, kPairs, 0>(*part.work, memory).attend(part.begin, part.end, next, partial);
  }
}

template <class T>
void finish(const AttentionWork& work, Partial total) {
  const int64_t size = work.pool.head_size, width = (size + kLanes - 1) / kLanes * kLanes;
  for (int64_t token = 0, query = 0; token < work.num_tokens; ++token) {
    for (int64_t head = 0; head < work.num_heads; ++head, ++query) {
      T* to = static_cast<T*>(work.out) + token * work.out_stride + head * size;
      for (int64_t element = 0; element < size; element += kLanes)
        store(to + element, load_raw<F32>(total.values + query * width + element) / total.total[query], size - element);
    }
  }
}

void merge(Partial total, Partial part, int64_t queries, int64_t head_size) {
  const int64_t width = (head_size + kLanes - 1) / kLanes * kLanes;
  for (int64_t query = 0; query < queries; ++query) {
    if (part.total[query] == 0) continue;  // it sees nothing of the part
    const float now = __builtin_fmaxf(total.maximum[query], part.maximum[query]);
    const float old_share = exponential(splat(total.maximum[query] - now))[0];
    const float new_share = exponential(splat(part.maximum[query] - now))[0];
    total.maximum[query] = now;
    total.total[query] = total.total[query] * old_share + part.total[query] * new_share;
    for (int64_t element = query * width; element < (query + 1) * width; element += kLanes)
      store_raw(total.values + element, load_raw<F32>(total.values + element) * old_share +
                                            load_raw<F32>(part.values + element) * new_share);
  }
}

}  // namespace
