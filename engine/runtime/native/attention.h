// Attention over paged keys and values, for decode and for prefill alike.
//
// A page of one head is a tile that the products read as it lies:
//   keys    [word of the head][token of the page]      what q is multiplied with
//   values  [word of tokens][element of the head]      what the weights are multiplied with
// (for bfloat16, a word of values is tokens 2i and 2i + 1). The size is that of any other order, so pages
// are copied, swapped and shared without anyone knowing.
//
// A block of queries goes over the pages once (Milakov and Gimelshein 2018; Dao et al. 2022): per page the
// scores, the running maximum, the weights, the weighted values. Pages are taken in order, so a query's
// result is the same to the bit, whether it comes alone, in a chunk or in a batch.
//
// What lies behind a row's last token may be anything, NaN included: its scores are masked, its values
// are left out of the sum, and the second half of a word of values is zeroed when the first is written.
#pragma once

#include "gemm.h"

namespace penstock {

constexpr int64_t QUERY_ROWS = 48;  // tokens times heads of the group, at least one token

struct AttentionShape {
  int64_t heads, kv_heads, head_dim, page_size;
  float scale;

  int64_t group() const { return heads / kv_heads; }
  int64_t block_tokens() const { return group() < QUERY_ROWS ? QUERY_ROWS / group() : 1; }
  int64_t block_rows() const { return block_tokens() * group(); }
  int64_t tile_elements() const { return page_size * head_dim; }  // of one head in one page
};

// Consecutive tokens of one row: `count` from `position` on, at `token` of the step.
struct Span {
  const int32_t* table;  // the row's pages
  int64_t position, token, count;
  int64_t earlier, later;  // tokens of the row that this step has before and after these
  int64_t state;          // the row's, where a model has them
  const int64_t* behind;  // where a row that verifies leaves the state behind each of its tokens, or null
};

template <class E>
struct AttentionScratch {
  Buffer<typename E::T> q, weights;
  Buffer<float> scores, sums, peak, total;

  explicit AttentionScratch(const AttentionShape& s)
      : q(s.block_rows() * s.head_dim),
        weights(s.block_rows() * s.page_size),
        scores(s.block_rows() * s.page_size),
        sums(s.block_rows() * s.head_dim),
        peak(s.block_rows()),
        total(s.block_rows()) {}
};

template <class E>
void write_key(const AttentionShape& s, typename E::T* tile, int64_t offset, const float* key) {
  constexpr int per_word = E::PER_WORD;
  for (int64_t d = 0; d < s.head_dim; ++d)
    tile[(d / per_word * s.page_size + offset) * per_word + d % per_word] = E::narrow(key[d]);
}

// `next`: the value of the token after, where this step has it; the second half of a word needs no writing then.
template <class E>
void write_value(const AttentionShape& s, typename E::T* tile, int64_t offset, const float* value, const float* next) {
  constexpr int per_word = E::PER_WORD;
  typename E::T* to = tile + offset / per_word * s.head_dim * per_word + offset % per_word;
  for (int64_t d = 0; d < s.head_dim; ++d) to[d * per_word] = E::narrow(value[d]);
  if (per_word == 1 || offset % 2) return;
  for (int64_t d = 0; d < s.head_dim; ++d) to[d * per_word + 1] = next ? E::narrow(next[d]) : typename E::T(0);
}

// Scores of one query against a page -> weights; the sums so far are scaled to the new maximum.
// Keys [first, end) of the page are seen; `width` scores were computed, a multiple of LANES.
template <class E>
void softmax_page(const AttentionShape& s, float* scores, typename E::T* weights, int64_t first, int64_t end,
                  int64_t width, float scale, float& peak, float& total, float* sums) {
  static const vi iota = [] {
    vi lanes{};
    for (int i = 0; i < LANES; ++i) lanes[i] = i;
    return lanes;
  }();
  vf best = splat(peak);
  for (int64_t n = 0; n < width; n += LANES) {
    const vi lane = iota + int32_t(n);
    const vf score = load<vf>(scores + n) * scale;
    const vf seen = (lane >= int32_t(first)) & (lane < int32_t(end)) ? score : splat(-1e30f);
    store(scores + n, seen);
    best = seen <= best ? best : seen;  // NaN wins, and is found in the end
  }
  const float now = largest(best);
  vf added{};
  for (int64_t n = 0; n < width; n += LANES) {
    const vf score = load<vf>(scores + n);
    const vf weight = score == -1e30f ? vf{} : exponential(score - now);
    added += weight;
    E::narrow(weights + n, weight);
  }
  if (now != peak) {
    const vf keep = exponential(splat(peak - now));
    for (int64_t d = 0; d < s.head_dim; d += LANES) store(sums + d, load<vf>(sums + d) * keep);
    total *= keep[0];
    peak = now;
  }
  total += sum(added);
}

// q, out [T][heads * head_dim]; keys, values: one layer's pages [page][kv_head][tile].
// `window`: how many of the latest tokens a token sees, itself included; 0 for all.
// gates: null, or [T][gates_stride], whose sigmoids the results are multiplied by, as wide as these.
template <class E>
void attend(const AttentionShape& s, const Span& span, int64_t kv_head, int64_t window,
            const typename E::T* q, const typename E::T* keys, const typename E::T* values, const float* gates,
            int64_t gates_stride, typename E::T* out, AttentionScratch<E>& own) {
  using T = typename E::T;
  constexpr int per_word = E::PER_WORD;
  const int64_t dim = s.head_dim, size = s.page_size, group = s.group(), rows = span.count * group;
  const auto words = [](const T* at) { return reinterpret_cast<const uint32_t*>(at); };
  const auto place = [&](int64_t row) {
    return ((span.token + row / group) * s.heads + kv_head * group + row % group) * dim;
  };
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(own.q.get() + row * dim, q + place(row), dim * sizeof(T));
    std::memset(own.sums.get() + row * dim, 0, dim * sizeof(float));
    own.peak.get()[row] = -1e30f;
    own.total.get()[row] = 0.0f;
  }
  Tiles unit;
  const int64_t end = span.position + span.count;
  // A decode's time is that of reading pages, and a page is too short for the processor to see it coming:
  // asking for a tile while the one before is used reads 27 GB/s instead of 19 on two Zen 4 cores.
  const bool brief = rows <= 2 * TILE_ROWS;
  const int64_t start = window && span.position >= window ? span.position - window + 1 : 0;
  for (int64_t page = start / size; page * size < end; ++page) {
    const int64_t base = page * size, seen = end - base < size ? end - base : size;
    const int64_t width = (seen + 15) / 16 * 16;
    const int64_t at = (span.table[page] * s.kv_heads + kv_head) * s.tile_elements();
    if (brief) prefetch(values + at, seen * dim * sizeof(T));
    gemm<E>(words(own.q.get()), dim / per_word, rows, words(keys + at), size, width, dim / per_word,
            own.scores.get(), size, false, unit);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t position = span.position + row / group;
      softmax_page<E>(s, own.scores.get() + row * size, own.weights.get() + row * size,
                      window ? position - window + 1 - base : 0, position + 1 - base, width, s.scale,
                      own.peak.get()[row], own.total.get()[row], own.sums.get() + row * dim);
    }
    if (brief && base + size < end)
      prefetch(keys + (span.table[page + 1] * s.kv_heads + kv_head) * s.tile_elements(), s.tile_elements() * sizeof(T));
    gemm<E>(words(own.weights.get()), size / per_word, rows, words(values + at), dim, dim,
            (seen + per_word - 1) / per_word, own.sums.get(), dim, true, unit);
  }
  for (int64_t row = 0; row < rows; ++row) {
    const float* sums = own.sums.get() + row * dim;
    const float* gate = gates + (span.token + row / group) * gates_stride + (kv_head * group + row % group) * dim;
    for (int64_t d = 0; d < dim; d += LANES) {
      const vf attended = load<vf>(sums + d) / own.total.get()[row];
      E::narrow(out + place(row) + d, gates ? attended * sigmoid(load<vf>(gate + d)) : attended);
    }
  }
}

}  // namespace penstock
