// Which tier's kernels run: the best that this CPU has, or a lower one when asked for (tests do).
#pragma once

#include "kernels.h"
#include "quantized_kernels.h"

namespace kvyard {

// [0] float32, [1] bfloat16.
const Kernels* current_tier();
const QuantizedKernels* current_quantized();

}  // namespace kvyard

#define KVYARD_EXPORT extern "C" __attribute__((visibility("default")))

// The current tier's name.
KVYARD_EXPORT const char* kvyard_tier();
// Whether our own products of bfloat16 are the better ones here: not where the CPU has AMX, which oneDNN uses.
KVYARD_EXPORT bool kvyard_multiplies();
// Switches to a tier of that name. False when this CPU does not have it, or nobody has.
KVYARD_EXPORT bool kvyard_use_tier(const char* name);
