// AMX: a block is two tiles of 16 rows by two tiles of 16 columns, accumulated in four tile
// registers.

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace {

#include "words_bf16.inc"
#include "lanes_avx512.inc"

constexpr penstock::ValueKind kValues = penstock::kSigned;  // in a GEMM by groups
constexpr bool kAsksByRows = false;  // for the weights that are needed soon

#include "groups.inc"
#include "groups_avx512.inc"
#include "attention_avx512.inc"

constexpr int64_t kBlockRows = 32;
constexpr int64_t kRowsByGroups = kBlockRows;
constexpr bool kCanContinue = true;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Tiles 0 to 3 hold sums, 4 and 5 activations, 6 and 7 weights. `depth` bytes of a row are
// multiplied at once: 64, or a group of 32.
struct ThreadState {
  explicit ThreadState(int64_t depth = 64) {
    TileConfig config;
    config.row_bytes[4] = config.row_bytes[5] = static_cast<uint16_t>(depth);
    config.rows[6] = config.rows[7] = static_cast<uint8_t>(depth / 4);
    // gcc 12 may drop the stores to a configuration before it is loaded
    asm volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  ~ThreadState() { _tile_release(); }
};

inline void prefetch(const char* tile, int64_t at, int64_t tile_bytes) {
  const char* later = tile + at + ahead_of(at, tile_bytes);
  for (int line = 0; line < 16; ++line) _mm_prefetch(later + 64 * line, _MM_HINT_T0);
}

#define PENSTOCK_AMX_BEGIN(TILE, C) \
  if (is_begun) {                   \
    _tile_loadd(TILE, C, 128);      \
  } else {                          \
    _tile_zero(TILE);               \
  }

#define PENSTOCK_AMX_BLOCK(DOT)                           \
  PENSTOCK_AMX_BEGIN(0, c);                               \
  PENSTOCK_AMX_BEGIN(1, c + 16);                          \
  if (rows > 16) {                                        \
    PENSTOCK_AMX_BEGIN(2, c + 16 * 32);                   \
    PENSTOCK_AMX_BEGIN(3, c + 16 * 32 + 16);              \
    for (int64_t at = 0; at < bytes * 16; at += 1024) {   \
      if (is_first) prefetch(tile0, at, bytes * 16);      \
      if (is_first) prefetch(tile1, at, bytes * 16);      \
      _tile_loadd(4, a + at, 64);                         \
      _tile_loadd(6, tile0 + at, 64);                     \
      _tile_loadd(7, tile1 + at, 64);                     \
      _tile_loadd(5, a + next + at, 64);                  \
      DOT(0, 4, 6);                                       \
      DOT(1, 4, 7);                                       \
      DOT(2, 5, 6);                                       \
      DOT(3, 5, 7);                                       \
      between();                                          \
    }                                                     \
    _tile_stored(2, c + 16 * 32, 128);                    \
    _tile_stored(3, c + 16 * 32 + 16, 128);               \
  } else {                                                \
    for (int64_t at = 0; at < bytes * 16; at += 1024) {   \
      if (is_first) prefetch(tile0, at, bytes * 16);      \
      if (is_first) prefetch(tile1, at, bytes * 16);      \
      _tile_loadd(4, a + at, 64);                         \
      _tile_loadd(6, tile0 + at, 64);                     \
      _tile_loadd(7, tile1 + at, 64);                     \
      DOT(0, 4, 6);                                       \
      DOT(1, 4, 7);                                       \
      between();                                          \
    }                                                     \
  }                                                       \
  _tile_stored(0, c, 128);                                \
  _tile_stored(1, c + 16, 128)

template <typename Between>
inline void block_int8(const char* a, int64_t next, const char* tile0, const char* tile1, int64_t bytes, int64_t rows, const int32_t*, int32_t* c,
                       bool is_first, bool is_begun, Between&& between) {
  PENSTOCK_AMX_BLOCK(_tile_dpbssd);
}

template <typename Between>
inline void block_bf16(const char* a, int64_t next, const char* tile0, const char* tile1, int64_t bytes, int64_t rows, float* c, bool is_first,
                       bool is_begun, Between&& between) {
  PENSTOCK_AMX_BLOCK(_tile_dpbf16ps);
}

// groups that are multiplied before their products are added: a load waits for a tile's store that
// comes closely before it
constexpr int64_t kTurn = 2;

inline void turn_of_groups(const penstock::Gemm& g, int64_t row, int64_t rows, int64_t first, int64_t count, const char* a, const Values& values, float* c) {
  const penstock::Weight& w = *g.weight;
  // bytes to the next 16 rows
  const int64_t groups = g.groups, depth = w.group < 64 ? w.group : 64, next = w.padded_k * 16;
  const int64_t parts = rows > 16 ? 4 : 2;
  const int8_t *tile0 = values.tiles[0], *tile1 = values.tiles[1];
  alignas(64) int32_t products[4][kTurn][256];
  for (int64_t number = 0; number < count; ++number) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t at = (first + number) * w.group; at < (first + number + 1) * w.group; at += depth, tile0 += depth * 16, tile1 += depth * 16) {
      const char* inputs = a + at / 64 * 1024 + at % 64;
      _tile_loadd(4, inputs, 64);
      _tile_loadd(6, tile0, 64);
      _tile_loadd(7, tile1, 64);
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
      if (parts == 2) continue;
      _tile_loadd(5, inputs + next, 64);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, products[0][number], 64);
    _tile_stored(1, products[1][number], 64);
    if (parts == 2) continue;
    _tile_stored(2, products[2][number], 64);
    _tile_stored(3, products[3][number], 64);
  }
  for (int64_t part = 0; part < parts; ++part) {
    float* to = c + part / 2 * 16 * 32 + part % 2 * 16;
    __m512 total[16];
    for (int m = 0; m < 16; ++m) total[m] = _mm512_loadu_ps(to + m * 32);
    for (int64_t number = 0; number < count; ++number) {
      const GroupScales of(values, number, part % 2);
      const int32_t* from = products[part][number];
      // there is room for rows beyond the last
      const int64_t at = in_groups(row + part / 2 * 16, first + number, groups);
      for (int m = 0; m < 16; ++m) total[m] = of.add({total[m]}, load_int32(from + m * 16), g.scales[at + m], g.totals[at + m]).v;
    }
    for (int m = 0; m < 16; ++m) _mm512_storeu_ps(to + m * 32, total[m]);
  }
}

inline void rows_by_groups(const penstock::Gemm& g, int64_t row, int64_t rows, int64_t first, int64_t count, const char* a, const Values& values, float* c) {
  if (rows <= kFewRows) return few_rows_by_groups(g, row, rows, first, count, a, values, c);
  for (int64_t done = 0; done < count; done += kTurn) {
    turn_of_groups(g, row, rows, first + done, count - done < kTurn ? count - done : kTurn, a, values.from(g.weight->group, done), c);
  }
}

// Tiles 0 and 1 hold sums; 4 holds queries and 6 keys, of 32 dimensions; 2 and 5 hold weights, 3
// and 7 values, of 16 positions.
struct AttentionState {
  AttentionState() {
    TileConfig config;
    config.row_bytes[2] = config.row_bytes[5] = 32;
    config.rows[3] = config.rows[7] = 8;
    asm volatile("" ::"r"(&config) : "memory");
    _tile_loadconfig(&config);
  }
  ~AttentionState() { _tile_release(); }
};

// Some bytes of a slab that comes later; null: none.
inline void ask_for(const char* slab, int64_t start, int64_t count) {
  for (int64_t line = start; slab != nullptr && line < start + count; line += 64) ask(slab + line);
}

inline void score_keys(const Word* queries, int64_t, int64_t dim, const penstock::Slabs& keys, float* c) {
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t at = 0; at < dim; at += 32) {
    ask_for(keys.next[0], at * 32, 1024);
    ask_for(keys.next[1], at * 32, 1024);
    _tile_loadd(4, queries + at, dim * 2);
    _tile_loadd(6, keys.now[0] + at * 32, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(6, keys.now[1] + at * 32, 64);
    _tile_dpbf16ps(1, 4, 6);
  }
  _tile_stored(0, c, 128);
  _tile_stored(1, c + 16, 128);
}

inline void add_values(const Word* weights, int64_t rows, int64_t dim, const penstock::Slabs& values, const float* factors, float* out) {
  for (int64_t row = 0; row < rows; ++row) {
    if (factors[row] == 1.0f) continue;
    for (int64_t at = 0; at < dim; at += 16) store(out + row * dim + at, load(out + row * dim + at) * spread(factors[row]));
  }
  _tile_loadd(2, weights, 64);
  _tile_loadd(5, weights + 16, 64);
  for (int64_t at = 0; at < dim; at += 16) {
    ask_for(values.next[0], at * 32, 512);
    ask_for(values.next[1], at * 32, 512);
    _tile_loadd(0, out + at, dim * 4);
    _tile_loadd(3, values.now[0] + at * 4, dim * 4);
    _tile_dpbf16ps(0, 2, 3);
    _tile_loadd(7, values.now[1] + at * 4, dim * 4);
    _tile_dpbf16ps(0, 5, 7);
    _tile_stored(0, out + at, dim * 4);
  }
}

}  // namespace

#include "gemm.inc"
#include "attention.inc"
#include "recurrence.inc"
#include "reduction.inc"

namespace penstock {
const Kernels kAmx = {"amx", 0, gemm_workspace, gemm, to_bf16, to_int8, tiles_to_int8, sum_groups, add_rows,
                      attention_workspace, attention_most_workspace, attention, rotate_and_write,
                      recurrence_workspace, recurrence,
                      finish_logits, find_largest, sum_masses};
}
