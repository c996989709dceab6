// AVX-512 with VNNI and BF16: a block is up to 8 rows by 32 columns, in 16 registers.

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace {

#include "lanes_avx512.inc"
#include "groups.inc"
#include "groups_avx512.inc"

constexpr int64_t kBlockRows = 8;
constexpr bool kCanContinue = false;

struct ThreadState {
  explicit ThreadState(int64_t = 0) {}
};

// The instruction multiplies unsigned by signed bytes: activations are shifted up by 128, and 128 times the weights' sum taken off.
template <int kRows>
void rows_int8(const char* a, const char* tile0, const char* tile1, int64_t bytes, const int32_t* sums, int32_t* c) {
  __m512i acc[kRows][2];
  for (int row = 0; row < kRows; ++row) acc[row][0] = acc[row][1] = _mm512_setzero_si512();
  for (int64_t chunk = 0; chunk < bytes; chunk += 64, a += 1024) {
    for (int64_t at = 0; at < 64 && chunk + at < bytes; at += 4, tile0 += 64, tile1 += 64) {
      const __m512i b0 = _mm512_load_si512(tile0), b1 = _mm512_load_si512(tile1);
      for (int row = 0; row < kRows; ++row) {
        const __m512i x = _mm512_set1_epi32(four_bytes(a + row * 64 + at) ^ static_cast<int32_t>(0x80808080));
        acc[row][0] = _mm512_dpbusd_epi32(acc[row][0], x, b0);
        acc[row][1] = _mm512_dpbusd_epi32(acc[row][1], x, b1);
      }
    }
  }
  const __m512i over0 = _mm512_slli_epi32(_mm512_loadu_si512(sums), 7), over1 = _mm512_slli_epi32(_mm512_loadu_si512(sums + 16), 7);
  for (int row = 0; row < kRows; ++row) {
    _mm512_store_si512(c + row * 32, _mm512_sub_epi32(acc[row][0], over0));
    _mm512_store_si512(c + row * 32 + 16, _mm512_sub_epi32(acc[row][1], over1));
  }
}

template <int kRows>
void rows_bf16(const char* a, const char* tile0, const char* tile1, int64_t bytes, float* c) {
  __m512 acc[kRows][2];
  for (int row = 0; row < kRows; ++row) acc[row][0] = acc[row][1] = _mm512_setzero_ps();
  for (int64_t chunk = 0; chunk < bytes; chunk += 64, a += 1024) {
    for (int64_t at = 0; at < 64; at += 4, tile0 += 64, tile1 += 64) {
      const __m512bh b0 = (__m512bh)_mm512_load_si512(tile0), b1 = (__m512bh)_mm512_load_si512(tile1);
      for (int row = 0; row < kRows; ++row) {
        const __m512bh x = (__m512bh)_mm512_set1_epi32(four_bytes(a + row * 64 + at));
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

#define PENSTOCK_BY_ROWS(CALL) \
  switch (rows) {              \
    case 1: CALL(1); break;    \
    case 2: CALL(2); break;    \
    case 3: CALL(3); break;    \
    case 4: CALL(4); break;    \
    case 5: CALL(5); break;    \
    case 6: CALL(6); break;    \
    case 7: CALL(7); break;    \
    default: CALL(8);          \
  }

template <typename Between>
inline void block_int8(const char* a, int64_t, const char* tile0, const char* tile1, int64_t bytes, int64_t rows, const int32_t* sums, int32_t* c, bool, bool,
                       Between&&) {
#define CALL(kRows) rows_int8<kRows>(a, tile0, tile1, bytes, sums, c)
  PENSTOCK_BY_ROWS(CALL)
#undef CALL
}

template <typename Between>
inline void block_bf16(const char* a, int64_t, const char* tile0, const char* tile1, int64_t bytes, int64_t rows, float* c, bool, bool, Between&&) {
#define CALL(kRows) rows_bf16<kRows>(a, tile0, tile1, bytes, c)
  PENSTOCK_BY_ROWS(CALL)
#undef CALL
}

inline bool four_bit_needs_values(int64_t) { return false; }

inline void rows_by_groups(const penstock::Gemm& g, int64_t row, int64_t rows, int64_t pair, int64_t first, int64_t count, const char* a,
                           const int8_t* tile0, const int8_t* tile1, float* c) {
  few_rows_by_groups(g, row, rows, pair, first, count, a, tile0, tile1, c);
}

constexpr int kDotRows = 8;

// c[8][16] += 8 rows of words, `stride` bytes apart, times `words` rows of 16 words of a tile.
inline void dot_rows(const char* a, int64_t stride, const uint16_t* tile, int64_t words, float* c, int64_t c_stride) {
  __m512 acc[8];
  for (int row = 0; row < 8; ++row) acc[row] = _mm512_loadu_ps(c + row * c_stride);
  for (int64_t at = 0; at < words; ++at) {
    const __m512bh b = (__m512bh)_mm512_loadu_si512(tile + at * 32);
    for (int row = 0; row < 8; ++row) acc[row] = _mm512_dpbf16_ps(acc[row], (__m512bh)_mm512_set1_epi32(four_bytes(a + row * stride + at * 4)), b);
  }
  for (int row = 0; row < 8; ++row) _mm512_storeu_ps(c + row * c_stride, acc[row]);
}

#include "dots.inc"

}  // namespace

#include "gemm.inc"
#include "attention.inc"
#include "reduction.inc"

namespace penstock {
const Kernels kAvx512 = {"avx512", gemm_workspace, gemm, to_bf16, to_int8, tiles_to_int8, sum_groups, add_rows, finish_logits,
                      attention_workspace, attention, rotate_and_write,
                      find_largest, sum_masses};
}
