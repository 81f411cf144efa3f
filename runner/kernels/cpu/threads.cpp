#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace kvyard {
namespace {

// Looks at the job board before a helper sleeps, some 40 microseconds; looks before one that waits for a helper gives its
// core away.
constexpr int kLooks = 2000, kLooksBeforeYield = 2000;

void pause() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// One job at a time. `open` is its number while chunks may be taken, else 0. A helper counts itself in before it looks at
// `open`, the caller closes it before it counts who is in: one of the two sees the other, so a job's data outlive its
// helpers. Never destroyed: helpers may outlive every static object.
class Team {
 public:
  void run(int64_t chunks, void (*function)(void*, int64_t), void* context, int64_t threads) {
    std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
    if (!lock.owns_lock()) {  // another thread's job is under way: do without help
      for (int64_t chunk = 0; chunk < chunks; ++chunk) function(context, chunk);
      return;
    }
    for (; helpers_ < threads - 1; ++helpers_) start_helper();
    function_ = function;
    context_ = context;
    chunks_ = chunks;
    places_ = threads - 1;
    next_.store(0, std::memory_order_relaxed);
    open_.store(++number_);
    if (asleep_.load() > 0) {
      const std::lock_guard<std::mutex> guard(bed_);
      alarm_.notify_all();
    }
    take_chunks();
    open_.store(0);
    for (int looks = 0; inside_.load() != 0; ++looks) looks < kLooksBeforeYield ? pause() : void(sched_yield());
  }

 private:
  void take_chunks() {
    for (int64_t chunk; (chunk = next_.fetch_add(1, std::memory_order_relaxed)) < chunks_;) function_(context_, chunk);
  }

  bool wanted(uint64_t last) const {
    const uint64_t number = open_.load();
    return number != 0 && number != last;
  }

  void start_helper() {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of whoever loaded us
    std::thread([this] { help(); }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void help() {
    for (uint64_t last = 0;;) {
      int looks = 0;
      while (!wanted(last) && looks < kLooks) {
        pause();
        ++looks;
      }
      if (looks == kLooks) {
        std::unique_lock<std::mutex> lock(bed_);
        asleep_.fetch_add(1);
        alarm_.wait(lock, [&] { return wanted(last); });
        asleep_.fetch_sub(1);
      }
      const bool has_place = inside_.fetch_add(1) < places_.load();
      const uint64_t number = open_.load();
      if (number != 0) {
        last = number;
        if (has_place) take_chunks();
      }
      inside_.fetch_sub(1);
    }
  }

  std::mutex busy_, bed_;
  std::condition_variable alarm_;
  alignas(64) std::atomic<uint64_t> open_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> inside_{0};
  std::atomic<int64_t> asleep_{0}, places_{0};
  int64_t chunks_ = 0, helpers_ = 0;
  uint64_t number_ = 0;
  void (*function_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
};

Team& team = *new Team;

}  // namespace

int64_t num_threads() { return torch::stable::get_num_threads(); }

void run_chunks(int64_t chunks, void (*function)(void*, int64_t), void* context) {
  const int64_t threads = chunks > 1 ? std::min(num_threads(), chunks) : 1;
  if (threads > 1) return team.run(chunks, function, context, threads);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) function(context, chunk);
}

}  // namespace kvyard
