// Vectors of one width, fixed when this file is compiled, and the two element types.
//
// Every source here is compiled once per instruction set (see build.py), each into a library of its own,
// so that nothing inlined for one processor is ever linked into the code for another.
//
// A *word* is 32 bits of an operand: one float, or two bfloat16 that follow each other along the summed
// dimension. `dot` adds the product of two words, lane by lane; all matrix code below is written in words.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace penstock {

#if defined(__AVX512F__)
constexpr int LANES = 16, TILE_ROWS = 12;  // 24 of 32 registers accumulate
#elif defined(__AVX2__)
constexpr int LANES = 8, TILE_ROWS = 6;  // 12 of 16
#else
constexpr int LANES = 4, TILE_ROWS = 4;
#endif

#if defined(__AMX_BF16__)
#define PENSTOCK_ISA "amx_bf16"
#elif defined(__AVX512BF16__)
#define PENSTOCK_ISA "avx512_bf16"
#elif defined(__AVX512VNNI__)
#define PENSTOCK_ISA "avx512_vnni"
#elif defined(__AVX512F__)
#define PENSTOCK_ISA "avx512"
#elif defined(__AVX2__)
#define PENSTOCK_ISA "avx2"
#else
#define PENSTOCK_ISA "portable"
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef uint16_t vw __attribute__((vector_size(4 * LANES)));
typedef int16_t vs __attribute__((vector_size(4 * LANES)));

template <class V>
inline V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
inline void store(void* to, V v) {
  std::memcpy(to, &v, sizeof v);
}

inline void prefetch(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i, 0, 2);
}

inline vf splat(float x) { return vf{} + x; }
inline vf larger(vf a, vf b) { return a > b ? a : b; }

// Across a vector, by quarters of 4 lanes and then within the quarter: always in the same order.
template <class Both>
inline float across(vf x, Both both) {
  typedef float v4 __attribute__((vector_size(16)));
  v4 part[LANES / 4];
  std::memcpy(part, &x, sizeof x);
  for (int i = 1; i < LANES / 4; ++i) part[0] = both(part[0], part[i]);
  return both(both(part[0][0], part[0][1]), both(part[0][2], part[0][3]));
}

inline float sum(vf x) {
  return across(x, [](auto a, auto b) { return a + b; });
}

inline float largest(vf x) {
  return across(x, [](auto a, auto b) { return a > b ? a : b; });
}

// Cephes' expf: 2 ulp where the result is a normal number; NaN stays NaN, below -87 it is about 1e-38.
inline vf exponential(vf x) {
  x = x < -87.0f ? splat(-87.0f) : x;
  x = x > 88.0f ? splat(88.0f) : x;
  const vf magic = splat(12582912.0f);  // adding 1.5 * 2^23 rounds to whole numbers
  const vf shifted = x * 1.44269504088896341f + magic;
  const vf n = shifted - magic;
  const vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vf p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const vi exponent = ((vi)shifted - (vi)magic) << 23;
  return (vf)((vi)p + exponent);
}

inline vf silu(vf x) { return x / (1.0f + exponential(-x)); }
inline vf sigmoid(vf x) { return 1.0f / (1.0f + exponential(-x)); }

// x / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) * (x + 0.044715 x^3) is x / (1 + exp(-2u)).
inline vf gelu_tanh(vf x) {
  return x / (1.0f + exponential(x * (-1.5957691216057308f - 0.07135481282563834f * (x * x))));
}

inline vf relu2(vf x) {
  const vf positive = x > 0.0f ? x : vf{};
  return positive * x;
}

// NaN stays NaN.
inline vf tanh_of(vf x) { return 2.0f / (1.0f + exponential(-2.0f * x)) - 1.0f; }

// int8 -> float. The first two are what GCC 12 does not find by itself.
inline vf whole(const int8_t* from) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  return vf{float(from[0]), float(from[1]), float(from[2]), float(from[3])};
#endif
}

struct Fp32 {
  using T = float;
  static constexpr int PER_WORD = 1;
  static constexpr bool APART = false;
  static vf widen_lanes(const T* from) { return load<vf>(from); }
  static vf dot(vf sum, vu a, vu b) { return sum + (vf)a * (vf)b; }
  static void narrow(T* to, vf x) { store(to, x); }
  static T narrow(float x) { return x; }
  static float widen(T x) { return x; }
  // int8 -> LANES words
  static vu expand(const int8_t* from, int) { return (vu)whole(from); }
};

struct Bf16 {
  using T = uint16_t;
  static constexpr int PER_WORD = 2;
#if defined(__AVX512BF16__)
  static constexpr bool APART = false;
#else
  static constexpr bool APART = true;  // the two products of a word are taken one by one, after widening both sides
#endif
  static vf dot(vf sum, vu a, vu b) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum += (vf)(a << 16) * (vf)(b << 16);
    return sum + (vf)(a & 0xffff0000u) * (vf)(b & 0xffff0000u);
#endif
  }
  static vf widen_lanes(const T* from) { return (vf)(__builtin_convertvector(load<vh>(from), vu) << 16); }
  static void narrow(T* to, vf x) {
#if defined(__AVX512BF16__)
    const __m256bh half = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(to, &half, sizeof half);
#else
    vu bits = (vu)x;
    bits = x == x ? (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16 : (bits >> 16) | 0x40u;  // to nearest, even
    store(to, __builtin_convertvector(bits, vh));
#endif
  }
  static T narrow(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return T(x == x ? (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16 : (bits >> 16) | 0x40u);
  }
  static float widen(T x) {
    const uint32_t bits = uint32_t(x) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  }
  // int8, first elements of the words, then `apart` bytes later the second ones -> LANES words.
  // Exact: bfloat16 holds every integer up to 256.
  static vu expand(const int8_t* from, int apart) {
    return ((vu)whole(from) >> 16) | (vu)whole(from + apart);
  }
};

// Lane by lane, the sum of two products of int16.
inline vi pairs(vs a, vs b) {
#if defined(__AVX512BW__)
  return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return ((vi)a << 16 >> 16) * ((vi)b << 16 >> 16) + ((vi)a >> 16) * ((vi)b >> 16);
#endif
}

// Adds the product of four unsigned bytes, a quad of weights, and four whole numbers, lane by lane (int8.h). Nothing
// saturates. `PARTS` words hold the activations of a quad, in their order; `PLACE` is where the weights' bytes lie.
//
// PENSTOCK_EMULATE_VNNI computes as VNNI does where there is none: for tests.
struct Int8 {
#if defined(__AVX512VNNI__) || defined(PENSTOCK_EMULATE_VNNI)
  using Activation = int8_t;
  typedef int8_t Activations __attribute__((vector_size(LANES)));
  static constexpr int PARTS = 1, LEVELS = 127, PLACE[4] = {0, 1, 2, 3};

  static vu part(vu weights, int) { return weights; }
  static vi dot(vi sum, vu x, vu weights) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)x);
#else
    const vs even = (vs)x << 8 >> 8, odd = (vs)x >> 8;
    return sum + pairs(even, (vs)(weights & 0x00ff00ffu)) + pairs(odd, (vs)(weights >> 8 & 0x00ff00ffu));
#endif
  }
#else
  using Activation = int16_t;
  typedef int16_t Activations __attribute__((vector_size(2 * LANES)));
  static constexpr int PARTS = 2, LEVELS = 32767, PLACE[4] = {0, 2, 1, 3};

  // The even bytes of each lane, or the odd ones.
  static vu part(vu weights, int which) { return which ? (vu)((vw)weights >> 8) : weights & 0x00ff00ffu; }
  static vi dot(vi sum, vu x, vu weights) {
    sum += pairs((vs)x, (vs)weights);
#if defined(__AVX2__) && !defined(__AVX512F__)
    asm("" : "+x"(sum));  // in a register: GCC's own order of products and sums needs more than there are
#endif
    return sum;
  }
#endif

  // Rows of a tile: beside the sums are two vectors of weights, one of activations and a product.
  static constexpr int TALLEST = LANES == 8 ? 5 : TILE_ROWS;
};

}  // namespace penstock
