// The kernels' <arm_neon.h> where they are compiled for x86-64: SIMDe computes each instruction, and
// this what SIMDe lacks.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/arm/neon.h>

#include <immintrin.h>

#include <cstdint>
#include <cstring>

// Both registers have the same bits.
template <typename To, typename From>
inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline float32x4_t vdivq_f32(float32x4_t a, float32x4_t b) { return same_bits<float32x4_t>(_mm_div_ps(same_bits<__m128>(a), same_bits<__m128>(b))); }

// To nearest, ties to even. (What an int32 does not hold becomes the least, not the nearest.)
inline int32x4_t vcvtnq_s32_f32(float32x4_t x) { return same_bits<int32x4_t>(_mm_cvtps_epi32(same_bits<__m128>(x))); }

// sums [2][2] += a [2][8] times the transpose of b [2][8]
inline int32x4_t vmmlaq_s32(int32x4_t sums, int8x16_t a, int8x16_t b) {
  int32_t out[4];
  int8_t left[16], right[16];
  vst1q_s32(out, sums);
  vst1q_s8(left, a);
  vst1q_s8(right, b);
  for (int i = 0; i < 4; ++i) {
    for (int k = 0; k < 8; ++k) out[i] += left[i / 2 * 8 + k] * right[i % 2 * 8 + k];
  }
  return vld1q_s32(out);
}
