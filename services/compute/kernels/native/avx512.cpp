// AVX-512 with VNNI and BF16: a block is up to 6 rows by 32 columns, in 12 registers.

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace {

constexpr int64_t kBlockRows = 6;

struct ThreadState {};

inline int32_t four_bytes(const void* from) {
  int32_t bits;
  std::memcpy(&bits, from, 4);
  return bits;
}

// The instruction multiplies unsigned by signed bytes: activations are shifted up by 128, and 128 times the weights' sum taken off.
template <int kRows>
void rows_int8(const int8_t* a, int64_t stride, const char* tile0, const char* tile1, int64_t k, const int32_t* sums, int32_t* c) {
  __m512i acc[kRows][2];
  for (int row = 0; row < kRows; ++row) acc[row][0] = acc[row][1] = _mm512_setzero_si512();
  for (int64_t at = 0; at < k; at += 4) {
    const __m512i b0 = _mm512_load_si512(tile0 + at * 16), b1 = _mm512_load_si512(tile1 + at * 16);
    for (int row = 0; row < kRows; ++row) {
      const __m512i x = _mm512_set1_epi32(four_bytes(a + row * stride + at) ^ static_cast<int32_t>(0x80808080));
      acc[row][0] = _mm512_dpbusd_epi32(acc[row][0], x, b0);
      acc[row][1] = _mm512_dpbusd_epi32(acc[row][1], x, b1);
    }
  }
  const __m512i over0 = _mm512_slli_epi32(_mm512_loadu_si512(sums), 7), over1 = _mm512_slli_epi32(_mm512_loadu_si512(sums + 16), 7);
  for (int row = 0; row < kRows; ++row) {
    _mm512_store_si512(c + row * 32, _mm512_sub_epi32(acc[row][0], over0));
    _mm512_store_si512(c + row * 32 + 16, _mm512_sub_epi32(acc[row][1], over1));
  }
}

template <int kRows>
void rows_bf16(const uint16_t* a, int64_t stride, const char* tile0, const char* tile1, int64_t k, float* c) {
  __m512 acc[kRows][2];
  for (int row = 0; row < kRows; ++row) acc[row][0] = acc[row][1] = _mm512_setzero_ps();
  const char* bytes = reinterpret_cast<const char*>(a);
  for (int64_t at = 0; at < k * 2; at += 4) {
    const __m512bh b0 = (__m512bh)_mm512_load_si512(tile0 + at * 16), b1 = (__m512bh)_mm512_load_si512(tile1 + at * 16);
    for (int row = 0; row < kRows; ++row) {
      const __m512bh x = (__m512bh)_mm512_set1_epi32(four_bytes(bytes + row * stride + at));
      acc[row][0] = _mm512_dpbf16_ps(acc[row][0], x, b0);
      acc[row][1] = _mm512_dpbf16_ps(acc[row][1], x, b1);
    }
  }
  for (int row = 0; row < kRows; ++row) {
    _mm512_store_ps(c + row * 32, acc[row][0]);
    _mm512_store_ps(c + row * 32 + 16, acc[row][1]);
  }
}

#define PENSTOCK_BY_ROWS(CALL) \
  switch (rows) {              \
    case 1: CALL(1); break;    \
    case 2: CALL(2); break;    \
    case 3: CALL(3); break;    \
    case 4: CALL(4); break;    \
    case 5: CALL(5); break;    \
    default: CALL(6);          \
  }

inline void block_int8(const int8_t* a, int64_t stride, const char* tile0, const char* tile1, int64_t k, int64_t rows, const int32_t* sums, int32_t* c) {
#define CALL(kRows) rows_int8<kRows>(a, stride, tile0, tile1, k, sums, c)
  PENSTOCK_BY_ROWS(CALL)
#undef CALL
}

inline void block_bf16(const uint16_t* a, int64_t stride, const char* tile0, const char* tile1, int64_t k, int64_t rows, float* c) {
#define CALL(kRows) rows_bf16<kRows>(a, stride, tile0, tile1, k, c)
  PENSTOCK_BY_ROWS(CALL)
#undef CALL
}

#include "vectors_avx512.inc"

}  // namespace

#include "gemm.inc"
#include "attention.inc"

namespace penstock {
const Kernels kAvx512 = {"avx512", gemm, to_bf16, to_int8, sum_groups, attention_workspace, attention, rotate_and_write};
}
