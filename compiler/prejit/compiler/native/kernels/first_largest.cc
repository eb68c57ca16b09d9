#include "first_largest.h"

#include "simd.h"
#include "threads.h"

namespace prejit {
namespace {

constexpr int64_t kBlock = 16384;  // Elements. About 5 us of work: less does not justify a thread.
constexpr int32_t kNowhere = INT32_MAX;

struct Found {
  float value;  // NaN if an element is NaN.
  int32_t at;   // kNowhere if nothing is above -infinity.
};

Found better(Found a, Found b) {
  if (a.value != a.value) return a;
  bool is_first = b.value != b.value || b.value > a.value || (b.value == a.value && b.at < a.at);
  return is_first ? b : a;
}

Found in_block(const float* values, const float* bias, int32_t first, int64_t count) {
  Ints index, at = Ints{} + kNowhere, is_nan{};
  for (int i = 0; i < kLanes; ++i) index[i] = first + i;
  Floats best = splat(-__builtin_inff());
  for (int64_t i = 0; i < count; i += kLanes, index = index + kLanes) {
    Floats v = load_some(values + i, count - i) + load_some(bias + i, count - i);
    Ints is_larger = v > best;
    if (count - i < kLanes) is_larger &= index < first + static_cast<int32_t>(count);
    best = is_larger ? v : best, at = is_larger ? index : at;
    is_nan |= v != v;
  }
  Found found{-__builtin_inff(), kNowhere};
  for (int i = 0; i < kLanes; ++i) found = better(found, {is_nan[i] ? __builtin_nanf("") : best[i], at[i]});
  return found;
}

}  // namespace

bool first_largest(const FirstLargest& f) {
  const int64_t blocks = parts_of(f.width, kBlock);
  Found* found = static_cast<Found*>(scratch(sizeof(Found) * (f.rows * blocks + 1)));
  if (!found) return false;
  parallel_for(f.rows * blocks, [&](int64_t index) {
    int64_t row = index / blocks, first = index % blocks * kBlock, start = row * f.width + first;
    found[index] = in_block(f.values + start, f.bias + start, static_cast<int32_t>(first), least(kBlock, f.width - first));
  });
  for (int64_t row = 0; row < f.rows; ++row) {
    Found all{-__builtin_inff(), kNowhere};
    for (int64_t i = 0; i < blocks; ++i) all = better(all, found[row * blocks + i]);
    bool is_finite = all.value < __builtin_inff() && all.at != kNowhere;
    f.at[row] = is_finite ? all.at : static_cast<int32_t>(f.width);
  }
  return true;
}

}  // namespace prejit
