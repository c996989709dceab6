// NEON with dot products of bytes: Arm's cores from Cortex-A76 and Neoverse N1 on, and all of Apple's
// from the M1 on.

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace {

#include "lanes_neon.inc"
#include "products_neon.inc"

template <int kRows>
using Products = Dots<kRows>;

#include "neon.inc"

}  // namespace

#include "gemm.inc"
#include "attention.inc"
#include "recurrence.inc"
#include "reduction.inc"

namespace penstock {
const Kernels kNeon = {"neon", kFlip, gemm_workspace, gemm, to_bf16, to_int8, tiles_to_int8, sum_groups, add_rows,
                      attention_workspace, attention_most_workspace, attention, rotate_and_write,
                      recurrence_workspace, recurrence,
                      finish_logits, find_largest, sum_masses};
}
