#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace kvyard {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kMostThreads = 64;
// Looks at the job board before a helper sleeps, some 40 microseconds; looks between two at the clock or at the core.
constexpr int kLooks = 2000, kLooksBetween = 50;
// After so many jobs without help, or one whose helper was interrupted, the caller does without for a while, each time for
// longer. A job that keeps a thread busy for long is worth waiting for help.
constexpr int kAbsences = 4;
constexpr Clock::duration kAloneFirst = std::chrono::microseconds(200), kAloneMost = std::chrono::milliseconds(5),
                          kLong = std::chrono::milliseconds(1);
constexpr Clock::duration kPatienceLeast = std::chrono::microseconds(20), kPatienceMost = std::chrono::milliseconds(1);

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
    for (; helpers_ < threads - 1; ++helpers_) start_helper();
    const Clock::time_point began = Clock::now();
    if (began < alone_until_) {
      for (int64_t chunk = 0; chunk < chunks; ++chunk) function(context, chunk);
      if (Clock::now() - began > kLong) alone_until_ = began;
      return;
    }
    function_ = function;
    context_ = context;
    places_ = threads - 1;
    for (int64_t span = 0; span < threads; ++span) {
      spans_[span].next.store(chunks * span / threads, std::memory_order_relaxed);
      spans_[span].end = chunks * (span + 1) / threads;
    }
#ifdef __linux__
    core_.store(sched_getcpu(), std::memory_order_relaxed);
#endif
    open_.store(++number_);
    if (asleep_.load() > 0) {
      const std::lock_guard<std::mutex> guard(bed_);
      alarm_.notify_all();
    }
    take_chunks(0);
    open_.store(0);
    const Clock::duration own = Clock::now() - began;
    const bool interrupted = !all_left_within(std::clamp(own, kPatienceLeast, kPatienceMost));
    if (interrupted) rest();
    if (own <= kLong) note(interrupted);
  }

 private:
  // A helper's last chunk takes no longer than all that the caller has done meanwhile, unless it has lost its core.
  bool all_left_within(Clock::duration patience) const {
    const Clock::time_point until = Clock::now() + patience;
    for (int looks = 1; inside_.load() != 0; ++looks) {
      pause();
      if (looks % kLooksBetween == 0 && Clock::now() > until) return inside_.load() == 0;
    }
    return true;
  }

  // Asleep, so that a helper that has lost its core to somebody else finds this one free.
  void rest() {
    std::unique_lock<std::mutex> lock(bed_);
    resting_.store(true);
    done_.wait(lock, [&] { return inside_.load() == 0; });
    resting_.store(false);
  }

  // Whether the other cores are others' at the moment: helpers that do not come, or are interrupted in the middle.
  void note(bool interrupted) {
    const bool helped = helped_.exchange(false, std::memory_order_relaxed);
    if (helped && !interrupted) {
      absent_ = 0;
      alone_ = kAloneFirst;
    } else if (interrupted || ++absent_ >= kAbsences) {
      absent_ = 0;
      alone_until_ = Clock::now() + alone_;
      alone_ = std::min(2 * alone_, kAloneMost);
    }
  }

  // First those of the thread's own span, one behind the other as they lie in memory, then what others have left.
  bool take_chunks(int64_t own) {
    const int64_t spans = places_.load() + 1;
    bool any = false;
    for (int64_t turn = 0; turn < spans; ++turn) {
      Span& span = spans_[(own + turn) % spans];
      for (int64_t chunk; (chunk = span.next.fetch_add(1, std::memory_order_relaxed)) < span.end; any = true)
        function_(context_, chunk);
    }
    return any;
  }

  bool wanted(uint64_t last) const {
    const uint64_t number = open_.load();
    return number != 0 && number != last;
  }

  // There it can only take time from the caller, who has to do the work alone anyway.
  bool on_callers_core() const {
#ifdef __linux__
    return sched_getcpu() == core_.load(std::memory_order_relaxed);
#else
    return false;
#endif
  }

  void leave() {
    inside_.fetch_sub(1);
    if (resting_.load()) {
      const std::lock_guard<std::mutex> guard(bed_);
      done_.notify_all();
    }
  }

  void start_helper() {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of whoever loaded us
    std::thread helper([this] { help(); });
#ifdef __linux__
    pthread_setname_np(helper.native_handle(), "kvyard-helper");
#endif
    helper.detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void help() {
    for (uint64_t last = 0;;) {
      int looks = 0;
      bool in_the_way = false;
      while (!wanted(last) && looks < kLooks) {
        pause();
        // Now and then: whether the caller waits for the core that this helper spins on.
        if (++looks % kLooksBetween == 0 && (in_the_way = on_callers_core())) break;
      }
      if (looks == kLooks || in_the_way) {
        std::unique_lock<std::mutex> lock(bed_);
        asleep_.fetch_add(1);
        alarm_.wait(lock, [&] { return wanted(last); });
        asleep_.fetch_sub(1);
      }
      const int64_t others = inside_.fetch_add(1);
      const uint64_t number = open_.load();
      if (number != 0) {
        last = number;
        if (others < places_.load() && !on_callers_core() && take_chunks(others + 1))
          helped_.store(true, std::memory_order_relaxed);
      }
      leave();
    }
  }

  std::mutex busy_, bed_;
  std::condition_variable alarm_, done_;
  std::atomic<bool> resting_{false};
  std::atomic<int> core_{-1};  // on which the caller began the job
  alignas(64) std::atomic<uint64_t> open_{0};
  alignas(64) std::atomic<int64_t> inside_{0};
  std::atomic<int64_t> asleep_{0}, places_{0};
  int64_t helpers_ = 0;
  uint64_t number_ = 0;
  std::atomic<bool> helped_{false};
  int absent_ = 0;  // jobs in a row
  Clock::time_point alone_until_{};
  Clock::duration alone_ = kAloneFirst;
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
