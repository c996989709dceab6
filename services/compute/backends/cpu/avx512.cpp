// AVX-512 with VNNI and BF16.

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace {

#include "words_bf16.inc"
#include "lanes_avx512.inc"

constexpr penstock::ValueKind kValues = penstock::kUnsigned;  // in a GEMM by groups
constexpr bool kAsksByRows = true;  // for the weights that are needed soon

#include "groups.inc"
#include "groups_avx512.inc"
#include "attention_avx512.inc"
#include "avx512.inc"

}  // namespace

#include "gemm.inc"
#include "attention.inc"
#include "recurrence.inc"
#include "reduction.inc"

namespace penstock {
const Kernels kAvx512 = {"avx512", -128, gemm_workspace, gemm, to_bf16, to_int8, tiles_to_int8, sum_groups, add_rows,
                      attention_workspace, attention_most_workspace, attention, rotate_and_write,
                      recurrence_workspace, recurrence,
                      finish_logits, find_largest, sum_masses};
}
