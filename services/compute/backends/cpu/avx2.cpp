// AVX2 with FMA: a block is up to 2 rows by 32 columns. Bytes are widened to 16 bits before they
// are multiplied: maddubs would saturate.

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace {

#include "lanes_avx2.inc"

constexpr bool kHasUnsignedValues = false;
constexpr bool kAsksByRows = false;  // for the weights that are needed soon

#include "groups.inc"

constexpr int64_t kBlockRows = 2;
constexpr bool kCanContinue = false;

struct ThreadState {
  explicit ThreadState(int64_t = 0) {}
};
struct AttentionState {};

template <int kRows>
void tile_int8(const char* a, const char* tile, int64_t bytes, int32_t* c) {
  __m256i acc[kRows][4];  // four columns each, of every column two partial sums
  for (int row = 0; row < kRows; ++row) {
    for (int part = 0; part < 4; ++part) acc[row][part] = _mm256_setzero_si256();
  }
  for (int64_t chunk = 0; chunk < bytes; chunk += 64, a += 1024) {
    for (int64_t at = 0; at < 64 && chunk + at < bytes; at += 4, tile += 64) {
      __m256i x[kRows];
      for (int row = 0; row < kRows; ++row) {
        int32_t bits;
        std::memcpy(&bits, a + row * 64 + at, 4);
        x[row] = _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(bits)));
      }
      for (int part = 0; part < 4; ++part) {
        const __m256i b = _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(tile) + part));
        for (int row = 0; row < kRows; ++row) acc[row][part] = _mm256_add_epi32(acc[row][part], _mm256_madd_epi16(x[row], b));
      }
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

// c[kRows][16] += rows of words, `stride` bytes apart, times `words` rows of 16 words of a tile,
// `step` bytes apart.
template <int kRows>
inline void dot_words(const char* a, int64_t stride, const char* tile, int64_t words, __m256 (&acc)[kRows][2], int64_t step = 64) {
  const __m256i high = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000));
  for (int64_t at = 0; at < words; ++at) {
    __m256 even[2], odd[2];
    for (int half = 0; half < 2; ++half) {
      const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + at * step) + half);
      even[half] = _mm256_castsi256_ps(_mm256_slli_epi32(b, 16));
      odd[half] = _mm256_castsi256_ps(_mm256_and_si256(b, high));
    }
    for (int row = 0; row < kRows; ++row) {
      int32_t bits;
      std::memcpy(&bits, a + row * stride + at * 4, 4);
      const __m256i x = _mm256_set1_epi32(bits);
      const __m256 x0 = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), x1 = _mm256_castsi256_ps(_mm256_and_si256(x, high));
      for (int half = 0; half < 2; ++half) {
        acc[row][half] = _mm256_fmadd_ps(even[half], x0, acc[row][half]);
        acc[row][half] = _mm256_fmadd_ps(odd[half], x1, acc[row][half]);
      }
    }
  }
}

template <int kRows>
void tile_bf16(const char* a, const char* tile, int64_t bytes, float* c) {
  __m256 acc[kRows][2];
  for (int row = 0; row < kRows; ++row) acc[row][0] = acc[row][1] = _mm256_setzero_ps();
  for (int64_t chunk = 0; chunk < bytes; chunk += 64, a += 1024, tile += 1024) dot_words<kRows>(a, 64, tile, 16, acc);
  for (int row = 0; row < kRows; ++row) {
    _mm256_store_ps(c + row * 32, acc[row][0]);
    _mm256_store_ps(c + row * 32 + 8, acc[row][1]);
  }
}

template <typename Between>
inline void block_int8(const char* a, int64_t, const char* tile0, const char* tile1, int64_t bytes, int64_t rows, const int32_t*, int32_t* c, bool, bool,
                       Between&&) {
  if (rows == 1) {
    tile_int8<1>(a, tile0, bytes, c);
    tile_int8<1>(a, tile1, bytes, c + 16);
  } else {
    tile_int8<2>(a, tile0, bytes, c);
    tile_int8<2>(a, tile1, bytes, c + 16);
  }
}

template <typename Between>
inline void block_bf16(const char* a, int64_t, const char* tile0, const char* tile1, int64_t bytes, int64_t rows, float* c, bool, bool, Between&&) {
  if (rows == 1) {
    tile_bf16<1>(a, tile0, bytes, c);
    tile_bf16<1>(a, tile1, bytes, c + 16);
  } else {
    tile_bf16<2>(a, tile0, bytes, c);
    tile_bf16<2>(a, tile1, bytes, c + 16);
  }
}

inline void rows_by_groups(const penstock::Gemm& g, int64_t row, int64_t rows, int64_t first, int64_t count, const char* a, const Values& values, float* c) {
  const penstock::Weight& w = *g.weight;
  const int64_t groups = w.padded_k / w.group, size = w.group * 16;
  alignas(32) int32_t products[2 * 32];
  for (int64_t group = first; group < first + count; ++group) {
    const char* inputs = a + group * w.group / 64 * 1024 + group * w.group % 64;
    for (int64_t half = 0; half < 2; ++half) {
      const char* tile = reinterpret_cast<const char*>(values.tiles[half] + (group - first) * size);
      rows == 1 ? tile_int8<1>(inputs, tile, w.group, products) : tile_int8<2>(inputs, tile, w.group, products);
      const GroupScales of(values, group - first, half);
      for (int64_t m = 0; m < rows; ++m) {
        const int64_t at = in_groups(row + m, group, groups);
        float* to = c + m * 32 + half * 16;
        store(to, of.add(load(to), load_int32(products + m * 32), g.scales[at], g.totals[at]));
      }
    }
  }
}

// Some bytes of a slab that comes later; null: none.
inline void ask(const char* slab, int64_t start, int64_t count) {
  for (int64_t line = start; slab != nullptr && line < start + count; line += 64) _mm_prefetch(slab + line, _MM_HINT_T0);
}

template <int kRows>
inline void score_rows(const uint16_t* queries, int64_t dim, const char* keys, float* c) {
  __m256 acc[kRows][2];
  for (int row = 0; row < kRows; ++row) acc[row][0] = acc[row][1] = _mm256_setzero_ps();
  dot_words<kRows>(reinterpret_cast<const char*>(queries), dim * 2, keys, dim / 2, acc);
  for (int row = 0; row < kRows; ++row) _mm256_storeu_ps(c + row * 32, acc[row][0]), _mm256_storeu_ps(c + row * 32 + 8, acc[row][1]);
}

inline void score_keys(const uint16_t* queries, int64_t rows, int64_t dim, const penstock::Slabs& keys, float* c) {
  for (int64_t row = 0; row < rows; row += 2) {
    const uint16_t* some = queries + row * dim;
    for (int half = 0; half < 2; ++half) {
      if (row == 0) ask(keys.next[half], 0, dim * 32);
      row + 1 < rows ? score_rows<2>(some, dim, keys.now[half], c + row * 32 + half * 16) : score_rows<1>(some, dim, keys.now[half], c + row * 32 + half * 16);
    }
  }
}

template <int kRows>
inline void add_tile(const uint16_t* weights, int64_t dim, const char* values0, const char* values1, const float* factors, float* out) {
  __m256 acc[kRows][2];
  for (int row = 0; row < kRows; ++row) {
    for (int half = 0; half < 2; ++half) acc[row][half] = _mm256_mul_ps(_mm256_loadu_ps(out + row * dim + half * 8), _mm256_set1_ps(factors[row]));
  }
  dot_words<kRows>(reinterpret_cast<const char*>(weights), 64, values0, 8, acc, dim * 4);
  dot_words<kRows>(reinterpret_cast<const char*>(weights + 16), 64, values1, 8, acc, dim * 4);
  for (int row = 0; row < kRows; ++row) _mm256_storeu_ps(out + row * dim, acc[row][0]), _mm256_storeu_ps(out + row * dim + 8, acc[row][1]);
}

inline void add_values(const uint16_t* weights, int64_t rows, int64_t dim, const penstock::Slabs& values, const float* factors, float* out) {
  for (int64_t row = 0; row < rows; row += 2) {
    for (int64_t at = 0; at < dim; at += 16) {
      const char *first = values.now[0] + at * 4, *second = values.now[1] + at * 4;
      for (int half = 0; half < 2 && row == 0; ++half) ask(values.next[half], at * 32, 512);
      float* to = out + row * dim + at;
      row + 1 < rows ? add_tile<2>(weights + row * 32, dim, first, second, factors + row, to) : add_tile<1>(weights + row * 32, dim, first, second, factors + row, to);
    }
  }
}

inline void store_parts(int8_t* high, int8_t* low, Lanes x) {
  alignas(32) int32_t parts[16];
  _mm256_store_si256(reinterpret_cast<__m256i*>(parts), _mm256_cvtps_epi32(x.a));
  _mm256_store_si256(reinterpret_cast<__m256i*>(parts) + 1, _mm256_cvtps_epi32(x.b));
  for (int i = 0; i < 16; ++i) high[i] = static_cast<int8_t>(parts[i] >> 7), low[i] = static_cast<int8_t>(parts[i] & 127);
}

// Four parts as 16 bits, over and over.
template <bool kIsSigned>
inline __m256i join_parts(const void* high, const void* low) {
  int32_t h, l;
  std::memcpy(&h, high, 4);
  std::memcpy(&l, low, 4);
  const __m128i words = kIsSigned ? _mm_cvtepi8_epi16(_mm_cvtsi32_si128(h)) : _mm_cvtepu8_epi16(_mm_cvtsi32_si128(h));
  return _mm256_broadcastq_epi64(_mm_add_epi16(_mm_slli_epi16(words, 7), _mm_cvtepu8_epi16(_mm_cvtsi32_si128(l))));
}

// acc += four parts times four codes of each of 16 columns; `upper`: the parts of the upper eight.
inline void dot_parts(__m256i lower, __m256i upper, const char* codes, __m128i flip, __m256i (&acc)[4]) {
  for (int part = 0; part < 4; ++part) {
    const __m256i b = _mm256_cvtepi8_epi16(_mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes) + part), flip));
    acc[part] = _mm256_add_epi32(acc[part], _mm256_madd_epi16(part < 2 ? lower : upper, b));
  }
}

inline void store_halves(const __m256i (&acc)[4], int32_t* c) {
  for (int part = 0; part < 4; ++part) {
    alignas(32) int32_t halves[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(halves), acc[part]);
    for (int column = 0; column < 4; ++column) c[part * 4 + column] = halves[2 * column] + halves[2 * column + 1];
  }
}

inline void dot_keys(const int8_t* high, const int8_t* low, int64_t stride, const int32_t*, int64_t, int64_t rows, const penstock::Slabs& keys, int64_t words,
                     int32_t* c) {
  const __m128i flip = _mm_set1_epi8(static_cast<char>(0x80));
  for (int64_t row = 0; row < rows; ++row) {
    __m256i first[4] = {}, second[4] = {};
    for (int64_t word = 0; word < words; ++word) {
      for (int half = 0; half < 2 && row == 0; ++half) ask(keys.next[half], word * 64, 64);
      const __m256i x = join_parts<true>(high + row * stride + word * 4, low + row * stride + word * 4);
      dot_parts(x, x, keys.now[0] + word * 64, flip, first);
      dot_parts(x, x, keys.now[1] + word * 64, flip, second);
    }
    store_halves(first, c + row * 32);
    store_halves(second, c + row * 32 + 16);
  }
}

inline void dot_values(const uint8_t* high, const uint8_t* low, int64_t planes, int64_t rows, const penstock::Slabs& values, int64_t dim, int64_t group,
                       int32_t* c) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t at = 0; at < dim; at += 16) {
      __m256i acc[4] = {};
      for (int half = 0; half < 2 && row == 0; ++half) ask(values.next[half], at * 16, 256);
      for (int64_t word = 0; word < 8; ++word) {
        const int64_t lower = at / group * planes + row * 32 + word * 4, upper = (at + 8) / group * planes + row * 32 + word * 4;
        const char* codes = values.now[word / 4] + word % 4 * dim * 4 + at * 4;
        dot_parts(join_parts<false>(high + lower, low + lower), join_parts<false>(high + upper, low + upper), codes, _mm_setzero_si128(), acc);
      }
      store_halves(acc, c + row * dim + at);
    }
  }
}

}  // namespace

#include "gemm.inc"
#include "attention.inc"
#include "reduction.inc"

namespace penstock {
const Kernels kAvx2 = {"avx2", 0, gemm_workspace, gemm, to_bf16, to_int8, tiles_to_int8, sum_groups, add_rows,
                      attention_workspace, attention_most_workspace, attention, rotate_and_write,
                      finish_logits, find_largest, sum_masses};
}
