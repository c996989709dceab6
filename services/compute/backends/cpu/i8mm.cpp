// NEON with products of matrices of bytes: Neoverse V1 and N2, Apple's M2, and later ones. An
// instruction multiplies 2 rows by 2 columns, of 8 inputs. The same bits as neon.cpp.

#include <arm_neon.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels.h"

namespace {

#include "lanes_neon.inc"
#include "products_neon.inc"

// Sums of two rows by two columns in each register.
template <int kRows>
struct Matrices {
  static constexpr int kQuarters = quarters_of(kRows), kPairs = kRows / 2;
  int32x4_t sums[kPairs][2 * kQuarters];

  void begin(const int32_t* first) {
    for (int pair = 0; pair < kPairs; ++pair) {
      const int32x4_t of_rows = vcombine_s32(vdup_n_s32(first[2 * pair]), vdup_n_s32(first[2 * pair + 1]));
      for (auto& each : sums[pair]) each = of_rows;
    }
  }

  void add(const int8_t* a, const Columns& columns, int64_t at) {
#pragma GCC unroll 2
    for (int inputs = 0; inputs < 16; inputs += 8) {
      int8x16_t x[kPairs];
      for (int pair = 0; pair < kPairs; ++pair) x[pair] = vcombine_s8(vld1_s8(a + 2 * pair * 64 + inputs), vld1_s8(a + (2 * pair + 1) * 64 + inputs));
#pragma GCC unroll 8
      for (int quarter = 0; quarter < kQuarters; ++quarter) {
        const int32x4_t near = vreinterpretq_s32_s8(columns.load(quarter, at + inputs * 16)), far = vreinterpretq_s32_s8(columns.load(quarter, at + inputs * 16 + 64));
        const int8x16_t lower = vreinterpretq_s8_s32(vzip1q_s32(near, far)), upper = vreinterpretq_s8_s32(vzip2q_s32(near, far));
        for (int pair = 0; pair < kPairs; ++pair) {
          sums[pair][2 * quarter] = vmmlaq_s32(sums[pair][2 * quarter], x[pair], lower);
          sums[pair][2 * quarter + 1] = vmmlaq_s32(sums[pair][2 * quarter + 1], x[pair], upper);
        }
      }
    }
  }

  int32x4_t row(int m, int quarter) const {
    const int32x4_t *both = &sums[m / 2][2 * quarter];
    return m % 2 == 0 ? vcombine_s32(vget_low_s32(both[0]), vget_low_s32(both[1])) : vcombine_s32(vget_high_s32(both[0]), vget_high_s32(both[1]));
  }
};

// One row would leave half of a matrix empty.
template <int kRows>
using Products = std::conditional_t<kRows == 1, Dots<1>, Matrices<kRows == 1 ? 2 : kRows>>;

#include "neon.inc"

}  // namespace

#include "gemm.inc"
#include "attention.inc"
#include "recurrence.inc"
#include "reduction.inc"

namespace penstock {
const Kernels kI8mm = {"i8mm", kFlip, gemm_workspace, gemm, to_bf16, to_int8, tiles_to_int8, sum_groups, add_rows,
                      attention_workspace, attention_most_workspace, attention, rotate_and_write,
                      recurrence_workspace, recurrence,
                      finish_logits, find_largest, sum_masses};
}
