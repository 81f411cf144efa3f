// The operators between the weight products, for one row or token each: norm, rotation with the write of keys and values,
// gated activation. Intermediate values are rounded to the dtype where transformers' modeling_llama rounds them.
#pragma once

#include "kernels.h"
#include "vector.h"

namespace {

using kvyard::StoreView;

template <class T>
void add_rms_norm(void* residual_row, const void* delta_row, const void* weight_row, void* out_row, int64_t width,
                  float epsilon) {
  T *residual = static_cast<T*>(residual_row), *out = static_cast<T*>(out_row);
  const T *delta = static_cast<const T*>(delta_row), *weight = static_cast<const T*>(weight_row);
  F32 squares{};
  for (int64_t at = 0; at < width; at += kLanes) {
    F32 value = load(residual + at, width - at);
    if (delta != nullptr) {
      value = rounded_to(residual, value + load(delta + at, width - at));
      store(residual + at, value, width - at);
    }
    squares += value * value;
  }
  const float scale = 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(width) + epsilon);
  for (int64_t at = 0; at < width; at += kLanes) {
    const F32 normed = rounded_to(residual, load(residual + at, width - at) * scale);
    store(out + at, normed * load(weight + at, width - at), width - at);
  }
}

// Dimension i turns with dimension i + head_size / 2. `angles`: head_size / 2 cosines, then as many sines.
template <class T>
INLINE void rotate(T* head, const T* angles, int64_t half) {
  for (int64_t at = 0; at < half; at += kLanes) {
    const int64_t count = half - at;
    const F32 cosine = load(angles + at, count), sine = load(angles + half + at, count);
    const F32 first = load(head + at, count), second = load(head + half + at, count);
    store(head + at, first * cosine - second * sine, count);
    store(head + half + at, second * cosine + first * sine, count);
  }
}

// x = scale * q, q integers in [-127, 127] to nearest, ties to even. Zeros, and what is too small to be told from them,
// have scale 0; a vector with an infinity or a NaN has the scale NaN, so that it stays visible.
template <class T>
INLINE void quantise(const T* from, int8_t* to, BFloat16* scale, int64_t size) {
  F32 largest{}, poison{};
  for (int64_t at = 0; at < size; at += kLanes) {
    const F32 value = load(from + at, size - at);
    largest = larger(larger(value, -value), largest);
    poison += value * 0.0f;
  }
  const float wanted = maximum(largest) / 127.0f;
  const F32 step = rounded_to(scale, splat((wanted < kSmallestNormal ? 0.0f : wanted) + sum(poison)));
  store(scale, step, 1);
  if (!(step[0] > 0)) {
    std::memset(to, 0, static_cast<size_t>(size));
    return;
  }
  const float inverse = 1.0f / step[0];
  for (int64_t at = 0; at < size; at += kLanes) store(to + at, load(from + at, size - at) * inverse, size - at);
}

template <class T>
void rotate_and_store(void* qkv_row, const void* angles_row, const StoreView& store, const int64_t* stored,
                      int64_t heads, int64_t kv_heads, int64_t head_size) {
  T* qkv = static_cast<T*>(qkv_row);
  const T* angles = static_cast<const T*>(angles_row);
  for (int64_t head = 0; head < heads + kv_heads; ++head) rotate(qkv + head * head_size, angles, head_size / 2);
  for (int64_t head = 0; head < kv_heads; ++head) {
    const int64_t span = stored[head] / store.span_rows, row = stored[head] % store.span_rows;
    char* to = store.base + span * store.span_bytes + row * store.row_bytes;
    const T *key = qkv + (heads + head) * head_size, *value = key + kv_heads * head_size;
    if (store.scales == nullptr) {
      std::memcpy(to, key, static_cast<size_t>(store.row_bytes));
      std::memcpy(to + store.value_offset, value, static_cast<size_t>(store.row_bytes));
      continue;
    }
    char* scale = store.scales + span * store.scale_span_bytes + row * static_cast<int64_t>(sizeof(BFloat16));
    quantise(key, reinterpret_cast<int8_t*>(to), reinterpret_cast<BFloat16*>(scale), head_size);
    quantise(value, reinterpret_cast<int8_t*>(to + store.value_offset),
             reinterpret_cast<BFloat16*>(scale + store.value_scales), head_size);
  }
}

template <class T>
void swiglu(const void* gate_up_row, void* out_row, int64_t width) {
  const T *gate = static_cast<const T*>(gate_up_row), *up = gate + width;
  T* out = static_cast<T*>(out_row);
  for (int64_t at = 0; at < width; at += kLanes) {
    const F32 value = load(gate + at, width - at);
    const F32 activated = rounded_to(out, value / (exponential(-value) + 1.0f));
    store(out + at, activated * load(up + at, width - at), width - at);
  }
}

}  // namespace
