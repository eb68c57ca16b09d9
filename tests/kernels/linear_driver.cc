// Calls products from several threads at once, with odd sizes and arrays that end at a page nobody may touch, and
// compares with a plain loop in double; then the helper threads alone, and after fork. For sanitizers: it prints what is
// wrong and ends with status 1. With the argument `fork` it tries fork only, which ThreadSanitizer does not follow.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "experts.h"
#include "linear.h"
#include "linear_int4.h"
#include "linear_integers.h"
#include "linear_multiplier.h"
#include "row_adapters.h"
#include "threads.h"

using namespace prejit;

namespace {

// Of exactly the size asked for. The sanitizer sees a byte behind it on the heap; a vector load that it does not see
// (masked ones) reads a page that is not there.
template <typename E>
struct Array {
  explicit Array(int64_t n, bool at_page) : size(n) {
    size_t bytes = n * sizeof(E);
    if (!at_page) {
      data = static_cast<E*>(std::malloc(bytes ? bytes : 1));
      return;
    }
    size_t page = sysconf(_SC_PAGESIZE);
    mapped = (bytes + page - 1) / page * page + page;
    map = static_cast<char*>(mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(map + mapped - page, page, PROT_NONE);
    data = reinterpret_cast<E*>(map + mapped - page - bytes);
  }
  ~Array() {
    if (map)
      munmap(map, mapped);
    else
      std::free(data);
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  int64_t size;
  E* data;
  char* map = nullptr;
  size_t mapped = 0;
};

struct Random {
  uint32_t state;
  uint32_t next() { return state = state * 1664525u + 1013904223u, state >> 8; }
  int64_t below(int64_t n) { return next() % n; }
  float real() { return static_cast<float>(next() % 2001) / 1000 - 1; }
};

double value(const float& v) { return v; }
double value(const int8_t& v) { return v; }
double value(const Bf16& v) {
  uint32_t bits = uint32_t{v.bits} << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

// To the nearest bfloat16, by arithmetic: 8 bits of significand.
double rounded(double v) {
  int exponent;
  double significand = std::frexp(v, &exponent);
  return std::ldexp(std::nearbyint(std::ldexp(significand, 8)), exponent - 8);
}

// Returns a row of x as products with weights of a dtype round it.
std::vector<double> rounded(Dtype dtype, const float* row, int64_t inputs) {
  std::vector<double> found(row, row + inputs);
  float most = 1e-33f;
  for (int64_t l = 0; l < inputs; ++l) most = std::fmax(most, std::fabs(row[l]));
  for (int64_t l = 0; l < inputs; ++l) {
    if (dtype == Dtype::kBfloat16) found[l] = rounded(row[l]);
    if (dtype == Dtype::kInt8) found[l] = std::nearbyint(row[l] * (126.5f / most) * 256) * (most / 126.5f / 256);
  }
  return found;
}

void set(Random& random, float* to) { *to = random.real(); }
void set(Random& random, int8_t* to) { *to = static_cast<int8_t>(random.below(256) - 128); }
void set(Random& random, Bf16* to) {
  float f = random.real();
  uint32_t bits;
  memcpy(&bits, &f, 4);
  to->bits = static_cast<uint16_t>(bits >> 16);
}

template <typename E>
void fill(Random& random, Array<E>& array) {
  for (int64_t i = 0; i < array.size; ++i) set(random, array.data + i);
}

std::atomic<int> wrong{0};

template <typename W>
void check(Random& random, Dtype dtype, int64_t m, int64_t k, int64_t n, bool gated, bool at_page) {
  Array<float> x(m * k, at_page), y(m * n, at_page), bias(n, at_page), scale(n, at_page), residual(m * n, at_page);
  Array<W> w(n * k, at_page), up(n * k, at_page);
  fill(random, x), fill(random, bias), fill(random, scale), fill(random, residual), fill(random, w), fill(random, up);
  if (m > 1) std::fill(x.data, x.data + k, 0.0f);
  Linear product;
  product.rows = m, product.positions = m, product.inputs = k, product.outputs = n;
  product.x = x.data;
  product.weights = {w.data, dtype, scale.data, bias.data};
  product.gated = gated;
  product.many_rows = random.below(2);
  if (gated) product.up = {up.data, dtype, scale.data, nullptr};
  product.residual = residual.data;
  product.activation = Activation::kRelu;
  product.y = y.data;
  if (!linear(product)) return void(wrong.fetch_add(1)), void(std::printf("no memory\n"));
  for (int64_t i = 0; i < m; ++i) {
    const std::vector<double> row = rounded(dtype, x.data + i * k, k);
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0, up_sum = 0, size = 1;
      for (int64_t l = 0; l < k; ++l) {
        double factor = row[l];
        double term = factor * value(w.data[j * k + l]);
        sum += term, size += std::fabs(term);
        up_sum += factor * value(up.data[j * k + l]);
      }
      double expected = std::fmax(0, sum * scale.data[j] + bias.data[j]);
      if (gated) expected *= up_sum * scale.data[j], size *= 1 + std::fabs(up_sum) + k;
      expected += residual.data[i * n + j];
      if (!(std::fabs(y.data[i * n + j] - expected) <= 1e-5 * size)) {
        if (wrong.fetch_add(1) == 0)
          std::printf("dtype %d, [%ld, %ld] x [%ld]: expected %g, found %g\n", static_cast<int>(dtype), long(m), long(k),
                      long(n), expected, y.data[i * n + j]);
        return;
      }
    }
  }
}

// Returns x as products with int4 weights round it: 32 to int8 with one scale.
std::vector<double> rounded_for_int4(const Array<float>& x) {
  std::vector<double> found(x.data, x.data + x.size);
  for (int64_t i = 0; i < x.size; i += kInt4Group) {
    float most = 0;
    for (int64_t l = i; l < i + kInt4Group; ++l) most = std::fmax(most, std::fabs(x.data[l]));
    for (int64_t l = i; l < i + kInt4Group; ++l)
      found[l] = most > 0 ? std::nearbyint(x.data[l] * (127 / most)) * (most / 127) : 0;
  }
  return found;
}

// int4: m rows, k times 32 inputs.
void check_int4(Random& random, int64_t m, int64_t k, int64_t n, bool gated, bool at_page) {
  bool has_zeros = random.below(2);
  int64_t groups = k % 2 ? k : k / 2, width = has_zeros ? 2 * kInt4Tile : kInt4Tile;
  int64_t inputs = k * kInt4Group, tiles = (n + kInt4Tile - 1) / kInt4Tile;
  Array<float> x(m * inputs, at_page), y(m * n, at_page);
  Array<uint32_t> w(tiles * kInt4Tile * inputs / kInt4InWord, at_page);
  Array<uint16_t> scales(tiles * width * groups, at_page);
  fill(random, x);
  for (int64_t i = 0; i < w.size; ++i) w.data[i] = random.next() << 16 ^ random.next();
  for (int64_t i = 0; i < scales.size; ++i) scales.data[i] = i % width < kInt4Tile ? 0x3C00 : 0xC200;  // 1 and -3
  Linear product;
  product.rows = m, product.inputs = inputs, product.outputs = n;
  product.x = x.data, product.y = y.data;
  product.weights.data = w.data, product.weights.dtype = Dtype::kInt4, product.weights.group_scales = scales.data;
  product.weights.group = inputs / groups, product.weights.has_zeros = has_zeros;
  product.gated = gated;
  if (gated) product.up = product.weights;
  use_vnni(random.below(2)), use_byte_tiles(random.below(2));  // Another thread may change it, which changes no number.
  if (!linear(product)) return void(wrong.fetch_add(1)), void(std::printf("no memory\n"));
  std::vector<double> factors = rounded_for_int4(x);
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0, size = 1;
      for (int64_t l = 0; l < inputs; ++l) {
        uint32_t word = w.data[((j / kInt4Tile) * inputs + l) / kInt4InWord * kInt4Tile + j % kInt4Tile];
        int four = word >> (l % 8 / 2 * 4 + l % 2 * 16) & 15;
        double term = factors[i * inputs + l] * ((four < 8 ? four : four - 16) + (has_zeros ? 3 : 0));
        sum += term, size += std::fabs(term);
      }
      double expected = gated ? sum * sum : sum;
      if (!(std::fabs(y.data[i * n + j] - expected) <= 1e-5 * size * (gated ? size : 1))) {
        if (wrong.fetch_add(1) == 0)
          std::printf("int4, [%ld, %ld] x [%ld]: expected %g, found %g\n", long(m), long(inputs), long(n), expected,
                      y.data[i * n + j]);
        return;
      }
    }
}

// Experts of int8, beside a product for each pair.
void check_experts(Random& random, int64_t k, int64_t n, bool at_page) {
  int64_t experts = 1 + random.below(4), rows = random.below(12), chosen = 1 + random.below(3), pairs = rows * chosen;
  bool gated = random.below(2);
  int64_t outputs = gated ? 2 * n : n;
  Array<float> x(rows * k, at_page), y(pairs * n, at_page), scale(experts * outputs, at_page);
  Array<float> bias(experts * outputs, at_page), expected(n, at_page);
  Array<int8_t> w(experts * outputs * k, at_page);
  Array<int32_t> expert(pairs, at_page);
  fill(random, x), fill(random, scale), fill(random, bias), fill(random, w);
  for (int64_t i = 0; i < pairs; ++i) expert.data[i] = static_cast<int32_t>(random.below(experts));
  ExpertProducts all;
  all.experts = experts, all.pairs = pairs, all.row_pairs = chosen, all.expert = expert.data;
  Linear& p = all.each;
  p.inputs = k, p.outputs = n, p.x = x.data, p.y = y.data, p.gated = gated, p.activation = Activation::kSilu;
  p.weights = {w.data, Dtype::kInt8, scale.data, bias.data};
  if (!expert_products(all)) return void(wrong.fetch_add(1)), void(std::printf("no memory\n"));
  for (int64_t i = 0; i < pairs; ++i) {
    Linear one = p;
    one.rows = 1, one.usual_rows = std::max<int64_t>(1, pairs / experts);
    one.x = x.data + i / chosen * k, one.y = expected.data;
    int64_t at = expert.data[i] * outputs;
    one.weights = {w.data + at * k, Dtype::kInt8, scale.data + at, bias.data + at};
    one.up = {w.data + (at + n) * k, Dtype::kInt8, scale.data + at + n, bias.data + at + n};
    if (!linear(one) || std::memcmp(expected.data, y.data + i * n, n * sizeof(float)) != 0) {
      if (wrong.fetch_add(1) == 0) std::printf("experts [%ld] x [%ld, %ld]\n", long(pairs), long(k), long(n));
      return;
    }
  }
}

// Experts of int4 or E2M1, k times 32 inputs and n tiles of outputs, beside a product for each pair.
void check_experts_of_words(Random& random, int64_t k, int64_t n, bool at_page) {
  int64_t experts = 1 + random.below(4), rows = random.below(40), chosen = 1 + random.below(3), pairs = rows * chosen;
  bool gated = random.below(2), is_e2m1 = random.below(2), is_one = random.below(3) == 0;
  int64_t inputs = k * kInt4Group, outputs = n * kInt4Tile - (gated ? 0 : random.below(kInt4Tile));
  int64_t tiles = gated ? 2 * n : n, of_tile = kInt4Tile * inputs / kInt4InWord, all_outputs = gated ? 2 * outputs : outputs;
  Array<float> x(rows * inputs, at_page), y(pairs * outputs, at_page), bias(experts * all_outputs, at_page);
  Array<float> expected(outputs, at_page);
  Array<uint32_t> w(experts * tiles * of_tile, at_page);
  Array<uint16_t> scales(experts * tiles * kInt4Tile * k, at_page);
  Array<int32_t> expert(pairs, at_page);
  fill(random, x), fill(random, bias);
  for (int64_t i = 0; i < w.size; ++i) w.data[i] = random.next() << 16 ^ random.next();
  for (int64_t i = 0; i < scales.size; ++i)
    scales.data[i] = static_cast<uint16_t>(is_e2m1 ? 0x3F80 - 128 * random.below(6) : 0x3C00 - random.below(2000));
  for (int64_t i = 0; i < pairs; ++i) expert.data[i] = is_one ? 0 : static_cast<int32_t>(random.below(experts));
  ExpertProducts all;
  all.experts = experts, all.pairs = pairs, all.row_pairs = chosen, all.expert = expert.data;
  Linear& p = all.each;
  p.inputs = inputs, p.outputs = outputs, p.x = x.data, p.y = y.data, p.gated = gated, p.activation = Activation::kSilu;
  p.weights.data = w.data, p.weights.dtype = Dtype::kInt4, p.weights.group_scales = scales.data;
  p.weights.bias = bias.data, p.weights.is_e2m1 = is_e2m1;
  if (!expert_products(all)) return void(wrong.fetch_add(1)), void(std::printf("no memory\n"));
  for (int64_t i = 0; i < pairs; ++i) {
    Linear one = p;
    one.rows = 1, one.x = x.data + i / chosen * inputs, one.y = expected.data;
    auto at = [&](int64_t tile, int64_t output) {
      Weights found = p.weights;
      tile += expert.data[i] * tiles;
      found.data = w.data + tile * of_tile, found.group_scales = scales.data + tile * kInt4Tile * k;
      found.bias = bias.data + expert.data[i] * all_outputs + output;
      return found;
    };
    one.weights = at(0, 0);
    if (gated) one.up = at(n, outputs);
    if (!linear(one) || std::memcmp(expected.data, y.data + i * outputs, outputs * sizeof(float)) != 0) {
      if (wrong.fetch_add(1) == 0)
        std::printf("experts of %s [%ld] x [%ld, %ld]\n", is_e2m1 ? "E2M1" : "int4", long(pairs), long(inputs), long(outputs));
      return;
    }
  }
}

// Rows with adapters and without, beside a plain loop in double.
void check_row_adapters(Random& random, int64_t k, int64_t n, bool at_page) {
  int64_t rows = random.below(9), positions = 1 + random.below(6), slots = 1 + random.below(3), rank = 1 + random.below(9);
  int64_t tokens = rows * positions;
  Array<float> x(tokens * k, at_page), y(tokens * n, at_page), before(tokens * n, false);
  Array<float> a(slots * rank * k, at_page), b(slots * rank * n, at_page);
  Array<int32_t> slot(rows, at_page);
  fill(random, x), fill(random, y), fill(random, a), fill(random, b);
  if (y.size > 0) memcpy(before.data, y.data, tokens * n * sizeof(float));
  for (int64_t i = 0; i < rows; ++i) slot.data[i] = static_cast<int32_t>(random.below(slots + 1));
  RowAdapters call;
  call.rows = rows, call.positions = positions, call.inputs = k, call.outputs = n, call.rank = rank;
  call.slot = slot.data, call.x = x.data, call.a = a.data, call.b = b.data, call.y = y.data;
  call.a_stride = rank * k, call.b_stride = rank * n, call.activation = Activation::kRelu;
  if (!row_adapters(call)) return void(wrong.fetch_add(1)), void(std::printf("no memory\n"));
  for (int64_t i = 0; i < tokens * n; ++i) {
    int64_t token = i / n, at = slot.data[token / positions] - 1;
    double sum = before.data[i];
    for (int64_t r = 0; at >= 0 && r < rank; ++r) {
      double inner = 0;
      for (int64_t l = 0; l < k; ++l) inner += double{x.data[token * k + l]} * a.data[(at * rank + r) * k + l];
      sum += inner * b.data[(at * rank + r) * n + i % n];
    }
    if (!(std::fabs(y.data[i] - std::fmax(0, sum)) <= 1e-5 * (1 + rank * k))) {
      if (wrong.fetch_add(1) == 0) std::printf("adapters of rank %ld, [%ld, %ld]\n", long(rank), long(k), long(n));
      return;
    }
  }
}

// Rows rounded to int8: some have a number that is larger than all others, some lie on one side of 0.
void check_integers(Random& random, int64_t m, int64_t k, int64_t n, bool gated, bool at_page) {
  Array<float> x(m * k, at_page), y(m * n, at_page), scale(n, at_page);
  Array<int8_t> w(n * k, at_page);
  fill(random, x), fill(random, scale), fill(random, w);
  for (int64_t i = 0; i < m && k; i += 3) x.data[i * k] *= 1000;
  for (int64_t i = 1; i < m; i += 3)
    for (int64_t l = 0; l < k; ++l) x.data[i * k + l] = std::fabs(x.data[i * k + l]);
  Linear product;
  product.rows = m, product.inputs = k, product.outputs = n, product.x = x.data, product.y = y.data;
  product.weights = {w.data, Dtype::kInt8, scale.data};
  product.gated = gated;
  if (gated) product.up = product.weights;
  if (!linear_by_integers(product)) return void(wrong.fetch_add(1)), void(std::printf("no memory\n"));
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0, size = 0, peak = 0;
      for (int64_t l = 0; l < k; ++l) {
        sum += x.data[i * k + l] * value(w.data[j * k + l]), size += std::fabs(value(w.data[j * k + l]));
        peak = std::fmax(peak, std::fabs(x.data[i * k + l]));
      }
      double most = size * peak / 127 * 0.51 * std::fabs(scale.data[j]), expected = sum * scale.data[j];
      if (gated) most *= 2 * std::fabs(expected) + most, expected *= expected;
      if (!(std::fabs(y.data[i * n + j] - expected) <= most + 1e-5 * std::fabs(expected))) {
        if (wrong.fetch_add(1) == 0)
          std::printf("integers, [%ld, %ld] x [%ld]: expected %g, found %g\n", long(m), long(k), long(n), expected,
                      y.data[i * n + j]);
        return;
      }
    }
}

void products(uint32_t seed) {
  Random random{seed};
  for (int i = 0; i < 42; ++i) {
    // Few rows, or enough to be packed; inputs beyond one panel or chunk at times.
    int64_t m = i % 5 == 4 ? 127 + random.below(40) : random.below(40), n = random.below(90), k = random.below(70);
    if (i % 7 == 3) k += 380;
    if (i % 15 == 8) k += 2048;
    bool gated = random.below(2), at_page = random.below(2);
    switch (random.below(8)) {
      case 0: check<float>(random, Dtype::kFloat32, m, k, n, gated, at_page); break;
      case 1: check<Bf16>(random, Dtype::kBfloat16, m, k, n, gated, at_page); break;
      case 2: check<int8_t>(random, Dtype::kInt8, m, k, n, gated, at_page); break;
      case 3: check_int4(random, m, 1 + k / kInt4Group, n, gated, at_page); break;
      case 4: check_experts(random, k, n, at_page); break;
      case 5: check_experts_of_words(random, 1 + k / kInt4Group, 1 + n / kInt4Tile, at_page); break;
      case 6: check_row_adapters(random, k, n, at_page); break;
      case 7:
        if (i % 2) m = 24 + random.below(47), k += 512;  // many of these rows read W in place
        check_integers(random, m, k, n, gated, at_page);
        break;
    }
  }
}

// Each block once, and what it wrote visible; calls from many threads, and inside a body.
void blocks(uint32_t seed) {
  Random random{seed};
  for (int i = 0; i < 2000; ++i) {
    int64_t count = random.below(40);
    std::vector<int> runs(count);
    parallel_for(count, [&](int64_t block) {
      std::atomic<int> inner{1};
      if (block % 7 == 0) parallel_for(3, [&](int64_t b) { inner.fetch_add(static_cast<int>(b) - 1); });
      runs[block] += inner.load();
    });
    for (int64_t b = 0; b < count; ++b)
      if (runs[b] != 1) wrong.fetch_add(1);
    // Helpers go to sleep at times.
    if (i % 400 == 0) usleep(1000);
  }
}

void forks() {
  products(1);
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop.load()) parallel_for(8, [](int64_t) {});
  });
  for (int i = 0; i < 20; ++i) {
    pid_t child = fork();
    if (child == 0) {
      std::atomic<int> sum{0};
      for (int j = 0; j < 100; ++j) parallel_for(16, [&](int64_t) { sum.fetch_add(1); });
      _exit(sum.load() == 1600 ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) std::printf("a child ended with status %d\n", status), wrong.fetch_add(1);
  }
  stop.store(true);
  busy.join();
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1 && std::strcmp(arguments[1], "fork") == 0) {
    forks();
  } else {
    for (Multiplier by : {Multiplier::kFloat32, Multiplier::kAvx512Bf16, Multiplier::kAmx}) {
      if (!use_multiplier(by)) continue;
      std::vector<std::thread> threads;
      for (uint32_t i = 0; i < 3; ++i) threads.emplace_back([i] { blocks(i + 1), products(i + 1); });
      for (auto& thread : threads) thread.join();
    }
  }
  if (wrong.load()) std::printf("%d wrong\n", wrong.load());
  return wrong.load() ? 1 : 0;
}
