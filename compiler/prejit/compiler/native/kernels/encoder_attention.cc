#include "encoder_attention.h"

#include "attention_tile.h"
#include "threads.h"

namespace prejit::attention {
namespace {

constexpr int64_t kCheap = 1 << 16;  // multiplications that one thread ends before helpers arrive

// Computes `most` queries of one head, or the rest of them.
bool run_tile(const EncoderCall& call, int64_t job, int64_t most) {
  const int64_t tiles = (call.tokens + most - 1) / most;
  const int64_t b = job / tiles / call.heads, n = job / tiles % call.heads, first = job % tiles * most;
  const int64_t stride = call.heads * call.size, base = (b * call.tokens * call.heads + n) * call.size;
  const int64_t length = larger(0, smaller(call.length[b], call.tokens));
  const int64_t rows = smaller(call.tokens - first, most);
  void* memory = scratch(sizeof(float) * Tile::floats(most, call.size));
  if (memory == nullptr) return false;
  Tile tile;
  tile.place(static_cast<float*>(memory), most, call.size);
  tile.rows = larger(0, smaller(rows, length - first));
  tile.few = call.tokens <= kFewRows;
  tile.cap = 0;
  for (int64_t r = 0; r < tile.rows; ++r) {
    place_query(call.query + base + (first + r) * stride, call.size, call.scale,
                tile.query + r * round_up(call.size));
    tile.ranges[r] = {0, length};
  }
  attend(Head<float>{call.keys + base, call.values + base, stride, call.size}, tile);
  float* out = call.out + base + first * stride;
  for (int64_t r = 0; r < tile.rows; ++r) place_result(tile.sums, r, call.size, out + r * stride);
  for (int64_t r = tile.rows; r < rows; ++r) std::memset(out + r * stride, 0, sizeof(float) * call.size);
  return true;
}

}  // namespace

bool attend_encoder(const EncoderCall& call) {
  const int64_t heads = call.batch * call.heads;
  const int64_t most = tile_rows(call.tokens, heads, threads());
  const int64_t jobs = heads * ((call.tokens + most - 1) / most);
  bool good = true;
  const auto run = [&](int64_t job) {
    if (!run_tile(call, job, most)) __atomic_store_n(&good, false, __ATOMIC_RELAXED);
  };
  if (heads * call.tokens * call.tokens * call.size <= kCheap) {
    for (int64_t job = 0; job < jobs; ++job) run(job);
  } else {
    parallel_for(jobs, run);
  }
  return good;
}

}  // namespace prejit::attention
