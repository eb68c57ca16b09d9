// Helper threads of the kernels: parallel_for over blocks, and a buffer for each thread.
//
// Threads claim blocks from a shared counter, so the calling thread alone can always finish: it never waits for a helper
// to arrive, only for blocks that a helper has begun. While one call holds the helpers, other calls run without them.
// All libraries of a process share the helpers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace prejit {

// A reference to a callable `void(int64_t block)`, which must outlive it. No heap, no libstdc++.
class Body {
 public:
  template <typename F, typename = std::enable_if_t<!std::is_same_v<std::decay_t<F>, Body>>>
  Body(const F& function)  // NOLINT: converts, so that a lambda can be passed.
      : object_(&function), call_([](const void* object, int64_t block) {
          (*static_cast<const F*>(object))(block);
        }) {}
  void operator()(int64_t block) const { call_(object_, block); }

 private:
  const void* object_;
  void (*call_)(const void*, int64_t);
};

// Runs body(0) .. body(blocks - 1), each once, on this thread and the helpers. Returns when all have ended and their
// writes are visible here. Blocks are claimed in order. May be called from many threads at once and inside a body.
void parallel_for(int64_t blocks, const Body& body);

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Returns the parts of a whole that have at most so much each.
inline int64_t parts_of(int64_t whole, int64_t most) { return (whole + most - 1) / most; }

// Returns how many threads run blocks: one for each CPU of the process, at least 1, and at most the limit that the
// process set (prejit.runtime.base.process_facts).
int threads();

// Returns a buffer of this thread, 64-byte aligned, of at least `bytes` bytes, or nullptr if memory is exhausted. It is
// valid until the thread's next call for the same slot. The thread keeps its pages, so a product needs no fresh ones.
constexpr int kScratchSlots = 4;
void* scratch(size_t bytes, int slot = 0);

}  // namespace prejit
