#include "choose.h"

#include <atomic>

#include "activation.h"
#include "simd.h"
#include "threads.h"

namespace prejit {
namespace {

constexpr int64_t kBlock = 8192;  // Elements. About 3 us of work, with noise 15: less does not justify a thread.
constexpr int32_t kNowhere = INT32_MAX;
constexpr int32_t kInfinity = 0x7F800000;

struct Found {
  float value;  // NaN if an element is NaN
  int32_t at;   // kNowhere if nothing is above -infinity
};

Found better(Found a, Found b) {
  if (a.value != a.value) return a;
  bool is_first = b.value != b.value || b.value > a.value || (b.value == a.value && b.at < a.at);
  return is_first ? b : a;
}

// Returns the first largest of value(i, count, index) for i from `first` to `end` - 1, a vector at a time.
template <typename Value>
PREJIT_INLINE Found first_largest(int64_t first, int64_t end, const Value& value) {
  Ints index, at = Ints{} + kNowhere, is_nan{};
  for (int i = 0; i < kLanes; ++i) index[i] = static_cast<int32_t>(first) + i;
  Floats best = splat(-__builtin_inff());
  for (int64_t i = first; i < end; i += kLanes, index = index + kLanes) {
    Floats v = value(i, end - i, index);
    Ints is_larger = v > best;
    if (end - i < kLanes) is_larger &= index < static_cast<int32_t>(end);
    best = is_larger ? v : best, at = is_larger ? index : at;
    is_nan |= v != v;
  }
  Found found{-__builtin_inff(), kNowhere};
  for (int i = 0; i < kLanes; ++i) found = better(found, {is_nan[i] ? __builtin_nanf("") : best[i], at[i]});
  return found;
}

// Returns a vector of a row's logits plus their bias, from token `i` on. If fewer than a vector are left, the rest is zeros.
PREJIT_INLINE Floats allowed(const Choice& c, int64_t row, int64_t i, int64_t count) {
  int64_t at = row * c.width + i;
  return load_some(c.logits + at, count) + load_some(c.bias + at, count);
}

// In the order of numbers that are at most 0, the largest first.
PREJIT_INLINE Ints keys(Floats v) { return reinterpret_cast<Ints>(v) & 0x7FFFFFFF; }

PREJIT_INLINE bool any(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask)) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(reinterpret_cast<__m256>(mask)) != 0;
#else
  return _mm_movemask_ps(reinterpret_cast<__m128>(mask)) != 0;
#endif
}

// The natural logarithm of normal numbers above 0, within 2 units of the last place (Cephes, logf).
PREJIT_INLINE Floats logarithm(Floats v) {
  Ints bits = reinterpret_cast<Ints>(v) - 0x3F3504F3;  // of sqrt(1/2), so that the fraction is near 1
  Floats exponent = __builtin_convertvector(bits >> 23, Floats);
  Floats f = reinterpret_cast<Floats>((bits & 0x7FFFFF) + 0x3F3504F3) - 1.0f, square = f * f;
  constexpr float kCoefficients[] = {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                                     -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
  Floats p = splat(7.0376836292e-2f);
#pragma GCC unroll 8
  for (float coefficient : kCoefficients) p = p * f + coefficient;
  Floats small = p * f * square + exponent * -2.12194440e-4f - square * 0.5f;
  return f + small + exponent * 0.693359375f;
}

// Noise for the Gumbel-max trick. Its bits are the first word of Threefry-2x32 with 20 rounds (Salmon et al. 2011).
PREJIT_INLINE Floats gumbel(const uint32_t* seed, int32_t position, Ints index) {
  const uint32_t keys[] = {seed[0], seed[1], seed[0] ^ seed[1] ^ 0x1BD11BDA};
  constexpr int kTurns[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  Bits x = Bits{} + (static_cast<uint32_t>(position) + keys[0]), y = reinterpret_cast<Bits>(index) + keys[1];
#pragma GCC unroll 5
  for (uint32_t group = 0; group < 5; ++group) {
#pragma GCC unroll 4
    for (int turn : kTurns[group % 2]) x = x + y, y = x ^ (y << turn | y >> (32 - turn));
    x = x + keys[(group + 1) % 3], y = y + (keys[(group + 2) % 3] + group + 1);
  }
  // The midpoints of 2^23 equal intervals: never 0, never 1.
  Floats uniform = __builtin_convertvector(reinterpret_cast<Ints>(x >> 9), Floats) * 0x1p-23f + 0x1p-24f;
  return -logarithm(-logarithm(uniform));
}

// Returns the least key from which on `holds` is true; kInfinity is not asked for.
template <typename Holds>
int32_t least_key(const Holds& holds) {
  int32_t low = 0, high = kInfinity;
  while (low < high) {
    int32_t middle = low + (high - low) / 2;
    if (holds(middle))
      high = middle;
    else
      low = middle + 1;
  }
  return high;
}

// Returns the last key that top-k, of what is left top-p, and min-p keep. All tokens with that key stay.
int32_t last_key(const Choice& c, int64_t row, const float* scaled, float* weights) {
  const int64_t padded = parts_of(c.width, kLanes) * kLanes;
  int32_t last = kInfinity;
  if (c.top_k[row] > 0 && c.top_k[row] < c.width)
    last = least_key([&](int32_t key) {
      Ints count{};
      for (int64_t i = 0; i < padded; i += kLanes) count = count - (keys(load(scaled + i)) <= key);
      int64_t all = 0;
      for (int i = 0; i < kLanes; ++i) all += count[i];
      return all >= c.top_k[row];
    });
  if (c.top_p[row] < 1) {
    Floats total{};
    for (int64_t i = 0; i < padded; i += kLanes) {
      Floats x = load(scaled + i), weight = keys(x) <= last ? exponential(x) : Floats{};
      store(weights + i, weight);
      total += weight;
    }
    const float enough = c.top_p[row] * sum(total);
    last = least_key([&](int32_t key) {
      Floats some{};
      for (int64_t i = 0; i < padded; i += kLanes)
        some += keys(load(scaled + i)) <= key ? load(weights + i) : Floats{};
      return sum(some) >= enough;
    });
  }
  if (c.min_p[row] <= 0) return last;
  // The best token has weight 1, so min-p asks for this weight.
  return static_cast<int32_t>(least(last, keys(logarithm(splat(c.min_p[row])))[0]));
}

// Chooses the token of a row. `each` runs a function for 0 to a count; `memory` has 2 x c.width elements and more, in whole
// vectors, and `found` one of each block.
template <typename Each>
int32_t chosen(const Choice& c, int64_t row, const Each& each, float* memory, Found* found) {
  const int64_t blocks = parts_of(c.width, kBlock);
  auto first_of_blocks = [&](auto value) {
    each(blocks, [&](int64_t block) {
      int64_t first = block * kBlock;
      found[block] = first_largest(first, least(c.width, first + kBlock), value);
    });
    Found best{-__builtin_inff(), kNowhere};
    for (int64_t block = 0; block < blocks; ++block) best = better(best, found[block]);
    return best;
  };
  const Found largest = first_of_blocks([&](int64_t i, int64_t count, Ints) __attribute__((always_inline)) {
    return allowed(c, row, i, count);
  });
  if (largest.at == kNowhere || !(largest.value < __builtin_inff())) return -1;
  if (!(c.temperature[row] > 0)) return largest.at;
  float *scaled = memory, *weights = memory + parts_of(c.width, kLanes) * kLanes;
  each(blocks, [&](int64_t block) {
    int64_t first = block * kBlock, end = least(c.width, first + kBlock);
    for (int64_t i = first; i < end; i += kLanes) {
      // The largest becomes 0 first, so that no temperature makes two logits infinite and equal.
      Floats v = (allowed(c, row, i, end - i) - largest.value) / c.temperature[row];
      for (int64_t lane = end - i; lane < kLanes; ++lane) v[lane] = -__builtin_inff();
      store(scaled + i, v);
    }
  });
  const int32_t last = last_key(c, row, scaled, weights);
  return first_of_blocks([&](int64_t i, int64_t, Ints index) __attribute__((always_inline)) {
           Floats x = load(scaled + i);
           Ints stays = keys(x) <= last;
           if (!any(stays)) return splat(-__builtin_inff());
           return stays ? x + gumbel(c.seed + 2 * row, c.position[row], index) : splat(-__builtin_inff());
         })
      .at;
}

}  // namespace

bool choose(const Choice& c) {
  const int64_t size = 2 * parts_of(c.width, kLanes) * kLanes * sizeof(float);
  std::atomic<bool> has_memory{true};
  auto choose_row = [&](int64_t row, const auto& each) {
    char* memory = static_cast<char*>(scratch(size + parts_of(c.width, kBlock) * sizeof(Found), 1));
    if (!memory) return has_memory.store(false, std::memory_order_relaxed);
    c.token[row] = chosen(c, row, each, reinterpret_cast<float*>(memory), reinterpret_cast<Found*>(memory + size));
  };
  if (2 * c.rows <= threads()) {  // threads share a row
    for (int64_t row = 0; row < c.rows; ++row)
      choose_row(row, [](int64_t count, const auto& body) { parallel_for(count, body); });
  } else {
    parallel_for(c.rows, [&](int64_t row) {
      choose_row(row, [](int64_t count, const auto& body) {
        for (int64_t i = 0; i < count; ++i) body(i);
      });
    });
  }
  return has_memory.load(std::memory_order_relaxed);
}

}  // namespace prejit
