// What the files that face torch share: rows and vectors of tensors, checked; new tensors; rows given to threads.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>

#include "threads.h"
#include "tiers.h"

namespace kvyard {

using torch::stable::Tensor;

// Fewer elements of a row-wise operator than this are done before a second thread would wake up.
constexpr int64_t kElementsPerThread = 1 << 15;

inline const Kernels& kernels_for(const Tensor& tensor) {
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

inline Rows rows_of(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.dim() == 2 && tensor.stride(1) == 1, "kvyard: ", name, " must be [rows, width], rows dense");
  const auto element = static_cast<int64_t>(tensor.element_size());
  return {static_cast<char*>(tensor.data_ptr()), tensor.size(0), tensor.size(1), tensor.stride(0) * element};
}

inline Tensor empty(const Tensor& model, int64_t dimensions, const int64_t* sizes, const int64_t* strides, int32_t dtype) {
  int32_t device_type, device_index;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(model.get(), &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(model.get(), &device_index));
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dimensions, sizes, strides, dtype, device_type,
                                                         device_index, &made));
  return Tensor(made);
}

inline Tensor empty_rows(const Tensor& model, int64_t rows, int64_t width, int32_t dtype) {
  const int64_t sizes[] = {rows, width}, strides[] = {width, 1};
  return empty(model, 2, sizes, strides, dtype);
}

inline Tensor empty_like(const Tensor& model, int64_t rows, int64_t width) {
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(model.get(), &dtype));
  return empty_rows(model, rows, width, dtype);
}

inline Tensor empty_vector(const Tensor& model, int64_t length, int32_t dtype) {
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

template <class T>
const T* vector_of(const Tensor& tensor, int64_t length, torch::headeronly::ScalarType type, const char* name) {
  STD_TORCH_CHECK(tensor.scalar_type() == type && tensor.is_contiguous() && tensor.numel() == length, "kvyard: ", name,
                  " does not fit");
  return static_cast<const T*>(tensor.data_ptr());
}

}  // namespace kvyard
