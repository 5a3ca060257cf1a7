// Products of small rows with packed weights: y[m][n] = sum over k of a[m][k] * b[k][n].
//
// The right-hand operand lies in panels of 32 outputs, [panel][word][32]; the left-hand one in plain rows.
// A tile of 2 * TILE_ROWS vectors at most is summed in registers while a word of each row is spread over a
// vector. One row streams the weights at the memory's speed, a tile's worth of rows keeps the multipliers
// busy, and there is nothing in between to tune.
//
// Where there is no instruction for a word of two elements, `tile` widens both sides again for each tile, which takes
// a third of its time: so many rows are widened once, and a block of a panel once for all of them.
//
// Every output is summed over k in order in one lane, whatever the number of rows. So a row's result does
// not depend, to the bit, on the rest of its batch. Where there is a matrix unit for the element type, it does
// all of this instead (tiles.h), whatever the number of rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <new>
#include <utility>
#include <sys/mman.h>

#include "tiles.h"

namespace penstock {

constexpr int PANEL = 32;
static_assert(PANEL % (2 * LANES) == 0);

#if defined(__AMX_BF16__)
template <class E>
constexpr bool BY_TILES = E::PER_WORD == 2;
#else
template <class E>
constexpr bool BY_TILES = false;
#endif
// Rows that meet a panel at once.
template <class E>
constexpr int ROWS_AT_ONCE = BY_TILES<E> ? 32 : TILE_ROWS;

template <class E, int M, int N>
void tile(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, int64_t words, float* c, int64_t ldc,
          bool add) {
  vf acc[M][N];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[m][n] = add ? load<vf>(c + m * ldc + n * LANES) : vf{};
  for (int64_t k = 0; k < words; ++k) {
    vu column[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) column[n] = load<vu>(b + k * ldb + n * LANES);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const vu x = vu{} + a[m * lda + k];
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[m][n] = E::dot(acc[m][n], x, column[n]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) store(c + m * ldc + n * LANES, acc[m][n]);
}

template <class E>
struct WordTiles {
  using Tile = void (*)(const uint32_t*, int64_t, const uint32_t*, int64_t, int64_t, float*, int64_t, bool);
  template <int M, int N>
  static constexpr Tile OF = tile<E, M, N>;
  static constexpr int ROWS = TILE_ROWS;
};

constexpr int WIDEST = 8;  // vectors of a tile
// Rows of a tile that is n vectors wide: its sums fill 2 * ROWS registers.
template <class Family>
constexpr int tallest(int n) {
  return n <= 2 ? Family::ROWS : 2 * Family::ROWS / n;
}

template <class Family, int N, int... M>
typename Family::Tile tile_of(int64_t rows, std::integer_sequence<int, M...>) {
  static constexpr typename Family::Tile tiles[] = {Family::template OF<M + 1, N>...};
  return tiles[rows - 1];
}

// The widest tile of so many rows, and how many of the lanes it takes.
template <class Family, int N = WIDEST>
typename Family::Tile widest(int64_t rows, int64_t lanes, int64_t& width) {
  if constexpr (N > 1)
    if (rows > tallest<Family>(N) || lanes < N * LANES) return widest<Family, N / 2>(rows, lanes, width);
  width = N * LANES;
  return tile_of<Family, N>(rows, std::make_integer_sequence<int, tallest<Family>(N)>());
}

// a [rows][lda words], b [words][ldb words] of which `lanes` are used (a multiple of LANES), c [rows][ldc].
//
// Few rows are a matter of reading b, which goes best in the order in which it lies: hence wide tiles.
template <class E>
void gemm(const uint32_t* a, int64_t lda, int64_t rows, const uint32_t* b, int64_t ldb, int64_t lanes,
          int64_t words, float* c, int64_t ldc, bool add, Tiles& unit) {
  if constexpr (BY_TILES<E>) {
    unit.multiply(a, lda, rows, b, ldb, lanes, words, c, ldc, add);
  } else {
    const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t m = rows * i / tiles, count = rows * (i + 1) / tiles - m;
      for (int64_t n = 0, width; n < lanes; n += width) {
        const auto run = widest<WordTiles<E>>(count, lanes - n, width);
        run(a + m * lda, lda, b + n, ldb, words, c + m * ldc + n, ldc, add);
      }
    }
  }
}

// As `gemm`, of a panel and rows that are widened already: x [rows][2 * words]. A block of two vectors of the panel
// stays in the first cache while all rows meet it. The products of a word are added in the order in which `dot` adds
// them.
constexpr int64_t WIDENED_WORDS = 1024 / LANES;  // of a block, which has 16 KiB

inline void multiply_widened(const float* x, int64_t rows, const uint32_t* panel, int64_t words, float* c, Tiles& unit) {
  constexpr int64_t wide = 2 * LANES;
  alignas(64) uint32_t block[2 * WIDENED_WORDS * wide];
  for (int64_t k = 0; k < words; k += WIDENED_WORDS) {
    const int64_t count = std::min(WIDENED_WORDS, words - k);
    for (int64_t n = 0; n < PANEL; n += wide) {
      for (int64_t i = 0; i < count; ++i)
        for (int64_t lane = 0; lane < wide; lane += LANES) {
          const vu word = load<vu>(panel + (k + i) * PANEL + n + lane);
          store(block + 2 * i * wide + lane, word << 16);
          store(block + (2 * i + 1) * wide + lane, word & 0xffff0000u);
        }
      const uint32_t* a = reinterpret_cast<const uint32_t*>(x) + 2 * k;
      gemm<Fp32>(a, 2 * words, rows, block, wide, wide, 2 * count, c + n, PANEL, k > 0, unit);
    }
  }
}

// Memory in huge pages where the system gives them; uninitialised.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t count) { reserve(count); }
  ~Buffer() { std::free(data_); }
  Buffer(Buffer&& other) noexcept : data_(other.data_), count_(other.count_) { other.data_ = nullptr; }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }

  void reserve(size_t count) {  // what it held is lost when it grows
    if (count <= count_) return;
    std::free(std::exchange(data_, nullptr));
    count_ = 0;
    const size_t align = count * sizeof(T) >= HUGE ? HUGE : 64;
    const size_t bytes = (count * sizeof(T) + align - 1) / align * align;
    data_ = static_cast<T*>(std::aligned_alloc(align, bytes));
    if (!data_) throw std::bad_alloc();
    if (align == HUGE) madvise(data_, bytes, MADV_HUGEPAGE);
    count_ = count;
  }

  T* get() const { return data_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  static constexpr size_t HUGE = 2 << 20;
  T* data_ = nullptr;
  size_t count_ = 0;
};

// y = x W^T + b. Weights are words of E, or int8 with a scale per output: quads plus 128 (int8.h), or, for a
// matrix unit, [panel][word][element of the word][32], which are spread to words when they are used.
struct Linear {
  int64_t outputs = 0, words = 0, panels = 0;
  Buffer<uint32_t> weights;
  Buffer<uint8_t> quantised;
  Buffer<float> scale, bias;

  int64_t panel_bytes(int per_word) const { return words * PANEL * (quantised ? per_word : 4); }
};

// The row of W that lies in a lane of a panel. A pair of matrices is dealt out in turns of LANES, so that
// element i of the one and of the other are in the two vectors of one tile.
inline int64_t row_of(int64_t place, int64_t outputs, bool paired) {
  if (!paired) return place;
  const int64_t turn = place / LANES;
  return turn / 2 * LANES + place % LANES + (turn % 2 ? outputs / 2 : 0);
}

template <class E>
void pack_panel(Linear& linear, const typename E::T* w, int64_t panel, bool paired) {
  constexpr int per_word = E::PER_WORD;
  const int64_t columns = linear.words * per_word;
  for (int lane = 0; lane < PANEL; ++lane) {
    const int64_t place = panel * PANEL + lane, row = row_of(place, linear.outputs, paired);
    const typename E::T* from = place < linear.outputs ? w + row * columns : nullptr;
    if (linear.quantised) {
      float peak = 0.0f;
      for (int64_t k = 0; from && k < columns; ++k) peak = std::fmax(peak, std::fabs(E::widen(from[k])));
      linear.scale.get()[place] = peak / 127.0f;
      const float inverse = peak > 0.0f ? 127.0f / peak : 0.0f;
      uint8_t* to = linear.quantised.get() + panel * columns * PANEL;
      for (int64_t k = 0; k < columns; ++k) {
        const int q = from ? int(std::lrint(E::widen(from[k]) * inverse)) : 0;
        if constexpr (BY_TILES<E>)
          to[k * PANEL + lane] = uint8_t(q);
        else
          to[(k / 4 * PANEL + lane) * 4 + Int8::PLACE[k % 4]] = uint8_t(q + 128);
      }
    } else {
      uint32_t* to = linear.weights.get() + panel * linear.words * PANEL + lane;
      for (int64_t k = 0; k < linear.words; ++k) {
        to[k * PANEL] = 0;
        if (from) std::memcpy(to + k * PANEL, from + k * per_word, 4);
      }
    }
  }
}

// c [rows][32] = a [rows][words] times a panel of words, or of bytes that are spread to words in passing where
// they meet all rows once, and into `room` [words][32] where they would be spread again.
template <class E>
void multiply_panel(const Linear& w, int64_t panel, const uint32_t* a, int64_t rows, float* c, uint32_t* room,
                    Tiles& unit) {
  const uint32_t* words = w.weights.get() + panel * w.words * PANEL;
  if constexpr (BY_TILES<E>) {
    const int8_t* from = reinterpret_cast<const int8_t*>(w.quantised.get()) + panel * w.words * E::PER_WORD * PANEL;
    const auto spread = [from](int64_t k, int64_t count, uint32_t* to) {
      for (int64_t i = 0; i < count; ++i)
        for (int n = 0; n < PANEL; n += LANES)
          store(to + i * PANEL + n, E::expand(from + (k + i) * E::PER_WORD * PANEL + n, PANEL));
    };
    if (w.quantised && rows <= ROWS_AT_ONCE<E>)
      return unit.multiply(a, w.words, rows, nullptr, PANEL, PANEL, w.words, c, PANEL, false, spread);
    if (w.quantised) {
      spread(0, w.words, room);
      words = room;
    }
  }
  gemm<E>(a, w.words, rows, words, PANEL, PANEL, w.words, c, PANEL, false, unit);
}

}  // namespace penstock
