// One tier's kernels. Compiled several times: KVYARD_TIER names the table, the compiler's -m flags what it may use.
#include "attention.h"
#include "draw.h"
#include "kernels.h"
#include "products.h"
#include "rows.h"

namespace kvyard {

#if defined(__AVX512BF16__)
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

template <class T, bool kMultipliesPairs>
constexpr Kernels kernels() {
  return {::attend_part<T, kMultipliesPairs>, ::merge, ::finish<T>, ::add_rms_norm<T>, ::rotate_and_store<T>,
          ::swiglu<T>, ::draw_token, kMultipliesPairs ? kMultiply : nullptr};
}

extern const Kernels KVYARD_TIER[2] = {kernels<float, false>(), kernels<BFloat16, kPairs>()};

#if defined(KVYARD_FIRST_TIER)
int64_t scratch_bytes() { return sizeof(Scratch); }
#endif

}  // namespace kvyard
