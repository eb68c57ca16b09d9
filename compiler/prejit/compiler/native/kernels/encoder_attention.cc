#include "encoder_attention.h"

#include "attention_tile.h"
#include "threads.h"

namespace prejit::attention {
namespace {

constexpr int64_t kCheap = 1 << 16;  // multiplications that one thread ends before helpers arrive

// Computes queries `from` to `to` - 1 of a row for one head. They are of the sentence of `length` tokens from `start` on.
bool run_tile(const EncoderCall& call, int64_t base, int64_t start, int64_t length, int64_t from, int64_t to) {
  const int64_t stride = call.heads * call.size, first = base + start * stride;
  void* memory = scratch(sizeof(float) * Tile::floats(to - from, call.size));
  if (memory == nullptr) return false;
  Tile tile;
  tile.place(static_cast<float*>(memory), to - from, call.size);
  tile.rows = to - from;
  tile.rounds = call.rounds;
  tile.pairs = call.rounds && has_pairs();
  tile.cap = 0;
  for (int64_t r = 0; r < tile.rows; ++r) {
    place_query(tile, r, call.query + base + (from + r) * stride, call.size, call.scale);
    tile.ranges[r] = {0, length};
  }
  attend(Head<float>{call.keys + first, call.values + first, stride, call.size}, tile);
  for (int64_t r = 0; r < tile.rows; ++r) {
    place_result(tile.sums, r, call.size, call.out + base + (from + r) * stride);
  }
  return true;
}

// Computes `most` tokens of a row for one head, or the rest of them: the part of each sentence that lies there.
bool run_part(const EncoderCall& call, int64_t job, int64_t most) {
  const int64_t parts = parts_of(call.tokens, most);
  const int64_t b = job / parts / call.heads, n = job / parts % call.heads, first = job % parts * most;
  const int64_t stride = call.heads * call.size, base = (b * call.tokens * call.heads + n) * call.size;
  const int64_t end = smaller(first + most, call.tokens), sentences = call.sentences / call.batch;
  int64_t start = 0;
  for (int64_t s = 0; s < sentences && start < end; ++s) {
    const int64_t length = larger(0, smaller(call.length[b * sentences + s], call.tokens - start));
    const int64_t from = larger(start, first), to = smaller(start + length, end);
    if (from < to && !run_tile(call, base, start, length, from, to)) return false;
    start += length;
  }
  for (int64_t t = larger(start, first); t < end; ++t) {
    std::memset(call.out + base + t * stride, 0, sizeof(float) * call.size);
  }
  return true;
}

}  // namespace

bool attend_encoder(const EncoderCall& call) {
  const int64_t heads = call.batch * call.heads;
  const int64_t most = tile_rows(call.tokens, heads, threads());
  const int64_t jobs = heads * parts_of(call.tokens, most);
  bool good = true;
  const auto run = [&](int64_t job) {
    if (!run_part(call, job, most)) __atomic_store_n(&good, false, __ATOMIC_RELAXED);
  };
  if (heads * call.tokens * call.tokens * call.size <= kCheap) {
    for (int64_t job = 0; job < jobs; ++job) run(job);
  } else {
    parallel_for(jobs, run);
  }
  return good;
}

}  // namespace prejit::attention
