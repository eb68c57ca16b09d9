// What test_kernel_threads.py calls in libraries that have helper threads. No handlers of XLA.
#include <sched.h>
#include <stdint.h>

#include <atomic>

#include "threads.h"

// Runs blocks of some work on all threads, calls times; returns the sum of their numbers.
extern "C" __attribute__((visibility("default"))) int64_t prejit_sum(int64_t blocks, int64_t calls) {
  std::atomic<int64_t> sum{0};
  for (int64_t call = 0; call < calls; ++call)
    prejit::parallel_for(blocks, [&](int64_t block) {
      for (volatile int spin = 0; spin < 1000; ++spin) {
      }
      sum.fetch_add(block, std::memory_order_relaxed);
    });
  return sum.load();
}

extern "C" __attribute__((visibility("default"))) int prejit_threads() { return prejit::threads(); }
