// From logits to a token: steps 4 to 9 of engine/runtime/host/sampler.py, in its order. Other edits stay in torch.
//
// A mask costs no pass of its own: what it forbids is passed over, and weighs nothing.
//
// A row that top-k or top-p truncates is not sorted: a large top-k, or a top-p of flat logits, keeps nearly all of a
// vocabulary, and sorting 152k tokens takes 100 times as long as reading them. A place in the order is found by value
// instead. The distances from the best, (best - x) / temperature, are non-negative floats, whose bits ascend as they
// do: so a histogram of their upper bits tells in which bin a count or a mass of tokens is reached, one of the next
// bits of those in that bin tells it more closely, and the third tells the very distance. Equals are told apart by
// their ids. Top-k is such a search by count, top-p one by mass, and the draw itself another one by mass.
//
// Masses are whole numbers in units of 2^-44, as on a GPU (engine/runtime/kernels/sampling.py): their sums are exact
// in any order, so that no rounding draws a token that was cut.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"

namespace penstock {

constexpr int64_t NUMERIC_FAILURE = -1;  // engine/contract/messages.py

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

// Which tokens may be drawn: all where there are no bits.
struct Mask {
  const uint8_t* bits;
  int64_t len;  // in bytes

  // Bit k says whether token i + k may be drawn; i is a multiple of LANES.
  uint32_t lanes(int64_t i) const {
    constexpr uint32_t ALL = uint32_t((uint64_t(1) << LANES) - 1);
    if (!bits) return ALL;
    uint32_t found = 0;
    for (int64_t byte = i / 8; byte <= (i + LANES - 1) / 8 && byte < len; ++byte)
      found |= uint32_t(bits[byte]) << 8 * (byte - i / 8);
    return found >> i % 8 & ALL;
  }
};

class LogitsRow {
  friend class Likeliest;

 public:
  LogitsRow(const float* logits, int64_t vocab, Mask mask) : logits_(logits), vocab_(vocab), mask_(mask) {
    vf best = splat(NEVER), broken{};
    for (int64_t i = 0; i < vocab; i += LANES) {
      const vf x = raw(i, logits[0]);
      best = larger(best, allowed(i, x));
      broken += x * 0.0f;
    }
    peak_ = largest(best);
    sound_ = sum(broken) == 0.0f;
  }

  bool sound() const { return sound_; }  // all are finite

  bool empty() const { return peak_ == NEVER; }  // none may be drawn

  int64_t argmax() const {
    int64_t i = 0;
    while (logits_[i] != peak_ || !(mask_.lanes(i / LANES * LANES) >> i % LANES & 1)) ++i;
    return i;
  }

  // The first token whose cumulative weight exceeds u times the total: first the block, then the place in it.
  int64_t draw(float temperature, float min_p, double u) const {
    const auto weigh = [&](int64_t i) {
      if (!mask_.lanes(i)) return vf{};
      const vf z = (at(i, NEVER) - peak_) / temperature;
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

  static constexpr float NEVER = -std::numeric_limits<float>::infinity();

  // NEVER where the mask forbids, `behind` behind the last.
  vf at(int64_t i, float behind) const { return allowed(i, raw(i, behind)); }

  vf allowed(int64_t i, vf x) const {
    if (!mask_.bits) return x;
    vu bit;
    for (int lane = 0; lane < LANES; ++lane) bit[lane] = 1u << lane;
    const vu set = bit & mask_.lanes(i);
    return set != 0 ? x : splat(NEVER);
  }

  vf raw(int64_t i, float behind) const {
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
  const Mask mask_;
  float peak_;
  bool sound_;
};

// Draws from rows that are truncated. One for each thread: it keeps 8 bytes for each token of a row, and as many for
// each of those that share a bin.
class Likeliest {
 public:
  // The first token whose cumulative mass exceeds u times that of the kept ones, likeliest first, lower ids first among
  // equals. `top_k`: the vocabulary's size when it is off; `top_p`: 1 when it is.
  int64_t draw(const LogitsRow& row, float temperature, int64_t top_k, double top_p, float min_p, double u) {
    weigh(row, temperature, min_p);
    int64_t kept = total_;
    if (top_k < row.vocab_) {
      const Place last = search(&Bin::count, top_k - 1);
      kept = last.before.mass + (top_k - last.before.count) * last.mass;
    }
    if (top_p < 1.0) {
      const int64_t reach = std::clamp<int64_t>(int64_t(std::ceil(top_p * double(kept))), 1, kept);
      const Place last = search(&Bin::mass, reach - 1);
      kept = std::min(kept, last.before.mass + (reach - last.before.mass + last.mass - 1) / last.mass * last.mass);
    }
    kept = std::min(kept, above_);
    const int64_t target = std::min(int64_t(u * double(kept)), kept - 1);
    const Place place = search(&Bin::mass, target);
    int64_t rank = (target - place.before.mass) / place.mass, token = 0;
    while (tokens_[token].key != place.key || rank-- > 0) ++token;
    return token;
  }

 private:
  struct Token {
    uint32_t key;  // the bits of its distance
    float weight;
  };
  struct Bin {
    int64_t count = 0, mass = 0;
  };
  // Those tokens that are equally likely, at least one, and each one's mass; `before` are all likelier ones.
  struct Place {
    uint32_t key;
    int64_t mass;
    Bin before;
  };

  static constexpr int LEVELS = 3, LOWEST[LEVELS] = {19, 9, 0}, WIDTH[LEVELS] = {12, 10, 9};  // 31 bits: no sign

  static int64_t mass_of(float weight) { return int64_t(weight * 0x1p44f); }

  static void put(std::vector<Bin>& bins, int level, const Token& token) {
    Bin& bin = bins[token.key >> LOWEST[level] & ((1u << WIDTH[level]) - 1)];
    ++bin.count;
    bin.mass += mass_of(token.weight);
  }

  void weigh(const LogitsRow& row, float temperature, float min_p) {
    tokens_.resize((row.vocab_ + LANES - 1) / LANES * LANES);
    bins_[0].assign(1 << WIDTH[0], Bin());
    total_ = above_ = 0;
    for (int64_t i = 0; i < row.vocab_; i += LANES) {
      const vf distance = (row.peak_ - row.at(i, row.peak_)) / temperature + 0.0f;  // no negative zero
      const vf weights = distance > 87.0f ? vf{} : exponential(-distance);
      const vu keys = (vu)distance;
      for (int lane = 0; lane < std::min<int64_t>(LANES, row.vocab_ - i); ++lane) {
        const Token token = tokens_[i + lane] = {keys[lane], weights[lane]};
        put(bins_[0], 0, token);
        const int64_t mass = mass_of(token.weight);
        total_ += mass;
        above_ += token.weight < min_p ? 0 : mass;
      }
    }
    tokens_.resize(row.vocab_);
  }

  // The place at which the sum of what `by` says of a bin exceeds the target, which is less than the whole sum. There
  // is some of it at the place.
  Place search(int64_t Bin::*by, int64_t target) {
    Place place{};
    for (int level = 0;; ++level) {
      std::vector<Bin>& bins = bins_[level];
      if (level) {
        bins.assign(1 << WIDTH[level], Bin());
        for (const Token& token : shared_) put(bins, level, token);
      }
      uint32_t at = 0;
      for (; place.before.*by + bins[at].*by <= target; ++at) {
        place.before.count += bins[at].count;
        place.before.mass += bins[at].mass;
      }
      place.key |= at << LOWEST[level];
      if (level == LEVELS - 1) {
        place.mass = bins[at].mass / bins[at].count;
        return place;
      }
      const std::vector<Token>& among = level ? shared_ : tokens_;
      narrowed_.clear();
      for (const Token& token : among)
        if (token.key >> LOWEST[level] == place.key >> LOWEST[level]) narrowed_.push_back(token);
      shared_.swap(narrowed_);
    }
  }

  std::vector<Token> tokens_, shared_, narrowed_;
  std::vector<Bin> bins_[LEVELS];
  int64_t total_ = 0, above_ = 0;
};

}  // namespace penstock
