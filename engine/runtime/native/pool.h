// A few threads that share the items of one loop after another.
//
// A decode step is some two hundred loops of 5 to 100 microseconds, so waiting is done by spinning, for
// as long as a step's next loop may take to come, and only then in the kernel.
//
// Items are claimed one by one. A loop ends when its items are done, not when every thread has turned up:
// where another process holds a core, the thread there takes no item, and no thread waits for it.
//
// `claims_` holds (loop number << 32 | items not yet claimed). Loop n cannot end before its items do, so a
// thread that has claimed one of them still finds that loop in all that it reads of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <linux/futex.h>
#include <memory>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace penstock {

class Pool {
 public:
  explicit Pool(int threads) {
    try {
      for (int worker = 1; worker < threads; ++worker) threads_.emplace_back([this, worker] { serve(worker); });
    } catch (...) {  // the system has no more threads
      end();
      throw;
    }
  }

  ~Pool() { end(); }

  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return int(threads_.size()) + 1; }

  // body(worker, item) for every item below `count`, in no order, `worker` below threads(). It must not throw.
  template <class Body>
  void each(int64_t count, Body&& body) {
    if (count <= 0) return;
    if (count == 1 || threads_.empty()) {
      for (int64_t item = 0; item < count; ++item) body(0, item);
      return;
    }
    call_ = [](void* context, int worker, int64_t item) { (*static_cast<Body*>(context))(worker, item); };
    context_ = const_cast<void*>(static_cast<const void*>(&body));
    count_ = count;
    pending_.store(uint32_t(count), std::memory_order_relaxed);
    const uint32_t loop = epoch_.load(std::memory_order_relaxed) + 1;
    claims_.store(uint64_t(loop) << 32 | uint64_t(count), std::memory_order_release);
    epoch_.store(loop);
    if (sleepers_.load()) wake(epoch_);
    work(0);
    await(pending_, [](uint32_t left) { return left == 0; }, caller_sleeps_);
  }

 private:
  using Call = void (*)(void*, int, int64_t);
  static constexpr int SPINS = 2000;  // 20 to 40 microseconds

  void end() {
    leaving_.store(true);
    epoch_.fetch_add(1);
    wake(epoch_);
    for (auto& thread : threads_) thread.join();
  }

  void serve(int worker) {
    for (uint32_t seen = 0; !leaving_.load(std::memory_order_relaxed);) {
      await(epoch_, [seen](uint32_t now) { return now != seen; }, sleepers_);
      seen = epoch_.load(std::memory_order_acquire);
      work(worker);
    }
  }

  void work(int worker) {
    for (uint64_t claims = claims_.load(std::memory_order_acquire); uint32_t(claims) != 0;) {
      if (!claims_.compare_exchange_weak(claims, claims - 1, std::memory_order_acq_rel)) continue;
      call_(context_, worker, count_ - int64_t(uint32_t(claims)));
      if (pending_.fetch_sub(1) == 1 && caller_sleeps_.load()) wake(pending_);
      claims = claims_.load(std::memory_order_acquire);
    }
  }

  // Until `done` holds of the word: by spinning, then asleep.
  template <class Done>
  static void await(std::atomic<uint32_t>& word, Done done, std::atomic<int>& sleepers) {
    for (int i = 0; i < SPINS; ++i) {
      if (done(word.load(std::memory_order_acquire))) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    sleepers.fetch_add(1);  // before the last look at the word, as a thread that changes it looks here after
    for (uint32_t now = word.load(); !done(now); now = word.load())
      syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0);
    sleepers.fetch_sub(1);
  }

  static void wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
  }

  alignas(64) std::atomic<uint64_t> claims_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<uint32_t> pending_{0};
  std::atomic<int> sleepers_{0}, caller_sleeps_{0};
  std::atomic<bool> leaving_{false};
  Call call_ = nullptr;
  void* context_ = nullptr;
  int64_t count_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace penstock
