// AVX-512 with VNNI and BF16: a block is up to 8 rows by 32 columns, in 16 registers.

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace {

#include "lanes_avx512.inc"
#include "groups.inc"
#include "groups_avx512.inc"
#include "attention_avx512.inc"

constexpr int64_t kBlockRows = 8;
constexpr bool kCanContinue = false;

struct ThreadState {
  explicit ThreadState(int64_t = 0) {}
};
struct AttentionState {};

// Whether a block prefetches weights: for one row alone the processor does that itself.
constexpr bool asks(bool is_first, int rows) { return is_first && rows > 1; }

// The instruction multiplies unsigned by signed bytes: activations are shifted up by 128 here, and
// 128 times the weights' sum is subtracted.
template <int kRows, bool kAsks>
[[gnu::noinline]] void rows_int8(const char* a, const char* tile0, const char* tile1, int64_t bytes, const int32_t* sums, int32_t* c) {
  __m512i acc[kRows][2];
  for (int row = 0; row < kRows; ++row) acc[row][0] = acc[row][1] = _mm512_setzero_si512();
  for (int64_t chunk = 0; chunk < bytes; chunk += 64, a += 1024) {
    const int64_t ahead = ahead_of(chunk * 16, bytes * 16);
    for (int64_t at = 0; at < 64; at += 4, tile0 += 64, tile1 += 64) {
      if (kAsks) ask(tile0 + ahead), ask(tile1 + ahead);
      const __m512i b0 = _mm512_load_si512(tile0), b1 = _mm512_load_si512(tile1);
      for (int row = 0; row < kRows; ++row) {
        const __m512i x = everywhere(a + row * 64 + at);
        acc[row][0] = dot_bytes(acc[row][0], x, b0);
        acc[row][1] = dot_bytes(acc[row][1], x, b1);
      }
    }
  }
  const __m512i over0 = _mm512_slli_epi32(_mm512_loadu_si512(sums), 7), over1 = _mm512_slli_epi32(_mm512_loadu_si512(sums + 16), 7);
  for (int row = 0; row < kRows; ++row) {
    _mm512_store_si512(c + row * 32, _mm512_sub_epi32(acc[row][0], over0));
    _mm512_store_si512(c + row * 32 + 16, _mm512_sub_epi32(acc[row][1], over1));
  }
}

template <int kRows, bool kAsks>
[[gnu::noinline]] void rows_bf16(const char* a, const char* tile0, const char* tile1, int64_t bytes, float* c) {
  __m512 acc[kRows][2];
  for (int row = 0; row < kRows; ++row) acc[row][0] = acc[row][1] = _mm512_setzero_ps();
  for (int64_t chunk = 0; chunk < bytes; chunk += 64, a += 1024) {
    const int64_t ahead = ahead_of(chunk * 16, bytes * 16);
    for (int64_t at = 0; at < 64; at += 4, tile0 += 64, tile1 += 64) {
      if (kAsks) ask(tile0 + ahead), ask(tile1 + ahead);
      const __m512bh b0 = (__m512bh)_mm512_load_si512(tile0), b1 = (__m512bh)_mm512_load_si512(tile1);
      for (int row = 0; row < kRows; ++row) {
        const __m512bh x = (__m512bh)everywhere(a + row * 64 + at);
        acc[row][0] = _mm512_dpbf16_ps(acc[row][0], x, b0);
        acc[row][1] = _mm512_dpbf16_ps(acc[row][1], x, b1);
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    _mm512_store_ps(c + row * 32, acc[row][0]);
    _mm512_store_ps(c + row * 32 + 16, acc[row][1]);
  }
}

template <typename Between>
inline void block_int8(const char* a, int64_t, const char* tile0, const char* tile1, int64_t bytes, int64_t rows, const int32_t* sums, int32_t* c, bool is_first, bool,
                       Between&&) {
#define CALL(kRows) asks(is_first, kRows) ? rows_int8<kRows, true>(a, tile0, tile1, bytes, sums, c) : rows_int8<kRows, false>(a, tile0, tile1, bytes, sums, c)
  PENSTOCK_BY_ROWS(CALL)
#undef CALL
}

template <typename Between>
inline void block_bf16(const char* a, int64_t, const char* tile0, const char* tile1, int64_t bytes, int64_t rows, float* c, bool is_first, bool, Between&&) {
#define CALL(kRows) asks(is_first, kRows) ? rows_bf16<kRows, true>(a, tile0, tile1, bytes, c) : rows_bf16<kRows, false>(a, tile0, tile1, bytes, c)
  PENSTOCK_BY_ROWS(CALL)
#undef CALL
}

inline bool four_bit_needs_values(int64_t) { return false; }

inline void rows_by_groups(const penstock::Gemm& g, int64_t row, int64_t rows, int64_t pair, int64_t first, int64_t count, const char* a,
                           const int8_t* tile0, const int8_t* tile1, float* c) {
  few_rows_by_groups(g, row, rows, pair, first, count, a, tile0, tile1, c);
}

template <int kRows, bool kAsks>
inline void score_rows(const uint16_t* queries, int64_t dim, const penstock::Slabs& keys, float* c) {
  const char *keys0 = keys.now[0], *keys1 = keys.now[1], *next0 = keys.next[0], *next1 = keys.next[1];
  __m512 acc[kRows][2];
  for (int row = 0; row < kRows; ++row) acc[row][0] = acc[row][1] = _mm512_setzero_ps();
  for (int64_t at = 0; at < dim; at += 2) {
    if (kAsks) ask(next0 + at * 32), ask(next1 + at * 32);
    const __m512bh k0 = (__m512bh)_mm512_loadu_si512(keys0 + at * 32), k1 = (__m512bh)_mm512_loadu_si512(keys1 + at * 32);
    for (int row = 0; row < kRows; ++row) {
      const __m512bh x = (__m512bh)everywhere(queries + row * dim + at);
      acc[row][0] = _mm512_dpbf16_ps(acc[row][0], x, k0);
      acc[row][1] = _mm512_dpbf16_ps(acc[row][1], x, k1);
    }
  }
  for (int row = 0; row < kRows; ++row) {
    _mm512_storeu_ps(c + row * 32, acc[row][0]);
    _mm512_storeu_ps(c + row * 32 + 16, acc[row][1]);
  }
}

inline void score_keys(const uint16_t* queries, int64_t rows, int64_t dim, const penstock::Slabs& keys, float* c) {
  for (bool asks = keys.next[0] != nullptr; rows > 0; rows -= 8, queries += 8 * dim, c += 8 * 32, asks = false) {
#define CALL(kRows) asks ? score_rows<kRows, true>(queries, dim, keys, c) : score_rows<kRows, false>(queries, dim, keys, c)
    PENSTOCK_BY_ROWS(CALL)
#undef CALL
  }
}

// kColumns tiles of 16 dimensions.
template <int kRows, int kColumns, bool kAsks>
inline void add_columns(const uint16_t* weights, int64_t dim, const penstock::Slabs& values, const float* factors, float* out) {
  const char *values0 = values.now[0], *values1 = values.now[1], *next0 = values.next[0], *next1 = values.next[1];
  __m512 acc[kRows][kColumns];
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < kColumns; ++column) acc[row][column] = _mm512_mul_ps(_mm512_loadu_ps(out + row * dim + column * 16), _mm512_set1_ps(factors[row]));
  }
  for (int64_t pair = 0; pair < 16; ++pair) {
    const char* from = (pair < 8 ? values0 : values1) + pair % 8 * dim * 4;
    const char* next = (pair < 8 ? next0 : next1) + pair % 8 * dim * 4;
    for (int column = 0; kAsks && column < kColumns; ++column) ask(next + column * 64);
    __m512bh v[kColumns];
    for (int column = 0; column < kColumns; ++column) v[column] = (__m512bh)_mm512_loadu_si512(from + column * 64);
    for (int row = 0; row < kRows; ++row) {
      const __m512bh x = (__m512bh)everywhere(weights + row * 32 + pair * 2);
      for (int column = 0; column < kColumns; ++column) acc[row][column] = _mm512_dpbf16_ps(acc[row][column], x, v[column]);
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < kColumns; ++column) _mm512_storeu_ps(out + row * dim + column * 16, acc[row][column]);
  }
}

template <int kRows, bool kAsks>
inline void add_rows_of_values(const uint16_t* weights, int64_t dim, const penstock::Slabs& values, const float* factors, float* out) {
  constexpr int kMost = kRows <= 4 ? 4 : 2;
  int64_t at = 0;
  for (; at + kMost * 16 <= dim; at += kMost * 16) add_columns<kRows, kMost, kAsks>(weights, dim, values.at(at * 4), factors, out + at);
  if (at < dim) add_columns<kRows, 2, kAsks>(weights, dim, values.at(at * 4), factors, out + at);
}

inline void add_values(const uint16_t* weights, int64_t rows, int64_t dim, const penstock::Slabs& values, const float* factors, float* out) {
  for (bool asks = values.next[0] != nullptr; rows > 0; rows -= 8, weights += 8 * 32, factors += 8, out += 8 * dim, asks = false) {
#define CALL(kRows) asks ? add_rows_of_values<kRows, true>(weights, dim, values, factors, out) : add_rows_of_values<kRows, false>(weights, dim, values, factors, out)
    PENSTOCK_BY_ROWS(CALL)
#undef CALL
  }
}

}  // namespace

#include "gemm.inc"
#include "attention.inc"
#include "reduction.inc"

namespace penstock {
const Kernels kAvx512 = {"avx512", -128, gemm_workspace, gemm, to_bf16, to_int8, tiles_to_int8, sum_groups, add_rows,
                      attention_workspace, attention_most_workspace, attention, rotate_and_write,
                      finish_logits, find_largest, sum_masses};
}
