// Products of bfloat16 by the processor's matrix unit (Intel's AMX), where a library is compiled for it.
//
// The unit has eight registers of 16 rows of 64 bytes. One instruction adds the product of 16 rows of 16 words
// with 16 words of 16 lanes to 16 rows of 16 sums, and panels already lie as it reads them. Two rows of
// registers by two columns make four sums of what four loads bring: the unit's rate, where one by one has half.
//
// Rows have the same bits in every batch here, too. A sum goes over blocks of 16 words in ascending order; in a block
// the first halves of the words are summed and the second halves are, and both sums are added (Intel's manual,
// TDPBF16PS). No row meets another, and words that are zero change nothing, so neither the number of rows nor
// the place within a block where a sum ends makes a difference. Denormal numbers count as zero.
//
// A panel's words come from memory when the first rows meet them. A load of a register is too much at once for
// the processor to look past it to the next, so they are asked for two blocks ahead: one row then reads 86 % of
// what two Sapphire Rapids cores can (tests/bench/results/kernels-2026-11-22.jsonl).
//
// A register's shape is part of the thread's state and costs time to set: `Tiles` remembers what
// it set, and clears it in the end, since other libraries use the unit in the same thread. Compilers do not
// know what the instructions read and write, hence the fences.
#pragma once

#include <cstddef>
#include <type_traits>

#include "simd.h"

namespace penstock {

#if defined(__AMX_BF16__)

constexpr int TILE = 16;  // rows, words, lanes
constexpr int64_t AHEAD = 2 * TILE * (2 * TILE);  // words of a panel

class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  ~Tiles() {
    if (set_) _tile_release();
  }

  // c [rows][ldc] (+)= a [rows][lda words] times b [words][ldb words], of which `lanes` are used.
  // `expand(k, count, to)` brings b where it is not made of words yet: words [k, k + count) of 2 * TILE lanes.
  template <class Expand = std::nullptr_t>
  void multiply(const uint32_t* a, int64_t lda, int64_t rows, const uint32_t* b, int64_t ldb, int64_t lanes,
                int64_t words, float* c, int64_t ldc, bool add, Expand expand = nullptr) {
    const int64_t whole = words / TILE * TILE;
    if (whole) strips(a, lda, rows, b, ldb, lanes, 0, whole, TILE, c, ldc, add, expand);
    if (words > whole) strips(a, lda, rows, b, ldb, lanes, whole, words, words - whole, c, ldc, add || whole, expand);
  }

 private:
  struct alignas(64) Shape {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };

  // Registers: 0-3 the sums (upper left, upper right, lower left, lower right), 4-5 rows of a, 6-7 words of b.
  void shape(int64_t upper, int64_t lower, int64_t words) {
    const int64_t wanted = (upper << 16) + (lower << 8) + words;
    if (set_ == wanted) return;
    Shape shape;
    for (int i = 0; i < 8; ++i) {
      shape.rows[i] = uint8_t(i >= 6 ? words : (i & 2 || i == 5) ? lower : upper);
      shape.row_bytes[i] = uint16_t(4 * (i == 4 || i == 5 ? words : TILE));
    }
    fence();
    _tile_loadconfig(&shape);
    set_ = wanted;
  }

  // All rows, in strips of at most two registers' height; words [k, end) by `step`.
  template <class Expand>
  void strips(const uint32_t* a, int64_t lda, int64_t rows, const uint32_t* b, int64_t ldb, int64_t lanes, int64_t k,
              int64_t end, int64_t step, float* c, int64_t ldc, bool add, Expand expand) {
    const bool in_order = std::is_null_pointer_v<Expand> && ldb == 2 * TILE;
    for (int64_t m = 0; m < rows;) {
      const bool fresh = in_order && m == 0;
      const int64_t left = rows - m, height = left < 2 * TILE ? left : 2 * TILE;
      if (height > TILE)
        shape(TILE, height - TILE, step);
      else
        shape(height, height, step);
      for (int64_t n = 0; n < lanes; n += 2 * TILE) {
        const bool right = n + TILE < lanes;
        const auto run = height > TILE ? (right ? &Tiles::sum<true, true, Expand> : &Tiles::sum<true, false, Expand>)
                                       : (right ? &Tiles::sum<false, true, Expand> : &Tiles::sum<false, false, Expand>);
        (this->*run)(a + m * lda, lda, b + n, ldb, k, end, step, fresh, c + m * ldc + n, ldc, add, expand);
      }
      m += height;
    }
  }

  template <bool LOWER, bool RIGHT, class Expand>
  void sum(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, int64_t k, int64_t end, int64_t step,
            bool fresh, float* c, int64_t ldc, bool add, Expand expand) {
    alignas(64) uint32_t room[TILE * 2 * TILE];
    float* below = c + TILE * ldc;
    fence();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (add) {
      _tile_loadd(0, c, ldc * 4);
      if (RIGHT) _tile_loadd(1, c + TILE, ldc * 4);
      if (LOWER) _tile_loadd(2, below, ldc * 4);
      if (LOWER && RIGHT) _tile_loadd(3, below + TILE, ldc * 4);
    }
    for (; k < end; k += step) {
      const uint32_t* from = b + k * ldb;
      int64_t pitch = ldb * 4;
      if constexpr (!std::is_null_pointer_v<Expand>) {
        expand(k, step, room);
        from = room;
        pitch = sizeof room / TILE;
        fence();
      }
      if (fresh)
        for (int line = 0; line < 2 * TILE; ++line) __builtin_prefetch(b + k * ldb + AHEAD + line * TILE);
      _tile_loadd(6, from, pitch);
      _tile_loadd(4, a + k, lda * 4);
      _tile_dpbf16ps(0, 4, 6);
      if (RIGHT) {
        _tile_loadd(7, from + TILE, pitch);
        _tile_dpbf16ps(1, 4, 7);
      }
      if (LOWER) {
        _tile_loadd(5, a + TILE * lda + k, lda * 4);
        _tile_dpbf16ps(2, 5, 6);
        if (RIGHT) _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, c, ldc * 4);
    if (RIGHT) _tile_stored(1, c + TILE, ldc * 4);
    if (LOWER) _tile_stored(2, below, ldc * 4);
    if (LOWER && RIGHT) _tile_stored(3, below + TILE, ldc * 4);
    fence();
  }

  static void fence() { asm volatile("" ::: "memory"); }

  int64_t set_ = 0;
};

#else

struct Tiles {  // no such unit
  template <class... Any>
  void multiply(Any&&...);  // never called
};

#endif

}  // namespace penstock
