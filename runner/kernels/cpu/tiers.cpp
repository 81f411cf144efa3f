#include "tiers.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif

#include <cstring>

namespace {

struct Tier {
  const char* name;
  bool (*supported)();
  const kvyard::Kernels* kernels;
  const kvyard::QuantizedKernels* quantized;
};

#ifdef __x86_64__
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && has_avx2();
}
// The CPU has AMX-BF16, and the system lets tiles be used: bits 17 and 18 of XCR0.
bool has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1)) return false;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return false;
  asm("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  return (a >> 17 & 3) == 3;
}
bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_avx512_bf16() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }
#else
bool has_amx() { return false; }
#endif

// Best first.
const Tier kTiers[] = {
#ifdef __x86_64__
    {"avx512bf16", has_avx512_bf16, kvyard::kAvx512Bf16, &kvyard::kQuantizedVnni},
    {"avx512vnni", has_avx512_vnni, kvyard::kAvx512, &kvyard::kQuantizedVnni},
    {"avx512", has_avx512, kvyard::kAvx512, &kvyard::kQuantizedAvx512},
    {"avx2", has_avx2, kvyard::kAvx2, &kvyard::kQuantizedAvx2},
#endif
    {"portable", [] { return true; }, kvyard::kPortable, &kvyard::kQuantizedPortable},
};

const Tier* best() {
  for (const Tier& tier : kTiers)
    if (tier.supported()) return &tier;
  return nullptr;
}

const Tier* current = best();

}  // namespace

const kvyard::Kernels* kvyard::current_tier() { return current->kernels; }

const kvyard::QuantizedKernels* kvyard::current_quantized() { return current->quantized; }

const char* kvyard_tier() { return current->name; }

bool kvyard_multiplies() { return current->kernels[1].multiply != nullptr && !has_amx(); }

bool kvyard_use_tier(const char* name) {
  for (const Tier& tier : kTiers) {
    if (std::strcmp(tier.name, name) == 0 && tier.supported()) {
      current = &tier;
      return true;
    }
  }
  return false;
}
