#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace kvyard {
namespace {

constexpr int64_t kMostThreads = 64;
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

// Chunks that one thread begins with; others take of them when they have none of their own left.
struct alignas(64) Span {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};

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
    while (helpers_ < threads - 1 && start_helper()) ++helpers_;
    function_ = function;
    context_ = context;
    places_ = threads - 1;
    for (int64_t span = 0; span < threads; ++span) {
      spans_[span].next.store(chunks * span / threads, std::memory_order_relaxed);
      spans_[span].end = chunks * (span + 1) / threads;
    }
    open_.store(++number_);
    if (asleep_.load() > 0) {
      const std::lock_guard<std::mutex> guard(bed_);
      alarm_.notify_all();
    }
    const Closing closing{*this};  // also when a chunk throws: helpers must be out before the job's data go
    take_chunks(0);
  }

 private:
  struct Closing {
    Team& team;
    ~Closing() {
      team.open_.store(0);
      for (int looks = 0; team.inside_.load() != 0; ++looks) looks < kLooksBeforeYield ? pause() : void(sched_yield());
    }
  };

  // First those of the thread's own span, one behind the other as they lie in memory, then what others have left.
  void take_chunks(int64_t own) {
    const int64_t spans = places_.load() + 1;
    for (int64_t turn = 0; turn < spans; ++turn) {
      Span& span = spans_[(own + turn) % spans];
      for (int64_t chunk; (chunk = span.next.fetch_add(1, std::memory_order_relaxed)) < span.end;)
        function_(context_, chunk);
    }
  }

  bool wanted(uint64_t last) const {
    const uint64_t number = open_.load();
    return number != 0 && number != last;
  }

  // False when the system gives no thread: the caller and the helpers there are take its chunks.
  bool start_helper() {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of whoever loaded us
    bool started = true;
    try {
      std::thread helper([this] { help(); });
#ifdef __linux__
      pthread_setname_np(helper.native_handle(), "kvyard-helper");
#endif
      helper.detach();
    } catch (const std::system_error&) {
      started = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return started;
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
      const int64_t others = inside_.fetch_add(1);
      const uint64_t number = open_.load();
      if (number != 0) {
        last = number;
        if (others < places_.load()) take_chunks(others + 1);
      }
      inside_.fetch_sub(1);
    }
  }

  std::mutex busy_, bed_;
  std::condition_variable alarm_;
  alignas(64) std::atomic<uint64_t> open_{0};
  alignas(64) std::atomic<int64_t> inside_{0};
  std::atomic<int64_t> asleep_{0}, places_{0};
  int64_t helpers_ = 0;
  uint64_t number_ = 0;
  void (*function_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  Span spans_[kMostThreads];
};

Team& team = *new Team;

}  // namespace

int64_t num_threads() { return torch::stable::get_num_threads(); }

void run_chunks(int64_t chunks, void (*function)(void*, int64_t), void* context) {
  const int64_t threads = std::min({num_threads(), chunks, kMostThreads});
  if (threads > 1) return team.run(chunks, function, context, threads);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) function(context, chunk);
}

}  // namespace kvyard
