#include "work.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <new>

namespace kvyard {
namespace {

// Packing, scoring and weighting so many keys takes about as long as waking a thread up.
constexpr int64_t kKeysPerThread = 1024;

// A thread's own memory, kept between calls: the packed keys and values, and two partial sums.
struct ThreadMemory {
  static constexpr int64_t kValues = int64_t{kMaxQueries} * kMaxHeadSize;
  void* scratch = ::operator new(static_cast<size_t>(scratch_bytes()), std::align_val_t{64});
  std::vector<float> partials = std::vector<float>(2 * (kValues + 2 * kMaxQueries));
  ~ThreadMemory() { ::operator delete(scratch, std::align_val_t{64}); }

  Partial partial(int index) {
    float* from = partials.data() + index * (kValues + 2 * kMaxQueries);
    return {from, from + kValues, from + kValues + kMaxQueries};
  }
};

thread_local ThreadMemory memory;

}  // namespace

void AttentionCall::add_row(const int32_t* block_table, int64_t start, int64_t count, int64_t context) {
  const int64_t head_size = batch.pool.head_size;
  for (int64_t head = 0; head < batch.heads; head += batch.group_size) {
    for (int64_t first = 0; first < batch.group_size; first += kMaxQueries) {
      const int64_t num_heads = std::min<int64_t>(kMaxQueries, batch.group_size - first);
      const int64_t most_tokens = std::max<int64_t>(1, kMaxQueries / num_heads);
      const int64_t head_bytes = (head + first) * head_size * batch.element_size;
      // The longest first, so that no thread begins one when the others are done.
      for (int64_t end = count; end > 0; end -= most_tokens) {
        const int64_t begin = std::max<int64_t>(0, end - most_tokens);
        AttentionWork work{};
        work.pool = batch.pool;
        work.block_table = block_table;
        work.kv_head = head / batch.group_size;
        work.query = batch.qkv + (start + begin) * batch.qkv_stride_bytes + head_bytes;
        work.out = batch.out + (start + begin) * batch.out_stride_bytes + head_bytes;
        work.query_stride = batch.qkv_stride_bytes / batch.element_size;
        work.out_stride = batch.out_stride_bytes / batch.element_size;
        work.num_tokens = static_cast<int32_t>(end - begin);
        work.num_heads = static_cast<int32_t>(num_heads);
        work.first_position = context + begin;
        work.scale = batch.scale;
        const int64_t keys = context + end, parts = (keys + kPartTokens - 1) / kPartTokens;
        read_keys += keys * work.num_tokens;
        if (count > 1 || parts == 1) {
          pieces.push_back({work, -1, nullptr});
          continue;
        }
        Joined& joined = joins.emplace_back();
        joined.left = parts;
        joined.memory.resize(static_cast<size_t>(parts * num_heads * (kMaxHeadSize + 2)));
        for (int64_t part = 0; part < parts; ++part) pieces.push_back({work, part, &joined});
      }
    }
  }
}

Partial AttentionCall::part_of(Joined& joined, const AttentionWork& work, int64_t part) const {
  float* from = joined.memory.data() + part * work.num_heads * (kMaxHeadSize + 2);
  float* maxima = from + work.num_heads * kMaxHeadSize;
  return {from, maxima, maxima + work.num_heads};
}

void AttentionCall::run_piece(const Piece& piece) const {
  const AttentionWork& work = piece.work;
  const int64_t keys = work.first_position + work.num_tokens, queries = int64_t{work.num_tokens} * work.num_heads;
  if (piece.part >= 0) {
    const int64_t begin = piece.part * kPartTokens;
    const Partial own = part_of(*piece.joined, work, piece.part);
    kernels.attend_part(work, begin, std::min(keys, begin + kPartTokens), own, memory.scratch);
    if (piece.joined->left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    const Partial total = part_of(*piece.joined, work, 0);
    for (int64_t part = 1; part * kPartTokens < keys; ++part)
      kernels.merge(total, part_of(*piece.joined, work, part), queries, batch.pool.head_size);
    kernels.finish(work, total);
    return;
  }
  const Partial total = memory.partial(0), next = memory.partial(1);
  kernels.attend_part(work, 0, std::min<int64_t>(keys, kPartTokens), total, memory.scratch);
  for (int64_t begin = kPartTokens; begin < keys; begin += kPartTokens) {
    kernels.attend_part(work, begin, std::min(keys, begin + kPartTokens), next, memory.scratch);
    kernels.merge(total, next, queries, batch.pool.head_size);
  }
  kernels.finish(work, total);
}

void AttentionCall::run() {
  const int64_t threads = std::min<int64_t>({torch::stable::get_num_threads(), static_cast<int64_t>(pieces.size()),
                                             1 + read_keys / kKeysPerThread});
  std::atomic<size_t> next{0};
  const auto work = [&](int64_t, int64_t) {
    for (size_t index; (index = next.fetch_add(1, std::memory_order_relaxed)) < pieces.size();)
      run_piece(pieces[index]);
  };
  if (threads < 2) {
    work(0, 1);
  } else {
    torch::stable::parallel_for(0, threads, 1, work);
  }
}

}  // namespace kvyard
