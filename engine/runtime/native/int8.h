// Products of small rows with int8 weights, in whole numbers.
//
// A weight is a byte with a scale per output. A row of activations is quantised when it is multiplied: whole numbers
// with a scale for every GROUP of them along k, symmetric, so that one huge element costs its own group precision
// and nobody else. Sums of a group are whole numbers, hence exact in any order; those of the groups are added in
// float32, in order, in one lane. So a row's bits do not depend on its batch, as in gemm.h, and one row is
// computed as many are.
//
// Panels are [quad of k][32 outputs][4]. Bytes are the weights plus 128, as the processors' instructions want one
// operand unsigned; a group's sum therefore begins at -128 times that of its activations. How many bits an
// activation has is the instruction set's matter (`Int8` in simd.h): 8 where one instruction sums four products
// of bytes (VNNI), which doubles bfloat16's rate, and 16 elsewhere, which costs what 8 would and rounds less.
//
// Where a matrix unit multiplies bfloat16 (tiles.h), int8 weights are spread to that instead. Its own products
// of bytes would have to leave the unit after each group to be scaled, at the cost of the product.
#pragma once

#include <algorithm>
#include <limits>

#include "gemm.h"

namespace penstock {

constexpr int64_t GROUP = 128, GROUP_QUADS = GROUP / 4;
constexpr int64_t BLOCK_GROUPS = 4;  // of a panel, 16 KiB, which all rows meet while it is in the first cache

// Rows of activations as whole numbers.
class Quants {
 public:
  void reserve(int64_t rows, int64_t columns) {
    quads_ = columns / 4;
    groups_ = (columns + GROUP - 1) / GROUP;
    words_.reserve(rows * quads_ * Int8::PARTS);
    scale_.reserve(rows * groups_);
    start_.reserve(rows * groups_);
  }

  // What is not finite makes its group's scale NaN, and so the row's products.
  template <class E>
  void set(int64_t row, const typename E::T* x) {
    auto* to = reinterpret_cast<Int8::Activation*>(words_.get() + row * quads_ * Int8::PARTS);
    for (int64_t g = 0; g < groups_; ++g) {
      const int64_t first = g * GROUP, end = std::min(first + GROUP, quads_ * 4);
      vi peaks{};  // bits of floats that are not negative are ordered as these are, and NaN is the greatest
      for (int64_t k = first; k < end; k += LANES) {
        const vi size = (vi)E::widen_lanes(x + k) & 0x7fffffff;
        peaks = size > peaks ? size : peaks;
      }
      int32_t bits = 0;
      for (int lane = 0; lane < LANES; ++lane) bits = std::max<int32_t>(bits, peaks[lane]);
      float peak;
      std::memcpy(&peak, &bits, sizeof peak);
      const bool sound = peak <= std::numeric_limits<float>::max();
      const float scale = peak / Int8::LEVELS;
      const float inverse = sound && scale >= std::numeric_limits<float>::min() ? Int8::LEVELS / peak : 0.0f;
      vi sums{};
      for (int64_t k = first; k < end; k += LANES) {
        const vf magic = splat(12582912.0f);  // adding 1.5 * 2^23 rounds to whole numbers
        const vi whole = (vi)(E::widen_lanes(x + k) * inverse + magic) - (vi)magic;
        sums += sound ? whole : vi{};
        store(to + k, __builtin_convertvector(sound ? whole : vi{}, Int8::Activations));
      }
      int32_t total = 0;
      for (int lane = 0; lane < LANES; ++lane) total += sums[lane];
      scale_.get()[row * groups_ + g] = sound ? scale : std::numeric_limits<float>::quiet_NaN();
      start_.get()[row * groups_ + g] = -128 * total;
    }
  }

  int64_t quads() const { return quads_; }
  int64_t groups() const { return groups_; }
  const uint32_t* words(int64_t row) const { return words_.get() + row * quads_ * Int8::PARTS; }
  const float* scale(int64_t row) const { return scale_.get() + row * groups_; }
  const int32_t* start(int64_t row) const { return start_.get() + row * groups_; }

 private:
  int64_t quads_ = 0, groups_ = 0;
  Buffer<uint32_t> words_;
  Buffer<float> scale_;
  Buffer<int32_t> start_;
};

// Adds groups [group, end) of rows [row, row + M) times N vectors of outputs to c [M][PANEL].
template <int M, int N>
void int8_tile(const Quants& a, int64_t row, int64_t group, int64_t end, const uint32_t* b, float* c) {
  const uint32_t* words = a.words(row);
  const int64_t stride = a.quads() * Int8::PARTS, groups = a.groups();
  const float* scale = a.scale(row);
  const int32_t* start = a.start(row);
  for (; group < end; ++group) {
    vi acc[M][N];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[m][n] = vi{} + start[m * groups + group];
    const int64_t last = std::min((group + 1) * GROUP_QUADS, a.quads());
    for (int64_t quad = group * GROUP_QUADS; quad < last; ++quad) {
#pragma GCC unroll 2
      for (int part = 0; part < Int8::PARTS; ++part) {
        vu column[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) column[n] = Int8::part(load<vu>(b + quad * PANEL + n * LANES), part);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          const vu x = vu{} + words[m * stride + quad * Int8::PARTS + part];
#pragma GCC unroll 8
          for (int n = 0; n < N; ++n) acc[m][n] = Int8::dot(acc[m][n], x, column[n]);
        }
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        float* to = c + m * PANEL + n * LANES;
        store(to, load<vf>(to) + __builtin_convertvector(acc[m][n], vf) * scale[m * groups + group]);
      }
    asm volatile("" ::: "memory");  // or the compiler keeps c in registers, and the sums of a group outside
  }
}

struct Int8Tiles {
  using Tile = void (*)(const Quants&, int64_t, int64_t, int64_t, const uint32_t*, float*);
  template <int M, int N>
  static constexpr Tile OF = int8_tile<M, N>;
  static constexpr int ROWS = Int8::TALLEST;
};

// c [rows][PANEL] = rows [first, first + rows) times a panel.
inline void multiply_int8(const Quants& a, int64_t first, int64_t rows, const uint32_t* b, float* c) {
  std::memset(c, 0, rows * PANEL * sizeof(float));
  const int64_t tiles = (rows + Int8Tiles::ROWS - 1) / Int8Tiles::ROWS, block = tiles > 1 ? BLOCK_GROUPS : a.groups();
  for (int64_t group = 0; group < a.groups(); group += block) {
    const int64_t end = std::min(group + block, a.groups());
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t m = rows * i / tiles, count = rows * (i + 1) / tiles - m;
      for (int64_t n = 0, width; n < PANEL; n += width) {
        const auto run = widest<Int8Tiles>(count, PANEL - n, width);
        run(a, first + m, group, end, b + n, c + m * PANEL + n);
      }
    }
  }
}

}  // namespace penstock
