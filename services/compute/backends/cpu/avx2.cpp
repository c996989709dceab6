// AVX2 with FMA, without VNNI. The instruction that multiplies bytes adds two products in 16 bits:
// these hold them if the unsigned byte is at most 128.

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace {

#include "lanes_avx2.inc"

constexpr penstock::ValueKind kValues = penstock::kUnsignedIfNarrow;  // in a GEMM by groups
constexpr bool kAsksByRows = false;  // for the weights that are needed soon
constexpr int8_t kFlip = 0;

#include "groups.inc"

inline __m256i dot_unsigned(__m256i sums, __m256i weights, __m256i x) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(weights, x), _mm256_set1_epi16(1)));
}

inline __m256i dot_int8(__m256i sums, __m256i weights, __m256i x) { return dot_unsigned(sums, _mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights)); }

template <bool kIsNarrow>
inline __m256i dot_bytes(__m256i sums, __m256i weights, __m256i x) {
  return kIsNarrow ? dot_unsigned(sums, weights, x) : dot_int8(sums, weights, x);
}

#include "avx2.inc"

}  // namespace

#include "gemm.inc"
#include "attention.inc"
#include "recurrence.inc"
#include "reduction.inc"

namespace penstock {
const Kernels kAvx2 = {"avx2", kFlip, gemm_workspace, gemm, to_bf16, to_int8, tiles_to_int8, sum_groups, add_rows,
                      attention_workspace, attention_most_workspace, attention, rotate_and_write,
                      recurrence_workspace, recurrence,
                      finish_logits, find_largest, sum_masses};
}
