// What one core multiplies at most: dot products of registers with registers, as many chains as hide their latency. Prints "int8 R" and "bf16 R", in
// operations (two a multiplication) a second, and "hertz R", the clock's rate, the best of five. bench/budget.py compiles and runs it.
#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

namespace {

constexpr long kTurns = 4000000;
constexpr int kChains = 12;

template <typename Turn>
double best_rate(double operations, Turn&& turn) {
  double best = 0;
  for (int round = 0; round < 5; ++round) {
    const auto started = std::chrono::steady_clock::now();
    turn();
    best = std::max(best, operations / std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count());
  }
  return best;
}

#define TWELVE(X) X(a0) X(a1) X(a2) X(a3) X(a4) X(a5) X(a6) X(a7) X(a8) X(a9) X(a10) X(a11)
#define BEGIN(a) __m512i a = x;
#define DOT_INT8(a) asm volatile("vpdpbusd %1, %2, %0" : "+v"(a) : "v"(x), "v"(y));
#define DOT_BF16(a) asm volatile("vdpbf16ps %1, %2, %0" : "+v"(a) : "v"(x), "v"(y));

[[gnu::target("avx512f,avx512vnni"), gnu::noinline]] void multiply_int8() {
  const __m512i x = _mm512_set1_epi8(1), y = _mm512_set1_epi8(2);
  TWELVE(BEGIN)
  for (long turn = 0; turn < kTurns; ++turn) { TWELVE(DOT_INT8) }
}

[[gnu::target("avx512f,avx512bf16"), gnu::noinline]] void multiply_bf16() {
  const __m512i x = _mm512_set1_epi16(0x3f80), y = x;
  TWELVE(BEGIN)
  for (long turn = 0; turn < kTurns; ++turn) { TWELVE(DOT_BF16) }
}

// Each product waits three cycles for the one before it, on all processors of the last ten years.
[[gnu::noinline]] void count_cycles() {
  long product = 3;
  for (long turn = 0; turn < kTurns; ++turn) asm volatile("imul %0, %0" : "+r"(product));
}

}  // namespace

int main() {
  std::printf("hertz %.0f\n", best_rate(3.0 * kTurns, count_cycles));
  if (__builtin_cpu_supports("avx512vnni")) std::printf("int8 %.0f\n", best_rate(kTurns * kChains * 128.0, multiply_int8));
  if (__builtin_cpu_supports("avx512bf16")) std::printf("bf16 %.0f\n", best_rate(kTurns * kChains * 64.0, multiply_bf16));
}
