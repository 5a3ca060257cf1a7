// From logits to a token, for rows that edit nothing and truncate nothing but by min-p: steps 4, 7 and 8 of
// engine/runtime/host/sampler.py, in its order and with its sums. The rest of that document stays in torch.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"

namespace penstock {

constexpr int64_t NUMERIC_FAILURE = -1;  // engine/core/messages.py

// The number in [0, 1) of (seed, position): Philox4x32-10, as in engine/runtime/host/philox.py.
inline double uniform(uint64_t seed, uint64_t position) {
  uint32_t c0 = uint32_t(position), c1 = uint32_t(position >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const uint64_t left = uint64_t(c0) * 0xD2511F53u, right = uint64_t(c2) * 0xCD9E8D57u;
    c0 = uint32_t(right >> 32) ^ c1 ^ k0;
    c1 = uint32_t(right);
    c2 = uint32_t(left >> 32) ^ c3 ^ k1;
    c3 = uint32_t(left);
  }
  return (double(c0 >> 5) * 0x1p26 + double(c1 >> 6)) * 0x1p-53;
}

class LogitsRow {
 public:
  LogitsRow(const float* logits, int64_t vocab) : logits_(logits), vocab_(vocab) {
    vf best = splat(logits[0]), broken{};
    for (int64_t i = 0; i < vocab; i += LANES) {
      const vf x = at(i, logits[0]);
      best = larger(best, x);
      broken += x * 0.0f;
    }
    peak_ = largest(best);
    sound_ = sum(broken) == 0.0f;
  }

  bool sound() const { return sound_; }  // all are finite

  int64_t argmax() const {
    int64_t i = 0;
    while (logits_[i] != peak_) ++i;
    return i;
  }

  // The first token whose cumulative weight exceeds u times the total: first the block, then the place in it.
  int64_t draw(float temperature, float min_p, double u) const {
    const auto weigh = [&](int64_t i) {
      const vf z = (at(i, -std::numeric_limits<float>::infinity()) - peak_) / temperature;
      const vf weight = z < -87.0f ? vf{} : exponential(z);
      return weight < min_p ? vf{} : weight;
    };
    std::vector<double> ends;
    ends.reserve(vocab_ / BLOCK + 1);
    double total = 0.0;
    for (int64_t start = 0; start < vocab_; start += BLOCK) {
      vd sums{};
      for (int64_t i = start; i < std::min(start + BLOCK, vocab_); i += LANES) sums += widened(weigh(i));
      for (int lane = 0; lane < LANES / 2; ++lane) total += sums[lane];
      ends.push_back(total);
    }
    const double target = u * total;
    const int64_t block = first_above(ends, target);
    std::vector<double> inside;
    inside.reserve(BLOCK);
    double mass = 0.0;
    for (int64_t i = 0; i < BLOCK && block * BLOCK + i < vocab_; i += LANES) {
      const vf weights = weigh(block * BLOCK + i);
      for (int lane = 0; lane < LANES; ++lane) inside.push_back(mass += weights[lane]);
    }
    return block * BLOCK + first_above(inside, block ? target - ends[block - 1] : target);
  }

 private:
  static constexpr int64_t BLOCK = 128;
  static_assert(BLOCK % LANES == 0);
  typedef float half __attribute__((vector_size(2 * LANES)));
  typedef double vd __attribute__((vector_size(4 * LANES)));

  vf at(int64_t i, float behind) const {
    if (vocab_ - i >= LANES) return load<vf>(logits_ + i);
    vf x = splat(behind);
    std::memcpy(&x, logits_ + i, (vocab_ - i) * sizeof(float));
    return x;
  }

  // Two lanes added in each.
  static vd widened(vf x) {
    half parts[2];
    std::memcpy(parts, &x, sizeof x);
    return __builtin_convertvector(parts[0], vd) + __builtin_convertvector(parts[1], vd);
  }

  // Rounding may not lift the target to the total: there is always such a place, and weight there.
  static int64_t first_above(const std::vector<double>& cdf, double target) {
    target = std::min(target, std::nextafter(cdf.back(), 0.0));
    return std::upper_bound(cdf.begin(), cdf.end(), target) - cdf.begin();
  }

  const float* logits_;
  const int64_t vocab_;
  float peak_;
  bool sound_;
};

}  // namespace penstock
