// AMX: a block is two tiles of 16 rows by two tiles of 16 columns, accumulated in four tile registers.

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace {

constexpr int64_t kBlockRows = 32;
constexpr int64_t kAhead = 4096;  // bytes of weights that are asked for before they are read

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

struct ThreadState {
  ThreadState() {
    TileConfig config;
    asm volatile("" ::"r"(&config) : "memory");  // gcc 12 may drop the stores to a configuration before it is loaded
    _tile_loadconfig(&config);
  }
  ~ThreadState() { _tile_release(); }
};

inline void prefetch(const char* tile) {
  for (int line = 0; line < 16; ++line) _mm_prefetch(tile + kAhead + 64 * line, _MM_HINT_T0);
}

#define PENSTOCK_AMX_BLOCK(DOT)                                        \
  _tile_zero(0);                                                       \
  _tile_zero(1);                                                       \
  if (rows > 16) {                                                     \
    _tile_zero(2);                                                     \
    _tile_zero(3);                                                     \
    for (int64_t at = 0; at < depth; at += 64) {                       \
      _tile_loadd(4, bytes + at, stride);                              \
      _tile_loadd(6, tile0 + at * 16, 64);                             \
      _tile_loadd(7, tile1 + at * 16, 64);                             \
      _tile_loadd(5, bytes + 16 * stride + at, stride);                \
      DOT(0, 4, 6);                                                    \
      DOT(1, 4, 7);                                                    \
      DOT(2, 5, 6);                                                    \
      DOT(3, 5, 7);                                                    \
    }                                                                  \
    _tile_stored(2, c + 16 * 32, 128);                                 \
    _tile_stored(3, c + 16 * 32 + 16, 128);                            \
  } else {                                                             \
    for (int64_t at = 0; at < depth; at += 64) {                       \
      prefetch(tile0 + at * 16);                                       \
      prefetch(tile1 + at * 16);                                       \
      _tile_loadd(4, bytes + at, stride);                              \
      _tile_loadd(6, tile0 + at * 16, 64);                             \
      _tile_loadd(7, tile1 + at * 16, 64);                             \
      DOT(0, 4, 6);                                                    \
      DOT(1, 4, 7);                                                    \
    }                                                                  \
  }                                                                    \
  _tile_stored(0, c, 128);                                             \
  _tile_stored(1, c + 16, 128)

inline void block_int8(const int8_t* a, int64_t stride, const char* tile0, const char* tile1, int64_t k, int64_t rows, const int32_t*, int32_t* c) {
  const char* bytes = reinterpret_cast<const char*>(a);
  const int64_t depth = k;
  PENSTOCK_AMX_BLOCK(_tile_dpbssd);
}

inline void block_bf16(const uint16_t* a, int64_t stride, const char* tile0, const char* tile1, int64_t k, int64_t rows, float* c) {
  const char* bytes = reinterpret_cast<const char*>(a);
  const int64_t depth = k * 2;
  PENSTOCK_AMX_BLOCK(_tile_dpbf16ps);
}

#include "vectors_avx512.inc"

}  // namespace

#include "gemm.inc"
#include "attention.inc"

namespace penstock {
const Kernels kAmx = {"amx", gemm, to_bf16, to_int8, sum_groups, attention_workspace, attention, rotate_and_write};
}
