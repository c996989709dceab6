// AVX2 with FMA: a block is up to 2 rows by 32 columns. Bytes are widened to 16 bits before they are multiplied: maddubs would saturate.

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace {

constexpr int64_t kBlockRows = 2;

struct ThreadState {};

template <int kRows>
void tile_int8(const int8_t* a, int64_t stride, const char* tile, int64_t k, int32_t* c) {
  __m256i acc[kRows][4];  // four columns each, of every column two partial sums
  for (int row = 0; row < kRows; ++row) {
    for (int part = 0; part < 4; ++part) acc[row][part] = _mm256_setzero_si256();
  }
  for (int64_t at = 0; at < k; at += 4) {
    __m256i x[kRows];
    for (int row = 0; row < kRows; ++row) {
      int32_t bits;
      std::memcpy(&bits, a + row * stride + at, 4);
      x[row] = _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(bits)));
    }
    for (int part = 0; part < 4; ++part) {
      const __m256i b = _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(tile + at * 16) + part));
      for (int row = 0; row < kRows; ++row) acc[row][part] = _mm256_add_epi32(acc[row][part], _mm256_madd_epi16(x[row], b));
    }
  }
  for (int row = 0; row < kRows; ++row) {
    for (int part = 0; part < 4; ++part) {
      alignas(32) int32_t halves[8];
      _mm256_store_si256(reinterpret_cast<__m256i*>(halves), acc[row][part]);
      for (int column = 0; column < 4; ++column) c[row * 32 + part * 4 + column] = halves[2 * column] + halves[2 * column + 1];
    }
  }
}

template <int kRows>
void tile_bf16(const uint16_t* a, int64_t stride, const char* tile, int64_t k, float* c) {
  __m256 acc[kRows][2];
  for (int row = 0; row < kRows; ++row) acc[row][0] = acc[row][1] = _mm256_setzero_ps();
  const __m256i high = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000));
  const char* bytes = reinterpret_cast<const char*>(a);
  for (int64_t at = 0; at < k * 2; at += 4) {
    __m256 even[2], odd[2];
    for (int half = 0; half < 2; ++half) {
      const __m256i b = _mm256_load_si256(reinterpret_cast<const __m256i*>(tile + at * 16) + half);
      even[half] = _mm256_castsi256_ps(_mm256_slli_epi32(b, 16));
      odd[half] = _mm256_castsi256_ps(_mm256_and_si256(b, high));
    }
    for (int row = 0; row < kRows; ++row) {
      int32_t bits;
      std::memcpy(&bits, bytes + row * stride + at, 4);
      const __m256i x = _mm256_set1_epi32(bits);
      const __m256 x0 = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), x1 = _mm256_castsi256_ps(_mm256_and_si256(x, high));
      for (int half = 0; half < 2; ++half) {
        acc[row][half] = _mm256_fmadd_ps(even[half], x0, acc[row][half]);
        acc[row][half] = _mm256_fmadd_ps(odd[half], x1, acc[row][half]);
      }
    }
  }
  for (int row = 0; row < kRows; ++row) {
    _mm256_store_ps(c + row * 32, acc[row][0]);
    _mm256_store_ps(c + row * 32 + 8, acc[row][1]);
  }
}

inline void block_int8(const int8_t* a, int64_t stride, const char* tile0, const char* tile1, int64_t k, int64_t rows, const int32_t*, int32_t* c) {
  if (rows == 1) {
    tile_int8<1>(a, stride, tile0, k, c);
    tile_int8<1>(a, stride, tile1, k, c + 16);
  } else {
    tile_int8<2>(a, stride, tile0, k, c);
    tile_int8<2>(a, stride, tile1, k, c + 16);
  }
}

inline void block_bf16(const uint16_t* a, int64_t stride, const char* tile0, const char* tile1, int64_t k, int64_t rows, float* c) {
  if (rows == 1) {
    tile_bf16<1>(a, stride, tile0, k, c);
    tile_bf16<1>(a, stride, tile1, k, c + 16);
  } else {
    tile_bf16<2>(a, stride, tile0, k, c);
    tile_bf16<2>(a, stride, tile1, k, c + 16);
  }
}

// `units` times: `bytes` bytes of codes become twice as many values, those of the low halves first.
inline void unpack(const uint8_t* codes, const int8_t* table, int8_t* out, int64_t bytes, int64_t units) {
  const __m256i values = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), low = _mm256_set1_epi8(15);
  for (int64_t unit = 0; unit < units; ++unit, codes += bytes, out += 2 * bytes) {
    for (int64_t at = 0; at < bytes; at += 32) {
      const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + at));
      _mm256_store_si256(reinterpret_cast<__m256i*>(out + at), _mm256_shuffle_epi8(values, _mm256_and_si256(both, low)));
      const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
      _mm256_store_si256(reinterpret_cast<__m256i*>(out + bytes + at), _mm256_shuffle_epi8(values, high));
    }
  }
}

inline void widen_halves(const uint16_t* halves, float* out) {
  for (int at = 0; at < 32; at += 8) _mm256_store_ps(out + at, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + at))));
}

inline bool few_rows_four_bit(const penstock::Gemm&, int64_t, int64_t, int64_t, const int8_t*, const uint8_t*, int64_t, float*) { return false; }

inline float reduce_8(__m256 x, bool is_sum) {
  alignas(32) float lanes[8];
  _mm256_store_ps(lanes, x);
  for (int width = 4; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) {
      const float other = lanes[lane + width];
      lanes[lane] = is_sum ? lanes[lane] + other : (lanes[lane] > other ? lanes[lane] : other);
    }
  }
  return lanes[0];
}

// To nearest, ties to even; NaN is kept.
inline void narrow_16(const float* values, uint16_t* out) {
  __m256i halves[2];
  for (int half = 0; half < 2; ++half) {
    const __m256 x = _mm256_loadu_ps(values + 8 * half);
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i nan = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    halves[half] = _mm256_blendv_epi8(rounded, nan, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  }
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves[0], halves[1]), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), packed);
}

// The largest magnitude of k numbers.
inline float max_abs(const float* x, int64_t k) {
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  __m256 largest = _mm256_setzero_ps();
  int64_t i = 0;
  for (; i + 8 <= k; i += 8) largest = _mm256_max_ps(largest, _mm256_and_ps(_mm256_loadu_ps(x + i), magnitude));
  float all = reduce_8(largest, false);
  for (; i < k; ++i) all = all > x[i] ? (all > -x[i] ? all : -x[i]) : x[i];
  return all;
}

// Of k bf16 numbers, in 8 lanes.
inline float sum_squares(const uint16_t* x, int64_t k) {
  __m256 sum = _mm256_setzero_ps();
  for (int64_t i = 0; i < k; i += 8) {
    uint16_t some[8] = {};
    std::memcpy(some, x + i, (k - i < 8 ? k - i : 8) * 2);
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(some)));
    const __m256 values = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
    sum = _mm256_fmadd_ps(values, values, sum);
  }
  return reduce_8(sum, true);
}

inline float max_32(const float* x) {
  const __m256 m = _mm256_max_ps(_mm256_max_ps(_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)), _mm256_max_ps(_mm256_loadu_ps(x + 16), _mm256_loadu_ps(x + 24)));
  return reduce_8(m, false);
}

inline float sum_32(const float* x) {
  const __m256 s = _mm256_add_ps(_mm256_add_ps(_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)), _mm256_add_ps(_mm256_loadu_ps(x + 16), _mm256_loadu_ps(x + 24)));
  return reduce_8(s, true);
}

// Sixteen dimensions of two neighbours in position, side by side.
inline void interleave_16(const uint16_t* first, const uint16_t* second, uint16_t* out) {
  for (int half = 0; half < 2; ++half) {
    const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(first) + half));
    const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(second) + half));
    _mm256_store_si256(reinterpret_cast<__m256i*>(out) + half, _mm256_or_si256(low, _mm256_slli_epi32(high, 16)));
  }
}

// keys: 32 positions' head_dim values as words of two; out: two tiles, [head_dim / 2][16 positions] words.
inline void transpose_keys(const uint32_t* const* keys, int64_t dim, uint32_t* out) {
  for (int64_t tile = 0; tile < 2; ++tile, out += dim * 8) {
    for (int64_t at = 0; at < dim / 2; ++at) {
      for (int64_t position = 0; position < 16; ++position) out[at * 16 + position] = keys[tile * 16 + position][at];
    }
  }
}

}  // namespace

#include "gemm.inc"
#include "attention.inc"

namespace penstock {
const Kernels kAvx2 = {"avx2", gemm, to_bf16, to_int8, sum_groups, attention_workspace, attention, rotate_and_write};
}
