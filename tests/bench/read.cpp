// Reads memory and does nothing else with it than a processor must: what a machine's bandwidth is measured with.

#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

// As wide as the processor's own: a wider one is taken apart in memory, which costs more than the reading.
#if defined(__AVX512F__)
typedef float vec __attribute__((vector_size(64)));
#elif defined(__AVX__)
typedef float vec __attribute__((vector_size(32)));
#else
typedef float vec __attribute__((vector_size(16)));
#endif
constexpr int64_t ROUND = 8 * sizeof(vec), AHEAD = 2048, BLOCK = 256 << 10;

template <bool PREFETCHED>
float read(const char* from, int64_t bytes) {
  vec sums[8] = {};
  for (const char* end = from + bytes; from < end; from += ROUND)
    for (int i = 0; i < 8; ++i) {
      vec taken;
      std::memcpy(&taken, from + i * sizeof taken, sizeof taken);
      if (PREFETCHED) __builtin_prefetch(from + i * sizeof taken + AHEAD, 0, 2);
      sums[i] += taken;
    }
  for (int i = 1; i < 8; ++i) sums[0] += sums[i];
  return sums[0][0];
}

}  // namespace

// `way` 0: a part for every thread; 1: the same, asking for what comes 2 KiB later; 2: blocks of 256 KiB,
// claimed by whoever is free. `bytes` divides by threads * 256 KiB. Returns what keeps a compiler from
// leaving the reading out.
extern "C" float penstock_read(const char* from, int64_t bytes, int32_t threads, int32_t way) {
  std::atomic<int64_t> next{0};
  std::vector<float> sums(threads);
  const auto work = [&](int thread) {
    const int64_t part = bytes / threads;
    if (way == 0) sums[thread] = read<false>(from + thread * part, part);
    if (way == 1) sums[thread] = read<true>(from + thread * part, part);
    if (way == 2)
      for (int64_t at; (at = next.fetch_add(BLOCK)) < bytes;) sums[thread] += read<true>(from + at, BLOCK);
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < threads; ++thread) others.emplace_back(work, thread);
  work(0);
  for (auto& other : others) other.join();
  float sum = 0.0f;
  for (const float own : sums) sum += own;
  return sum;
}
