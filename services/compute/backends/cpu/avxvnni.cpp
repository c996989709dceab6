// AVX2 with AVX-VNNI: Intel's Alder Lake and later, without AVX-512. The instruction multiplies
// unsigned by signed bytes.

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace {

#include "lanes_avx2.inc"

constexpr penstock::ValueKind kValues = penstock::kUnsigned;  // in a GEMM by groups
constexpr bool kAsksByRows = false;  // for the weights that are needed soon
constexpr int8_t kFlip = -128;

#include "groups.inc"

template <bool>
inline __m256i dot_bytes(__m256i sums, __m256i weights, __m256i x) {
  return _mm256_dpbusd_avx_epi32(sums, weights, x);
}

inline __m256i dot_int8(__m256i sums, __m256i weights, __m256i x) { return _mm256_dpbusd_avx_epi32(sums, x, weights); }

#include "avx2.inc"

}  // namespace

#include "gemm.inc"
#include "attention.inc"
#include "recurrence.inc"
#include "reduction.inc"

namespace penstock {
const Kernels kAvxVnni = {"avxvnni", kFlip, gemm_workspace, gemm, to_bf16, to_int8, tiles_to_int8, sum_groups, add_rows,
                      attention_workspace, attention_most_workspace, attention, rotate_and_write,
                      recurrence_workspace, recurrence,
                      finish_logits, find_largest, sum_masses};
}
