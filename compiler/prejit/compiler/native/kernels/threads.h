// Helper threads of the kernels: parallel_for over blocks, and a buffer for each thread.
//
// A call claims blocks from a shared counter, so that the calling thread alone can always finish: nobody waits for a
// helper to come, only for blocks that a helper has begun. While one call holds the helpers, other calls run alone.
// All libraries of a process have the same helpers.
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

// Runs body(0) .. body(blocks - 1), each once, on this thread and the helpers; returns when all have ended and what
// they wrote is visible here. Blocks are claimed in order. May be called from many threads at once and inside a body.
void parallel_for(int64_t blocks, const Body& body);

// How many threads run blocks: as many as the process has CPUs, at least 1, and no more than it was allowed
// (runtime/process.py).
int threads();

// A buffer of this thread, 64-byte aligned, of at least so many bytes; valid until the thread asks for the same slot
// again. Its pages stay with the thread, so that a product does not pay for fresh ones. nullptr where memory is out.
constexpr int kScratchSlots = 2;
void* scratch(size_t bytes, int slot = 0);

}  // namespace prejit
