#include "work.h"

#include <algorithm>
#include <new>

#include "threads.h"

namespace kvyard {
namespace {

// Packing, scoring and weighting so many keys takes about as long as waking a thread up.
constexpr int64_t kKeysPerThread = 256;

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

void AttentionCall::run_piece(const Piece& piece, const Piece& following) const {
  const AttentionWork& work = piece.work;
  const int64_t keys = work.first_position + work.num_tokens, queries = int64_t{work.num_tokens} * work.num_heads;
  const auto part_at = [](const Piece& of, int64_t part) {
    const int64_t all = of.work.first_position + of.work.num_tokens, begin = part * kPartTokens;
    return Part{&of.work, begin, std::min(all, begin + kPartTokens)};
  };
  const Part afterwards = part_at(following, std::max<int64_t>(0, following.part));
  if (piece.part >= 0) {
    kernels.attend_part(part_at(piece, piece.part), afterwards, part_of(*piece.joined, work, piece.part), memory.scratch);
    if (piece.joined->left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    const Partial total = part_of(*piece.joined, work, 0);
    for (int64_t part = 1; part * kPartTokens < keys; ++part)
      kernels.merge(total, part_of(*piece.joined, work, part), queries, batch.pool.head_size);
    kernels.finish(work, total);
    return;
  }
  const Partial total = memory.partial(0), next = memory.partial(1);
  for (int64_t part = 0; part * kPartTokens < keys; ++part) {
    const bool last = (part + 1) * kPartTokens >= keys;
    kernels.attend_part(part_at(piece, part), last ? afterwards : part_at(piece, part + 1), part ? next : total,
                        memory.scratch);
    if (part) kernels.merge(total, next, queries, batch.pool.head_size);
  }
  kernels.finish(work, total);
}

void AttentionCall::run() {
  const int64_t threads =
      std::min({num_threads(), static_cast<int64_t>(pieces.size()), 1 + read_keys / kKeysPerThread});
  std::atomic<size_t> next{0};
  run_chunks(threads, [&](int64_t) {
    const auto take = [&] { return next.fetch_add(1, std::memory_order_relaxed); };
    for (size_t index = take(), following; index < pieces.size(); index = following) {
      following = take();
      run_piece(pieces[index], pieces[following < pieces.size() ? following : index]);
    }
  });
}

}  // namespace kvyard
