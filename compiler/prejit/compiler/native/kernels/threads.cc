#include "threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

namespace prejit {
namespace {

// How long a helper polls for the next call before it sleeps: longer than the time between two products of a decode
// step, since waking a sleeper takes as long as a small product.
constexpr int64_t kSpinNanoseconds = 100'000;
constexpr int kPausesBetweenYields = 64;
constexpr int kMaxThreads = 1024;
// Helpers that are moved. Where there are more, the system finds idle cores by itself.
constexpr int kPlacedHelpers = 7;

// `work` holds the number of the call, and in the low bits the number of its blocks that are not claimed yet.
constexpr int kLeftBits = 24;
constexpr uint64_t kLeftMask = (uint64_t{1} << kLeftBits) - 1;
constexpr int64_t kMostBlocks = int64_t{1} << 23;

// Everything is atomic and constant-initialized: no constructor runs at load, no destructor at exit.
//
// Libraries of one process share the pool of the first (prejit_share_threads), which may come from another release. A
// change of Pool, Body or the protocol between a call and the helpers must raise PREJIT_THREADS_VERSION.
struct Pool {
  alignas(64) std::atomic<uint64_t> work{0};
  std::atomic<const Body*> body{nullptr};
  std::atomic<int64_t> blocks{0};
  alignas(64) std::atomic<int64_t> done{0};
  // The number of the call again, in the 32 bits that a futex needs; helpers wait on it.
  alignas(64) std::atomic<uint32_t> epoch{0};
  std::atomic<int> sleepers{0};
  alignas(64) std::atomic<int> held{0};
  std::atomic<int> size{0};  // Number of threads, the caller included; 0: not started in this process.
  std::atomic<int> most{0};  // Maximum of size; 0: one for each CPU.
  std::atomic<int> watches_forks{0};
  std::atomic<int> placed{0};  // Helpers that have begun.
  // The first of them: the thread's id, and the number of the CPU on which it was last, plus 1; 0: not known.
  std::atomic<int> ids[kPlacedHelpers]{};
  alignas(64) std::atomic<int> cpus[kPlacedHelpers]{};
};
Pool own;
std::atomic<Pool*> shared{&own};

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

int64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

void futex(std::atomic<uint32_t>* word, int operation, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

// Claims and runs blocks of the current call until none is left.
//
// A claim compares the number of the call and the blocks left in one operation. While a block is left the call has not
// ended, so the body read before a successful claim is that call's body, however long this thread slept in between.
void run_blocks(Pool& pool) {
  uint64_t seen = pool.work.load(std::memory_order_acquire);
  while (int64_t left = static_cast<int64_t>(seen & kLeftMask)) {
    const Body* body = pool.body.load(std::memory_order_relaxed);
    int64_t blocks = pool.blocks.load(std::memory_order_relaxed);
    if (!pool.work.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
    (*body)(blocks - left);
    pool.done.fetch_add(1, std::memory_order_release);
    seen = pool.work.load(std::memory_order_acquire);
  }
}

// Returns the number of the next call after `seen`.
uint32_t await_call(Pool& pool, std::atomic<int>* cpu, uint32_t seen) {
  int64_t end = nanoseconds() + kSpinNanoseconds;
  while (true) {
    if (cpu) cpu->store(sched_getcpu() + 1, std::memory_order_release);
    for (int i = 0; i < kPausesBetweenYields; ++i) {
      uint32_t now = pool.epoch.load(std::memory_order_acquire);
      if (now != seen) return now;
      pause();
    }
    // XLA's own threads need the same cores between calls.
    sched_yield();
    if (nanoseconds() < end) continue;
    pool.sleepers.fetch_add(1, std::memory_order_seq_cst);
    // The futex compares the word again, so a call that starts now is not missed.
    if (pool.epoch.load(std::memory_order_seq_cst) == seen) futex(&pool.epoch, FUTEX_WAIT, seen);
    pool.sleepers.fetch_sub(1, std::memory_order_relaxed);
    end = nanoseconds() + kSpinNanoseconds;
  }
}

// Moves the helpers that wait for this thread's core to other ones. XLA runs each program in another of its threads, which
// the system may wake on a helper's core while all others are idle; it moves one of the two milliseconds later.
void move_from_here(Pool& pool) {
  int here = sched_getcpu(), helpers = pool.placed.load(std::memory_order_relaxed);
  for (int i = 0; i < helpers && i < kPlacedHelpers; ++i) {
    if (pool.cpus[i].load(std::memory_order_acquire) != here + 1) continue;
    pool.cpus[i].store(0, std::memory_order_relaxed);
    int id = pool.ids[i].load(std::memory_order_relaxed);
    cpu_set_t all, others;
    if (sched_getaffinity(0, sizeof all, &all) != 0) return;
    others = all;
    CPU_CLR(here, &others);
    // Without another core, or permission, it stays. Later the system may move it as it likes.
    if (sched_setaffinity(id, sizeof others, &others) == 0) sched_setaffinity(id, sizeof all, &all);
  }
}

void* helper(void* of_pool) {
  Pool& pool = *static_cast<Pool*>(of_pool);
  int place = pool.placed.fetch_add(1);
  std::atomic<int>* cpu = place < kPlacedHelpers ? &pool.cpus[place] : nullptr;
  if (cpu) pool.ids[place].store(static_cast<int>(syscall(SYS_gettid)));
  uint32_t seen = 0;
  while (true) {
    seen = await_call(pool, cpu, seen);
    run_blocks(pool);
  }
}

// A forked child has only the thread that forked, and a call of another thread may be half done.
void forget_helpers() {
  Pool& pool = *shared.load();
  pool.work.store(0);
  pool.epoch.store(0);
  pool.sleepers.store(0);
  pool.size.store(0);
  pool.placed.store(0);
  for (auto& cpu : pool.cpus) cpu.store(0);
  pool.held.store(0);
}

int usable_cpus(const Pool& pool) {
  // More than 1024 CPUs do not fit a cpu_set_t: the call fails, and the process then uses one thread.
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  int count = CPU_COUNT(&set), most = pool.most.load(std::memory_order_relaxed);
  if (most < 1 || most > kMaxThreads) most = kMaxThreads;
  return count < 1 ? 1 : count > most ? most : count;
}

// Starts the helpers; the thread that holds them calls it.
void start(Pool& pool) {
  if (pool.watches_forks.exchange(1) == 0) pthread_atfork(nullptr, nullptr, forget_helpers);
  int wanted = usable_cpus(pool);
  // Signals belong to the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  int started = 1;
  for (; started < wanted; ++started) {
    pthread_t thread;
    // The process may have a limit on threads: fewer helpers are slower, not wrong.
    if (pthread_create(&thread, &attributes, helper, &pool) != 0) break;
  }
  pthread_attr_destroy(&attributes);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pool.size.store(started, std::memory_order_release);
}

// Runs the call with the helpers, which this thread holds.
void run_with_helpers(Pool& pool, int64_t blocks, const Body& body) {
  uint32_t number = pool.epoch.load(std::memory_order_relaxed) + 1;
  pool.body.store(&body, std::memory_order_relaxed);
  pool.blocks.store(blocks, std::memory_order_relaxed);
  pool.done.store(0, std::memory_order_relaxed);
  pool.work.store(uint64_t{number} << kLeftBits | static_cast<uint64_t>(blocks), std::memory_order_release);
  pool.epoch.store(number, std::memory_order_seq_cst);
  if (pool.sleepers.load(std::memory_order_seq_cst) > 0)
    futex(&pool.epoch, FUTEX_WAKE, static_cast<uint32_t>(blocks - 1));
  move_from_here(pool);
  run_blocks(pool);
  // A helper that was preempted within a block may need this core to go on.
  for (int64_t looks = 0; pool.done.load(std::memory_order_acquire) != blocks; ++looks) {
    if (looks < 2000)
      pause();
    else
      sched_yield();
  }
}

struct Buffers {
  void* data[kScratchSlots];
  size_t bytes[kScratchSlots];
};
thread_local Buffers buffers{};
pthread_key_t buffers_key;
pthread_once_t buffers_key_made = PTHREAD_ONCE_INIT;

void free_buffers(void* of_thread) {
  for (void* data : static_cast<Buffers*>(of_thread)->data) free(data);
}

}  // namespace

void parallel_for(int64_t blocks, const Body& body) {
  Pool& pool = *shared.load(std::memory_order_relaxed);
  if (blocks > 1 && blocks <= kMostBlocks && pool.held.exchange(1, std::memory_order_acquire) == 0) {
    if (pool.size.load(std::memory_order_relaxed) == 0) start(pool);
    bool alone = pool.size.load(std::memory_order_relaxed) == 1;
    if (!alone) run_with_helpers(pool, blocks, body);
    pool.held.store(0, std::memory_order_release);
    if (!alone) return;
  }
  for (int64_t block = 0; block < blocks; ++block) body(block);
}

int threads() {
  const Pool& pool = *shared.load(std::memory_order_relaxed);
  int size = pool.size.load(std::memory_order_acquire);
  return size ? size : usable_cpus(pool);
}

void* scratch(size_t bytes, int slot) {
  if (bytes <= buffers.bytes[slot]) return buffers.data[slot];
  pthread_once(&buffers_key_made, [] { pthread_key_create(&buffers_key, free_buffers); });
  free(buffers.data[slot]);
  void* data = nullptr;
  if (posix_memalign(&data, 64, bytes) != 0) data = nullptr;
  buffers.data[slot] = data;
  buffers.bytes[slot] = data ? bytes : 0;
  pthread_setspecific(buffers_key, &buffers);
  return data;
}

}  // namespace prejit

// The process calls it once before it calls a kernel, with the pool of the library that it loaded first, or nullptr, and
// the maximum number of threads, the caller included. Returns the pool that this library uses from now on.
extern "C" __attribute__((visibility("hidden"), used)) void* prejit_share_threads(void* first, int32_t most) {
  using namespace prejit;
  Pool* pool = first ? static_cast<Pool*>(first) : &own;
  pool->most.store(most, std::memory_order_relaxed);
  shared.store(pool, std::memory_order_relaxed);
  return pool;
}

// A library exports its handlers only, so an ELF note holds the address of the function (runtime device/kernels.py).
#define PREJIT_THREADS_VERSION "2"
asm(R"(
  .pushsection .note.prejit.threads, "a", @note
  .balign 4
  .long 7, 8, 1
  .asciz "prejit"
  .balign 4
  .long )" PREJIT_THREADS_VERSION R"(
0:.long prejit_share_threads - 0b
  .popsection
)");
