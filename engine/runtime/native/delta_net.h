// The gated delta net (Yang et al. 2025): a layer that keeps a state for a sequence, instead of keys and values.
//
//     q, k, v = silu(convolved(inputs))              each channel by itself, over its latest tokens
//     S = S * kept                                   the head forgets: kept = exp(-rate * softplus(a + step bias))
//     S = S + k (sigmoid(b) * (v - S^T k))^T         then the state gives v for k
//     output = norm(S^T q) * silu(z)                 q and k of length one, and q over sqrt(key_dim)
//
// S [key_dim][value_dim] is a value head's state, in float32. A column of it knows nothing of the others, so a block
// of 32 columns goes through all tokens of a chunk while it lies in the first cache: memory sees a state once in a
// chunk. S is read once for a token: as it becomes the token's own, it is multiplied by this token's query and by the
// next one's key.
//
// Tokens are taken one after the other, and sums over key_dim in order, in one lane. So a sequence has the same bits
// in any chunks and in any company, verified drafts included. `carry_on` is compiled once, since two copies of its loop might fuse
// other products with sums.
#pragma once

#include <cmath>

#include "gemm.h"

namespace penstock {

struct DeltaShape {
  int64_t key_heads, value_heads, key_dim, value_dim, kernel;

  int64_t keys() const { return key_heads * key_dim; }
  int64_t values() const { return value_heads * value_dim; }
  int64_t channels() const { return 2 * keys() + values(); }
  int64_t group() const { return value_heads / key_heads; }
  int64_t outputs() const { return channels() + values() + 2 * value_heads; }  // of the layer's inputs: qkv, z, b, a
  int64_t state() const { return key_dim * value_dim; }
  int64_t past() const { return (kernel - 1) * channels(); }  // the convolution's
};

constexpr int64_t COLUMNS = 32;  // of a state at once: vectors enough that no sum waits for the one before
constexpr int WIDE = COLUMNS / LANES;
constexpr int64_t TAPS_MAX = 16;
constexpr float LENGTH_EPS = 1e-6f, SOFTPLUS_LINEAR = 20.0f;

inline float softplus(float x) { return x > SOFTPLUS_LINEAR ? x : std::log1p(std::exp(x)); }
inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// The channels [first, first + count) of the convolution. `taps`: the inputs of the latest `kernel` tokens, the
// oldest first. weights [kernel][channels].
template <class E>
void convolve(const DeltaShape& s, const typename E::T* const* taps, const float* weights, int64_t first,
              int64_t count, float* out) {
  for (int64_t d = first; d < first + count; d += LANES) {
    vf total{};
    for (int64_t tap = 0; tap < s.kernel; ++tap)
      total += E::widen_lanes(taps[tap] + d) * load<vf>(weights + tap * s.channels() + d);
    store(out + d, silu(total));
  }
}

// x [dim] times `scale`, of length one.
inline void of_length_one(float* x, int64_t dim, float scale) {
  vf squares{};
  for (int64_t d = 0; d < dim; d += LANES) squares += load<vf>(x + d) * load<vf>(x + d);
  const float factor = scale / std::sqrt(sum(squares) + LENGTH_EPS);
  for (int64_t d = 0; d < dim; d += LANES) store(x + d, load<vf>(x + d) * factor);
}

// A block of a head's state, over tokens that lie `stride` apart: keys, queries and values of each. kept, strength:
// of each token, `heads` apart. out: [tokens][out_stride], of which `width` elements are written.
struct DeltaTokens {
  int64_t count, stride, heads, out_stride, width;
  const float *q, *k, *v, *kept, *strength;
  float* out;

  DeltaTokens only(int64_t t) const {
    return {1, stride, heads, out_stride, width, q + t * stride, k + t * stride, v + t * stride, kept + t * heads,
            strength + t * heads, out + t * out_stride};
  }
};

// Where a head's states lie, `pitch` apart. A row goes on from one, which becomes that of its last token; a row that
// verifies leaves the state behind each of its tokens at a place of its own instead.
struct DeltaPlaces {
  float* states;
  int64_t pitch, from;
  const int64_t* behind;  // of each token, or null

  float* at(int64_t place) const { return states + place * pitch; }
};

[[gnu::noinline, gnu::noclone]] inline void carry_on(float* state, int64_t pitch, int64_t dim,
                                                     const DeltaTokens& tokens) {
  vf given[WIDE] = {};  // what the state has for the token's key
  for (int64_t i = 0; i < dim; ++i)
    for (int n = 0; n < WIDE; ++n) given[n] += load<vf>(state + i * pitch + n * LANES) * tokens.k[i];
  for (int64_t t = 0; t < tokens.count; ++t) {
    const float* k = tokens.k + t * tokens.stride;
    const float* q = tokens.q + t * tokens.stride;
    const float* next = t + 1 < tokens.count ? k + tokens.stride : k;
    prefetch(k + 2 * tokens.stride, dim * sizeof(float));  // tokens lie too far apart for the processor to see it
    prefetch(q + tokens.stride, dim * sizeof(float));
    prefetch(tokens.v + (t + 1) * tokens.stride, COLUMNS * sizeof(float));
    const float kept = tokens.kept[t * tokens.heads], strength = tokens.strength[t * tokens.heads];
    vf change[WIDE], seen[WIDE] = {}, ahead[WIDE] = {};
    for (int n = 0; n < WIDE; ++n)
      change[n] = (load<vf>(tokens.v + t * tokens.stride + n * LANES) - given[n] * kept) * strength;
    for (int64_t i = 0; i < dim; ++i) {
      const float key = k[i], query = q[i], following = next[i];
#pragma GCC unroll 8
      for (int n = 0; n < WIDE; ++n) {
        float* at = state + i * pitch + n * LANES;
        const vf s = load<vf>(at) * kept + change[n] * key;
        store(at, s);
        seen[n] += s * query;
        ahead[n] += s * following;
      }
    }
    float y[COLUMNS];
    for (int n = 0; n < WIDE; ++n) {
      store(y + n * LANES, seen[n]);
      given[n] = ahead[n];
    }
    std::memcpy(tokens.out + t * tokens.out_stride, y, tokens.width * sizeof(float));
  }
}

inline void put_back(const DeltaShape& s, const float* block, int64_t width, float* state) {
  for (int64_t i = 0; i < s.key_dim; ++i)
    std::memcpy(state + i * s.value_dim, block + i * COLUMNS, width * sizeof(float));
}

// 32 columns of a head's state [key_dim][value_dim], or fewer. `block`: room for them, [key_dim][32].
inline void recur(const DeltaShape& s, const DeltaPlaces& places, float* block, const DeltaTokens& tokens) {
  float* state = places.at(places.from);
  if (tokens.count == 1 && tokens.width == COLUMNS) return carry_on(state, s.value_dim, s.key_dim, tokens);
  for (int64_t i = 0; i < s.key_dim; ++i) {
    std::memset(block + i * COLUMNS, 0, sizeof(float) * COLUMNS);
    std::memcpy(block + i * COLUMNS, state + i * s.value_dim, tokens.width * sizeof(float));
  }
  if (!places.behind) {
    carry_on(block, COLUMNS, s.key_dim, tokens);
    return put_back(s, block, tokens.width, state);
  }
  for (int64_t t = 0; t < tokens.count; ++t) {
    carry_on(block, COLUMNS, s.key_dim, tokens.only(t));
    put_back(s, block, tokens.width, places.at(places.behind[t]));
  }
}

}  // namespace penstock
