#include "linear_multiplier.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

namespace prejit {
namespace {

struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

[[maybe_unused]] Registers cpuid(unsigned leaf, unsigned part) {
  Registers r;
  __get_cpuid_count(leaf, part, &r.a, &r.b, &r.c, &r.d);
  return r;
}

bool has_vnni() {
#if !defined(PREJIT_HAS_VNNI)
  return false;
#elif defined(__AVX512F__)
  return cpuid(7, 0).c & (1u << 11);
#else
  return cpuid(7, 1).a & (1u << 4);
#endif
}

std::atomic<int> chosen_vnni{-1};

}  // namespace

bool vnni() {
  int known = chosen_vnni.load(std::memory_order_relaxed);
  if (known < 0) chosen_vnni.store(known = has_vnni(), std::memory_order_relaxed);
  return known;
}

bool use_vnni(bool wanted) {
  if (wanted && !has_vnni()) return false;
  chosen_vnni.store(wanted, std::memory_order_relaxed);
  return true;
}

#if !defined(PREJIT_HAS_PAIRS)

Multiplier multiplier() { return Multiplier::kFloat32; }
bool use_multiplier(Multiplier wanted) { return wanted == Multiplier::kFloat32; }

#else

namespace {

// Returns whether Linux saves the tile registers and permits this process to use them, which it must request once
// (Linux 5.16).
bool may_use_tiles() {
  constexpr unsigned kTileStates = 3 << 17;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTileStates) == kTileStates && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has(Multiplier wanted) {
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAvx512Bf16 = 1u << 5, kAvx512Vbmi = 1u << 1;
  switch (wanted) {
    case Multiplier::kFloat32: return true;
    // VBMI's tables convert int8. Only Cooper Lake has BF16 without it.
    case Multiplier::kAvx512Bf16: return cpuid(7, 1).a & kAvx512Bf16 && cpuid(7, 0).c & kAvx512Vbmi;
    case Multiplier::kAmx: return cpuid(7, 0).d & kAmxBf16 && cpuid(7, 0).d & kAmxTile && may_use_tiles();
  }
  return false;
}

Multiplier best() {
  if (has(Multiplier::kAmx)) return Multiplier::kAmx;
  // CPUs with AMX need two cycles for a vdpbf16ps, as for four FMAs (Sapphire Rapids: 104 GFLOP/s a core, FMA 217).
  bool is_made_for_amx = cpuid(7, 0).d & (1u << 22);
  return has(Multiplier::kAvx512Bf16) && !is_made_for_amx ? Multiplier::kAvx512Bf16 : Multiplier::kFloat32;
}

std::atomic<int> chosen{-1};

}  // namespace

Multiplier multiplier() {
  int known = chosen.load(std::memory_order_relaxed);
  if (known < 0) chosen.store(known = static_cast<int>(best()), std::memory_order_relaxed);
  return static_cast<Multiplier>(known);
}

bool use_multiplier(Multiplier wanted) {
  if (!has(wanted)) return false;
  chosen.store(static_cast<int>(wanted), std::memory_order_relaxed);
  return true;
}

#endif  // PREJIT_HAS_PAIRS

}  // namespace prejit
