#include "attention.h"

#include <cstdlib>

#include "attention_tile.h"
#include "threads.h"

namespace prejit::attention {
namespace {

constexpr int64_t kCheap = 1 << 12;        // multiplications that one thread ends before helpers arrive
constexpr int64_t kCheapWrite = 1 << 15;   // maximum elements that the calling thread writes alone
constexpr int kHeadSlot = 1;               // scratch of a head that a norm or a turn changes

PREJIT_INLINE void turn_pair(float cos, float sin, float* x, float* y) {
  const float first = *x, second = *y;
  *x = first * cos - second * sin;
  *y = second * cos + first * sin;
}

// Turns a head to the place of a token, of B * T.
void turn(const Turns& turns, int64_t token, float* head) {
  const int64_t pairs = turns.pairs;
  const float *cos = turns.cos + token * pairs, *sin = turns.sin + token * pairs;
  if (turns.interleaved) {
    for (int64_t i = 0; i < pairs; ++i) turn_pair(cos[i], sin[i], head + 2 * i, head + 2 * i + 1);
  } else {
    for (int64_t i = 0; i < pairs; ++i) turn_pair(cos[i], sin[i], head + i, head + pairs + i);
  }
}

// Rows of a tile share keys: they are the query heads of a key/value head at one position, then at the next.
template <typename E>
class Decoder {
 public:
  explicit Decoder(const DecoderCall<E>& call)
      : call_(call),
        group_(call.heads / call.kv_heads),
        rows_(group_ * call.queries),
        tile_rows_(tile_rows(rows_, call.batch * call.kv_heads, threads())),
        tiles_((rows_ + tile_rows_ - 1) / tile_rows_) {}

  bool run() const {
    const int64_t jobs = call_.batch * call_.kv_heads * tiles_;
    const int64_t products = cost();
    const bool alone = products <= kCheap;
    const int64_t units = (last_seen() + kUnit) / kUnit;
    if (!alone && units > 1 && jobs < 2 * threads()) return run_split(jobs, units);
    // A head's only tile writes the head's keys. If there are several tiles, all keys are written before.
    const bool owner = tiles_ == 1;
    if (!owner && !write_all()) return false;
    return each(jobs, alone, [&](int64_t job) { return (!owner || write(job)) && run_tile(job); });
  }

 private:
  // Runs body(0) to body(count - 1); returns whether all of them return true.
  template <typename F>
  static bool each(int64_t count, bool alone, const F& body) {
    if (alone) {
      bool good = true;
      for (int64_t i = 0; i < count; ++i) good = body(i) && good;
      return good;
    }
    bool bad = false;
    parallel_for(count, [&](int64_t i) {
      if (!body(i)) __atomic_store_n(&bad, true, __ATOMIC_RELAXED);
    });
    return !bad;
  }

  int64_t valid_tokens(int64_t b) const { return larger(0, smaller(call_.length[b], call_.tokens)); }

  // Returns the number of queries at the position of a valid token or before.
  int64_t valid_queries(int64_t b) const {
    const int64_t tokens = valid_tokens(b);
    if (tokens == 0) return 0;
    const int64_t count = int64_t{call_.start[b]} + tokens - call_.query_start[b];
    return larger(0, smaller(count, call_.queries));
  }

  Range seen(int64_t b, int64_t query) const {
    const int64_t end = smaller(int64_t{call_.query_start[b]} + query + 1, call_.slots);
    return {call_.window > 0 ? larger(0, end - call_.window) : 0, end};
  }

  int64_t last_seen() const {
    int64_t last = 0;
    for (int64_t b = 0; b < call_.batch; ++b) {
      const int64_t queries = valid_queries(b);
      if (queries > 0) last = larger(last, seen(b, queries - 1).end - 1);
    }
    return last;
  }

  int64_t cost() const {
    int64_t products = 0;
    for (int64_t b = 0; b < call_.batch; ++b) {
      const int64_t queries = valid_queries(b);
      if (queries == 0) continue;
      const Range range = seen(b, queries - 1);
      products += call_.heads * queries * larger(0, range.end - range.first) * call_.size;
    }
    return products;
  }

  // Returns a head as it meets others: itself, or its norm turned, in this thread's memory; null if that is exhausted.
  const float* met(const float* head, const Norm& norm, int64_t b, int64_t token) const {
    if (norm.weight == nullptr && call_.turns.cos == nullptr) return head;
    float* changed = static_cast<float*>(scratch(sizeof(float) * call_.size, kHeadSlot));
    if (changed == nullptr) return nullptr;
    if (norm.weight) norm_row(norm, head, changed);
    else std::memcpy(changed, head, sizeof(float) * call_.size);
    if (call_.turns.cos) turn(call_.turns, b * call_.tokens + token, changed);
    return changed;
  }

  // Writes the new tokens of one batch row and key/value head; returns false if memory is exhausted.
  bool write(int64_t head) const {
    const int64_t b = head / call_.kv_heads, k = head % call_.kv_heads, size = call_.size;
    const int64_t tokens = valid_tokens(b), start = call_.start[b];
    const int64_t width = call_.new_width ? call_.new_width : call_.kv_heads;
    const int64_t first = larger(0, -start), end = smaller(tokens, call_.slots - start);
    for (int64_t t = first; t < end; ++t) {
      const int64_t from = ((b * call_.tokens + t) * width + k) * size;
      const int64_t to = (head * call_.slots + start + t) * (size + kTail<E>);
      const float* key = met(call_.new_keys + from, call_.key_norm, b, t);
      if (key == nullptr) return false;
      write_row(key, size, call_.keys + to);
      write_row(call_.new_values + from, size, call_.values + to);
    }
    return true;
  }

  bool write_all() const {
    const int64_t heads = call_.batch * call_.kv_heads;
    const bool alone = heads * call_.tokens * call_.size <= kCheapWrite;
    return each(heads, alone, [&](int64_t head) { return write(head); });
  }

  // The rows of a head that a tile has: `rows` from `first` on. The first `valid` of them are computed.
  struct Share {
    int64_t b, k, first, rows, valid;
  };

  // Later tiles see more keys, so they run first.
  Share share(int64_t job) const {
    const int64_t head = job / tiles_, first = (tiles_ - 1 - job % tiles_) * tile_rows_;
    const int64_t b = head / call_.kv_heads, rows = smaller(tile_rows_, rows_ - first);
    const int64_t valid = larger(0, smaller(rows, valid_queries(b) * group_ - first));
    return {b, head % call_.kv_heads, first, rows, valid};
  }

  // Returns the offset of a row in query or out, which have `width` heads at a position.
  int64_t offset(const Share& share, int64_t row, int64_t width) const {
    const int64_t query = (share.first + row) / group_, in_group = (share.first + row) % group_;
    return ((share.b * call_.queries + query) * width + share.k * group_ + in_group) * call_.size;
  }

  Head<E> head(const Share& share) const {
    const int64_t width = call_.size + kTail<E>, at = (share.b * call_.kv_heads + share.k) * call_.slots * width;
    return {call_.keys + at, call_.values + at, width, call_.size};
  }

  // Prepares a tile in this thread's memory, with its queries; returns false if memory is exhausted.
  bool prepare(const Share& share, Tile* tile) const {
    void* memory = scratch(sizeof(float) * Tile::floats(tile_rows_, call_.size));
    if (memory == nullptr) return false;
    tile->place(static_cast<float*>(memory), tile_rows_, call_.size);
    tile->rows = share.valid;
    tile->rounds = sizeof(E) == sizeof(Bf16);
    tile->pairs = tile->rounds && has_pairs();
    tile->cap = call_.cap;
    const int64_t width = call_.query_width ? call_.query_width : call_.heads;
    const int64_t first = int64_t{call_.query_start[share.b]} - call_.start[share.b];
    for (int64_t r = 0; r < share.valid; ++r) {
      const int64_t query = (share.first + r) / group_, token = larger(0, smaller(first + query, call_.tokens - 1));
      const float* head = met(call_.query + offset(share, r, width), call_.query_norm, share.b, token);
      if (head == nullptr) return false;
      place_query(*tile, r, head, call_.size, call_.scale);
      tile->ranges[r] = seen(share.b, query);
    }
    return true;
  }

  void place_results(const Share& share, const Sums& sums) const {
    for (int64_t r = 0; r < share.valid; ++r) {
      place_result(sums, r, call_.size, call_.out + offset(share, r, call_.heads));
    }
    for (int64_t r = share.valid; r < share.rows; ++r) {
      std::memset(call_.out + offset(share, r, call_.heads), 0, sizeof(float) * call_.size);
    }
  }

  bool run_tile(int64_t job) const {
    const Share of = share(job);
    Tile tile;
    if (!prepare(of, &tile)) return false;
    attend(head(of), tile);
    place_results(of, tile.sums);
    return true;
  }

  // For few tiles and many keys each unit of keys is a block of its own, and the sums are merged afterwards.
  bool run_split(int64_t jobs, int64_t units) const {
    const int64_t floats = Sums::floats(tile_rows_, call_.size);
    void* memory = std::malloc(sizeof(float) * floats * jobs * units);
    if (memory == nullptr) return false;
    float* parts = static_cast<float*>(memory);
    const auto part = [&](int64_t job, int64_t unit) {
      return Sums::at(parts + (job * units + unit) * floats, tile_rows_, call_.size);
    };
    const bool good = write_all() && each(jobs * units, false, [&](int64_t block) {
      const Share of = share(block / units);
      Tile tile;
      if (!prepare(of, &tile)) return false;
      add_unit(head(of), tile, block % units, part(block / units, block % units));
      return true;
    });
    for (int64_t job = 0; good && job < jobs; ++job) {
      const Share of = share(job);
      for (int64_t unit = 1; unit < units; ++unit) merge(part(job, 0), part(job, unit), of.valid, call_.size);
      place_results(of, part(job, 0));
    }
    std::free(memory);
    return good;
  }

  const DecoderCall<E>& call_;
  const int64_t group_, rows_, tile_rows_, tiles_;
};

}  // namespace

template <typename E>
bool attend_decoder(const DecoderCall<E>& call) {
  return Decoder<E>(call).run();
}

template bool attend_decoder<float>(const DecoderCall<float>& call);
template bool attend_decoder<Bf16>(const DecoderCall<Bf16>& call);
template bool attend_decoder<int8_t>(const DecoderCall<int8_t>& call);

}  // namespace prejit::attention
