// One draw from a row of float32 logits, as runner/sampling.py defines it: greedy, or the exponential race among the tokens
// that top-k and top-p leave. Nothing is sorted: the last token that stays is found by its float's bits, eleven at a time.
#pragma once

#include "kernels.h"
#include "vector.h"

namespace {

using kvyard::Draw;

// A float's bits as an unsigned number of the same order.
INLINE U32 ordered(F32 value) {
  const I32 bits = reinterpret_cast<I32>(value);
  return reinterpret_cast<U32>(bits ^ ((bits >> 31) & 0x7FFFFFFF)) ^ 0x80000000u;
}

INLINE uint32_t ordered(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// -log E, E exponential, from a hash of the draw's keys and the token: murmur3's finaliser, the second key in the middle.
INLINE F32 gumbel(U32 tokens, const Draw& draw) {
  U32 x = tokens ^ draw.first_key;
  x ^= x >> 16;
  x *= 0x85EBCA6Bu;
  x += draw.second_key;
  x ^= x >> 13;
  x *= 0xC2B2AE35u;
  x ^= x >> 16;
  const F32 uniform = (__builtin_convertvector(reinterpret_cast<I32>(x & 0x7FFFFFFFu), F32) + 0.5f) * 0x1p-31f;
  // log(1 - u) without losing the small u, where the winners are.
  const F32 rest = 1.0f - uniform, lost = rest - 1.0f;
  const F32 exponential_variate = rest == 1.0f ? uniform : logarithm(rest) * (uniform / lost);
  return -logarithm(exponential_variate);
}

// Tokens in the order of falling logits, equals by rising id: the last one that stays.
struct Last {
  uint32_t key = 0;
  int64_t token = INT64_MAX;

  INLINE bool keeps(uint32_t other, int64_t id) const { return other > key || (other == key && id <= token); }
};

constexpr int kBuckets = 1 << 11;

// The last token of the order before which the weights, weight(token) >= 0, sum up to less than `target`. Only tokens
// that `within` keeps count.
template <class Weight>
Last select(const float* scaled, int64_t size, Last within, double target, const Weight& weight) {
  static thread_local double buckets[kBuckets];
  double before = 0;
  uint32_t prefix = 0;
  for (int shift = 21;; shift = shift == 21 ? 10 : 0) {
    const int above = shift == 21 ? 32 : shift == 10 ? 21 : 10;
    const uint32_t mask = shift == 0 ? 1023 : kBuckets - 1;
    for (double& bucket : buckets) bucket = 0;
    for (int64_t token = 0; token < size; ++token) {
      const uint32_t key = ordered(scaled[token]);
      if (above < 32 && (key >> above) != prefix) continue;
      if (!within.keeps(key, token)) continue;
      buckets[key >> shift & mask] += weight(token);
    }
    // The lowest bucket that something with weight in front of the target lies in.
    int64_t found = -1;
    double in_front = before;
    for (int64_t bucket = mask; bucket >= 0 && in_front < target; --bucket) {
      if (buckets[bucket] <= 0) continue;
      found = bucket;
      before = in_front;
      in_front += buckets[bucket];
    }
    if (found < 0) return within;  // weights too small to count: everything stays
    prefix = (above < 32 ? prefix << (above - shift) : 0) | static_cast<uint32_t>(found);
    if (shift == 0) break;
  }
  Last last{prefix, -1};
  for (int64_t token = 0; token < size && before < target; ++token) {
    if (ordered(scaled[token]) != prefix || !within.keeps(prefix, token)) continue;
    last.token = token;
    before += weight(token);
  }
  return last;
}

// The token with the largest of score(values, first token), the lowest id among equals.
template <class Score>
INLINE int64_t first_largest(const float* values, int64_t size, const Score& score) {
  F32 best = splat(-kInfinity);
  I32 where = I32{} - 1;
  for (int64_t token = 0; token < size; token += kLanes) {
    const int32_t left = static_cast<int32_t>(size - token < kLanes ? size - token : kLanes);
    F32 scores = score(load(values + token, left), static_cast<int32_t>(token));
    if (left < kLanes) scores = lane_numbers() < left ? scores : splat(-kInfinity);
    const I32 better = scores > best;
    best = better ? scores : best;
    where = better ? I32{} + static_cast<int32_t>(token / kLanes) : where;
  }
  int64_t winner = -1;
  float largest = -kInfinity;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (where[lane] < 0) continue;
    const int64_t token = int64_t{where[lane]} * kLanes + lane;
    if (winner < 0 || best[lane] > largest || (best[lane] == largest && token < winner)) {
      winner = token;
      largest = best[lane];
    }
  }
  return winner < 0 ? 0 : winner;
}

// `scratch`: twice as many floats as there are tokens.
int64_t draw_token(const float* logits, int64_t size, const Draw& draw, float* scratch) {
  if (draw.temperature <= 0) return first_largest(logits, size, [](F32 values, int32_t) { return values; });
  const auto race = [&](F32 scaled, int32_t token) {
    return scaled + gumbel(reinterpret_cast<U32>(lane_numbers() + token), draw);
  };
  if (draw.top_k >= size && draw.top_p >= 1) {
    return first_largest(logits, size, [&](F32 values, int32_t token) { return race(values / draw.temperature, token); });
  }
  F32 largest = splat(-kInfinity);
  for (int64_t token = 0; token < size; token += kLanes) {
    const F32 scaled = load(logits + token, size - token) / draw.temperature;
    store(scratch + token, scaled, size - token);
    if (size - token >= kLanes) largest = larger(largest, scaled);
  }
  float most = maximum(largest);
  for (int64_t token = size / kLanes * kLanes; token < size; ++token) most = scratch[token] > most ? scratch[token] : most;
  Last last;
  if (draw.top_k < size)
    last = select(scratch, size, last, static_cast<double>(draw.top_k), [](int64_t) { return 1.0; });
  if (draw.top_p < 1) {
    // Unnormalised probabilities, of what top-k has left.
    double total = 0;
    float* weights = scratch + size;
    for (int64_t token = 0; token < size; token += kLanes)
      store(weights + token, exponential(load(scratch + token, size - token) - most), size - token);
    for (int64_t token = 0; token < size; ++token)
      if (last.keeps(ordered(scratch[token]), token)) total += weights[token];
    // A target of nothing would drop the likeliest, which always stays.
    const double target = draw.top_p * total > 0 ? draw.top_p * total : 1e-30;
    last = select(scratch, size, last, target, [&](int64_t token) { return static_cast<double>(weights[token]); });
  }
  return first_largest(scratch, size, [&](F32 scaled, int32_t token) {
    const U32 keys = ordered(scaled);
    const I32 equal = keys == last.key;
    const int32_t until = last.token > INT32_MAX ? INT32_MAX : static_cast<int32_t>(last.token);
    const I32 stays = (keys > last.key) | (equal & (lane_numbers() + token <= until));
    return stays ? race(scaled, token) : splat(-kInfinity);
  });
}

}  // namespace
