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

// Returns whether Linux saves the tile registers and permits this process to use them, which it must request once
// (Linux 5.16).
[[maybe_unused]] bool may_use_tiles() {
  constexpr unsigned kAmxTile = 1u << 24, kTileStates = 3 << 17;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  if (!(cpuid(7, 0).d & kAmxTile)) return false;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTileStates) == kTileStates && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
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

bool has_byte_tiles() {
#if !defined(PREJIT_HAS_BYTE_TILES)
  return false;
#else
  return cpuid(7, 0).d & (1u << 25) && may_use_tiles();
#endif
}

// A choice that is made when it is first asked for, and that tests change.
class Choice {
 public:
  explicit constexpr Choice(bool (*has)()) : has_(has) {}
  bool is_on() {
    int known = chosen_.load(std::memory_order_relaxed);
    if (known < 0) chosen_.store(known = has_(), std::memory_order_relaxed);
    return known;
  }
  bool use(bool wanted) {
    if (wanted && !has_()) return false;
    chosen_.store(wanted, std::memory_order_relaxed);
    return true;
  }

 private:
  bool (*has_)();
  std::atomic<int> chosen_{-1};
};
Choice of_vnni(has_vnni), of_byte_tiles(has_byte_tiles);

}  // namespace

bool vnni() { return of_vnni.is_on(); }
bool use_vnni(bool wanted) { return of_vnni.use(wanted); }
bool byte_tiles() { return of_byte_tiles.is_on(); }
bool use_byte_tiles(bool wanted) { return of_byte_tiles.use(wanted); }

#if !defined(PREJIT_HAS_PAIRS)

Multiplier multiplier() { return Multiplier::kFloat32; }
bool use_multiplier(Multiplier wanted) { return wanted == Multiplier::kFloat32; }

#else

namespace {

bool has(Multiplier wanted) {
  constexpr unsigned kAmxBf16 = 1u << 22, kAvx512Bf16 = 1u << 5;
  switch (wanted) {
    case Multiplier::kFloat32: return true;
    case Multiplier::kAvx512Bf16: return cpuid(7, 1).a & kAvx512Bf16;
    case Multiplier::kAmx: return cpuid(7, 0).d & kAmxBf16 && may_use_tiles();
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
