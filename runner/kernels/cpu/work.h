// One call of paged attention cut into pieces that threads take one after the other.
//
// A row of several tokens (prefill) is cut into blocks of queries, each over all of its context; a row of one token
// (decode) into the parts of its context, which the thread that finishes the last of them joins in their order. So the
// arithmetic of a row is the same whatever the number of threads and whoever else is in the call.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <vector>

#include "kernels.h"

namespace kvyard {

// What all rows of the call share.
struct AttentionBatch {
  PoolView pool;
  int64_t heads, group_size;
  float scale;
  int64_t element_size;
  char *qkv, *out;
  int64_t qkv_stride_bytes, out_stride_bytes;
};

class AttentionCall {
 public:
  AttentionCall(const Kernels& kernels, const AttentionBatch& batch) : kernels(kernels), batch(batch) {}

  // Tokens [start, start + count) of the packed batch, the first at `context`.
  void add_row(const int32_t* block_table, int64_t start, int64_t count, int64_t context);
  void run();

 private:
  // A decode whose parts are on their way.
  struct Joined {
    std::atomic<int64_t> left;
    std::vector<float> memory;
  };
  struct Piece {
    AttentionWork work;
    int64_t part;  // -1: all of them
    Joined* joined;
  };

  void run_piece(const Piece& piece, const Piece& next) const;
  Partial part_of(Joined& joined, const AttentionWork& work, int64_t part) const;

  const Kernels& kernels;
  const AttentionBatch batch;
  std::vector<Piece> pieces;
  std::deque<Joined> joins;
  int64_t read_keys = 0;
};

}  // namespace kvyard
