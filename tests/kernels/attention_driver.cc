// Calls attention from several threads at once, with odd sizes and arrays without a spare byte, and compares with a
// plain form in double. For sanitizers: it prints what is wrong and ends with status 1.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "attention.h"
#include "attention_vector.h"
#include "encoder_attention.h"

using namespace prejit::attention;
using prejit::Bf16;

namespace {

// Of exactly the size asked for, so that the first byte behind it is another's.
template <typename E>
struct Array {
  explicit Array(int64_t n) : size(n), data(static_cast<E*>(std::malloc(n ? n * sizeof(E) : 1))) {}
  ~Array() { std::free(data); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  int64_t size;
  E* data;
};

struct Random {
  uint32_t state;
  uint32_t next() { return state = state * 1664525u + 1013904223u, state >> 8; }
  int64_t below(int64_t n) { return next() % n; }
  float real() { return static_cast<float>(next() % 2001) / 1000 - 1; }
};

float widen(float x) { return x; }

float widen(Bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

template <typename E>
void fill(Random& random, Array<E>& array) {
  for (int64_t i = 0; i < array.size; ++i) narrow(random.real(), array.data + i);
}

float widen(int8_t x) { return x; }

// Fills the rows of a cache.
template <typename E>
void fill_rows(Random& random, Array<E>& array, int64_t size) {
  std::vector<float> row(size);
  for (int64_t at = 0; at < array.size; at += size + kTail<E>) {
    for (float& x : row) x = random.real();
    write_row(row.data(), size, array.data + at);
  }
}

// One query over keys and values `stride` apart, positions first to end - 1.
template <typename E>
bool agrees(const float* query, const E* keys, const E* values, int64_t stride, int64_t size, int64_t first,
            int64_t end, const float* found, double tolerance) {
  std::vector<double> mixed(size, 0.0);
  double total = 0;
  for (int64_t s = first; s < end; ++s) {
    double score = 0;
    const E *key = keys + s * stride, *value = values + s * stride;
    for (int64_t h = 0; h < size; ++h) score += double(query[h]) * widen(key[h]) * factor_of(key, size) * 0.25;
    const double weight = std::exp(score);
    total += weight;
    for (int64_t h = 0; h < size; ++h) mixed[h] += weight * widen(value[h]) * factor_of(value, size);
  }
  for (int64_t h = 0; h < size; ++h) {
    const double expected = total > 0 ? mixed[h] / total : 0;
    if (!(std::fabs(found[h] - expected) < tolerance)) {
      std::printf("expected %g, found %g\n", expected, found[h]);
      return false;
    }
  }
  return true;
}

template <typename E>
bool decoder(Random& random) {
  const int64_t batch = 1 + random.below(3), kv_heads = 1 + random.below(3), group = 1 + random.below(4);
  const int64_t size = 1 + random.below(70), slots = 1 + random.below(600), heads = kv_heads * group;
  const int64_t width = size + kTail<E>;
  const int64_t tokens = 1 + random.below(random.below(2) ? 90 : 3), window = random.below(2) * random.below(400);
  Array<float> query(batch * tokens * heads * size), out(query.size), new_keys(batch * tokens * kv_heads * size),
      new_values(new_keys.size);
  Array<E> keys(batch * kv_heads * slots * width), values(keys.size);
  Array<int32_t> start(batch), length(batch);
  fill(random, query), fill(random, new_keys), fill(random, new_values);
  fill_rows(random, keys, size), fill_rows(random, values, size);
  for (int64_t b = 0; b < batch; ++b) {
    start.data[b] = static_cast<int32_t>(random.below(slots + 2));
    length.data[b] = static_cast<int32_t>(random.below(tokens + 1));
  }
  const double tolerance = sizeof(E) == sizeof(Bf16) ? 4e-3 : 1e-5;  // With a cache of bfloat16 weights are rounded, too.
  DecoderCall<E> call{batch, tokens, tokens, heads, kv_heads, size, slots, query.data, new_keys.data, new_values.data,
                      start.data, length.data, start.data, keys.data, values.data, out.data, 0.25f, 0, window};
  // Heads that are normed already keep their values, and so do those that turn by no angle: what is expected stays.
  Array<float> cos(batch * tokens * random.below(size / 2 + 1)), sin(cos.size), ones(size);
  for (int64_t i = 0; i < cos.size; ++i) cos.data[i] = 1, sin.data[i] = 0;
  for (int64_t i = 0; i < size; ++i) ones.data[i] = 1;
  if (random.below(2)) call.turns = {cos.data, sin.data, cos.size / (batch * tokens), random.below(2) == 1};
  if (random.below(2)) {
    prejit::Norm& norm = call.query_norm;
    norm.width = size, norm.weight = ones.data, norm.epsilon = 1e-12f;
    call.key_norm = norm;
    for (Array<float>* heads : {&query, &new_keys}) {
      for (int64_t at = 0; at < heads->size; at += size) norm_row(norm, heads->data + at, heads->data + at);
    }
  }
  if (!attend_decoder(call)) return false;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t n = 0; n < heads; ++n) {
        const int64_t at = ((b * tokens + t) * heads + n) * size;
        const int64_t cache = (b * kv_heads + n / group) * slots * width;
        int64_t end = start.data[b] + t + 1 < slots ? start.data[b] + t + 1 : slots;
        if (t >= length.data[b]) end = 0;
        const int64_t first = window && end > window ? end - window : 0;
        if (!agrees(query.data + at, keys.data + cache, values.data + cache, width, size, first, end, out.data + at,
                    tolerance)) {
          return false;
        }
      }
    }
  }
  return true;
}

bool encoder(Random& random) {
  const bool packed = random.below(2) == 0, rounds = random.below(2) == 0;
  const int64_t batch = packed ? 1 : 1 + random.below(3), tokens = 1 + random.below(150), heads = 1 + random.below(4);
  const int64_t size = 1 + random.below(50), stride = heads * size, sentences = packed ? 1 + random.below(6) : batch;
  Array<float> query(batch * tokens * stride), keys(query.size), values(query.size), out(query.size);
  Array<int32_t> length(sentences);
  fill(random, query), fill(random, keys), fill(random, values);
  for (int64_t s = 0; s < sentences; ++s) length.data[s] = static_cast<int32_t>(random.below(tokens + 1));
  if (!attend_encoder(EncoderCall{batch, tokens, heads, size, query.data, keys.data, values.data, length.data,
                                  out.data, 0.25f, sentences, rounds})) {
    return false;
  }
  for (int64_t b = 0; b < batch; ++b) {
    int64_t start = 0, end = length.data[b], s = b;  // of the sentence of a token
    for (int64_t t = 0; t < tokens; ++t) {
      while (packed && t >= end && s + 1 < sentences) start = end, end += length.data[++s];
      const int64_t last = t < end ? (end < tokens ? end : tokens) : start;
      for (int64_t n = 0; n < heads; ++n) {
        const int64_t row = b * tokens * stride + n * size, sentence = row + start * stride, at = row + t * stride;
        if (!agrees(query.data + at, keys.data + sentence, values.data + sentence, stride, size, 0, last - start,
                    out.data + at, rounds ? 1e-2 : 1e-5)) {
          return false;
        }
      }
    }
  }
  return true;
}

}  // namespace

int main() {
  constexpr int kThreads = 3, kRounds = 12;
  bool good[kThreads] = {};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&good, i] {
      Random random{static_cast<uint32_t>(i) * 7919 + 1};
      good[i] = true;
      for (int round = 0; round < kRounds && good[i]; ++round) {
        good[i] = decoder<float>(random) && decoder<Bf16>(random) && decoder<int8_t>(random) && encoder(random);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (bool each : good) {
    if (!each) return 1;
  }
  return 0;
}
