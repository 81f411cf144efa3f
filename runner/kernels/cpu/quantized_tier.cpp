// One tier's products of quantised matrices. Compiled several times, as tier.cpp is.
#include "quantized.h"

namespace kvyard {

extern const QuantizedKernels KVYARD_TIER = {{::quantize_row<float>, ::quantize_row<BFloat16>}, ::multiply_quantized};

}  // namespace kvyard
