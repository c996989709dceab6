// The C interface: which instruction set, packing, and the operations of a layer. Called by one thread at a time.

#include <cpuid.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

#include "kernels.h"

namespace penstock {
namespace {

const Kernels* chosen = nullptr;

// Grows to the largest request, and is never given back: a step allocates nothing. In large pages where the system has them: a block of rows
// touches one place in each row, and rows lie pages apart.
class Workspace {
 public:
  char* take(int64_t bytes) {
    if (bytes > size_) {
      if (data_ != nullptr) munmap(data_, size_);
      size_ = (bytes + kPage - 1) / kPage * kPage;
      void* mapped = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);  // zeros
      if (mapped == MAP_FAILED) throw std::bad_alloc();
      madvise(mapped, size_, MADV_HUGEPAGE);
      data_ = static_cast<char*>(mapped);
    }
    return data_;
  }

 private:
  static constexpr int64_t kPage = 2 << 20;
  char* data_ = nullptr;
  int64_t size_ = 0;
};

Workspace activations, scales, group_sums, group_totals, hidden, unpacked, partials;

bool has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const unsigned wanted = (1u << 22) | (1u << 24) | (1u << 25);  // AMX-BF16, AMX-TILE, AMX-INT8
  if ((d & wanted) != wanted) return false;
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & 0x60000) != 0x60000) return false;                      // the system saves the tiles
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0;
}

const Kernels* find(const char* name) {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
  const bool any = std::strcmp(name, "auto") == 0;
  if ((any || std::strcmp(name, "amx") == 0) && avx512 && has_amx()) return &kAmx;
  if ((any || std::strcmp(name, "avx512") == 0) && avx512) return &kAvx512;
  if ((any || std::strcmp(name, "avx2") == 0) && avx2) return &kAvx2;
  return nullptr;
}

// How many inputs of a row share a scale.
int64_t row_group(const Weight& w) { return is_by_groups(w.type) ? w.group : w.padded_k; }

int8_t row_flip(const Weight& w) { return w.type == kInt8 ? chosen->flip : 0; }

// Room for the activations of a layer in int8, and what is known of each row.
int8_t* begin_int8(const Weight& w, int64_t rows, Gemm& gemm, float*& row_scales) {
  const int64_t padded_rows = (rows + 31) / 32 * 32;
  row_scales = reinterpret_cast<float*>(scales.take(padded_rows * (w.padded_k / row_group(w)) * 4));
  gemm.activations = activations.take(padded_rows * w.padded_k);
  gemm.scales = row_scales;
  return static_cast<int8_t*>(const_cast<void*>(gemm.activations));
}

void run(const Weight& w, int64_t rows, Gemm& gemm) {
  gemm.weight = &w;
  gemm.rows = rows;
  if (is_by_groups(w.type)) {
    const int64_t bytes = (rows + 31) / 32 * 32 * (w.padded_k / w.group) * 4;
    int32_t* sums = reinterpret_cast<int32_t*>(group_sums.take(bytes));
    float* totals = reinterpret_cast<float*>(group_totals.take(bytes));
    chosen->sum_groups(static_cast<const int8_t*>(gemm.activations), gemm.scales, rows, w.padded_k, w.group, sums, totals);
    gemm.sums = sums;
    gemm.totals = totals;
  }
  gemm.workspace = unpacked.take(chosen->gemm_workspace(gemm));
  chosen->gemm(gemm);
}

// The layer of the rows of x, normalized if there is a norm_weight.
void run_rows(const Weight& w, const uint16_t* x, const uint16_t* norm_weight, float eps, int64_t rows, Gemm& gemm) {
  if (w.type == kBf16) {
    uint16_t* to = reinterpret_cast<uint16_t*>(activations.take((rows + 31) / 32 * 32 * w.padded_k * 2));
    chosen->to_bf16(x, norm_weight, eps, rows, w.k, w.padded_k, to);
    gemm.activations = to;
  } else {
    float* row_scales;
    int8_t* to = begin_int8(w, rows, gemm, row_scales);
    chosen->to_int8(x, norm_weight, eps, rows, w.k, w.padded_k, row_group(w), row_flip(w), to, row_scales);
  }
  run(w, rows, gemm);
}

// The layer of rows that stand in tiles of bf16.
void run_tiles(const Weight& w, const uint16_t* tiles, int64_t padded_from, int64_t rows, Gemm& gemm) {
  if (w.type == kBf16) {
    gemm.activations = tiles;
  } else {
    float* row_scales;
    int8_t* to = begin_int8(w, rows, gemm, row_scales);
    chosen->tiles_to_int8(tiles, padded_from, rows, w.padded_k, row_group(w), row_flip(w), to, row_scales);
  }
  run(w, rows, gemm);
}

float widen(uint16_t value) {
  uint32_t bits = static_cast<uint32_t>(value) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

// Where column `column` of the packed weights comes from; -1: padding.
int64_t source_row(const Weight& w, int64_t column) {
  if (!w.is_gated) return column < w.n ? column : -1;
  const int64_t inter = w.n / 2, at = column / kPair * kColumns + column % kColumns;
  if (at >= inter) return -1;
  return column % kPair < kColumns ? at : inter + at;
}

// Where input i of a packed column stands, of tiles that hold `depth` inputs of each column side by side.
int64_t place(const Weight& w, int64_t column, int64_t i, int64_t depth) {
  return column / kColumns * w.padded_k * kColumns + i / depth * depth * kColumns + column % kColumns * depth + i % depth;
}

void pack_bias(const Weight& w, int64_t column, int64_t row, const uint16_t* bias) {
  if (w.bias != nullptr) const_cast<float*>(w.bias)[column] = row >= 0 && bias != nullptr ? widen(bias[row]) : 0.0f;
}

// A column of int8 values, with its scale and their sum; row -1: of zeros.
template <typename Value>
void pack_int8(const Weight& w, int64_t column, int64_t row, float scale, Value&& value) {
  int8_t* data = static_cast<int8_t*>(const_cast<void*>(w.data));
  int32_t sum = 0;
  for (int64_t i = 0; i < w.padded_k; ++i) {
    const int8_t some = row >= 0 && i < w.k ? value(i) : 0;
    data[place(w, column, i, 4)] = some;
    sum += some;
  }
  const_cast<float*>(w.scales)[column] = scale;
  const_cast<int32_t*>(w.sums)[column] = sum;
}

// Into a half of its byte; kernels.h has the order.
void pack_nibble(const Weight& w, int64_t column, int64_t i, uint8_t code) {
  const int64_t unit = std::min<int64_t>(w.group, 64), inside = i % unit, half = inside % (unit / 2);
  uint8_t* tile = static_cast<uint8_t*>(const_cast<void*>(w.data)) + column / kColumns * w.padded_k * kColumns / 2;
  uint8_t& byte = tile[i / unit * unit * kColumns / 2 + half / 4 * 4 * kColumns + column % kColumns * 4 + half % 4];
  byte = inside < unit / 2 ? static_cast<uint8_t>((byte & 0xf0) | code) : static_cast<uint8_t>((byte & 0x0f) | code << 4);
}

}  // namespace
}  // namespace penstock

using namespace penstock;

extern "C" {

// What this library was built from.
const char* penstock_source_id() { return PENSTOCK_SOURCE_ID; }

// Use the named instruction set, or the best for "auto". Returns its name, or null if this machine does not have it.
const char* penstock_choose(const char* name) {
  const Kernels* found = find(name);
  if (found == nullptr) return nullptr;
  chosen = found;
  return found->name;
}

// Pack source [n][k] bf16 (and bias [n] or null) into the weight's data, scales, sums and bias, which are the caller's: as it is, or quantized by
// columns.
void penstock_pack(const Weight* weight, const uint16_t* source, const uint16_t* bias) {
  const Weight& w = *weight;
#pragma omp parallel for schedule(static)
  for (int64_t column = 0; column < w.padded_n; ++column) {
    const int64_t row = source_row(w, column);
    const uint16_t* from = source + row * w.k;
    if (w.type == kBf16) {
      uint16_t* data = static_cast<uint16_t*>(const_cast<void*>(w.data));
      for (int64_t i = 0; i < w.padded_k; ++i) data[place(w, column, i, 2)] = row >= 0 && i < w.k ? from[i] : 0;
    } else {
      float largest = 0.0f;
      for (int64_t i = 0; row >= 0 && i < w.k; ++i) largest = std::max(largest, std::fabs(widen(from[i])));
      const float factor = largest > 0.0f ? 127.0f / largest : 0.0f;
      pack_int8(w, column, row, largest / 127.0f, [&](int64_t i) { return static_cast<int8_t>(std::nearbyint(widen(from[i]) * factor)); });
    }
    pack_bias(w, column, row, bias);
  }
}

// Pack int8 codes [n][k] with their columns' scales [n].
void penstock_pack_columns(const Weight* weight, const int8_t* codes, const float* column_scales, const uint16_t* bias) {
  const Weight& w = *weight;
#pragma omp parallel for schedule(static)
  for (int64_t column = 0; column < w.padded_n; ++column) {
    const int64_t row = source_row(w, column);
    pack_int8(w, column, row, row >= 0 ? column_scales[row] : 0.0f, [&](int64_t i) { return codes[row * w.k + i]; });
    pack_bias(w, column, row, bias);
  }
}

// Pack codes [n][k], one in a byte, four-bit or int8, with their groups' scales (float16), zeros and minima (float16; or null): [n][ceil(k / group)].
void penstock_pack_groups(const Weight* weight, const uint8_t* codes, const uint16_t* group_scales, const int8_t* zeros, const uint16_t* minima,
                          const uint16_t* bias) {
  const Weight& w = *weight;
  const int64_t source_groups = (w.k + w.group - 1) / w.group, groups = w.padded_k / w.group;
  uint8_t* data = static_cast<uint8_t*>(const_cast<void*>(w.data));
#pragma omp parallel for schedule(static)
  for (int64_t column = 0; column < w.padded_n; ++column) {
    const int64_t row = source_row(w, column);
    for (int64_t i = 0; i < w.padded_k; ++i) {
      const uint8_t code = row >= 0 && i < w.k ? codes[row * w.k + i] : 0;  // beyond, activations are 0
      w.type == kFourBit ? pack_nibble(w, column, i, code) : void(data[place(w, column, i, 4)] = code);
    }
    for (int64_t group = 0; group < groups; ++group) {
      const bool is_there = row >= 0 && group < source_groups;
      const int64_t at = (column / kPair * groups + group) * kPair + column % kPair, from = row * source_groups + group;
      const_cast<uint16_t*>(w.group_scales)[at] = is_there ? group_scales[from] : 0;
      if (w.zeros != nullptr) const_cast<int8_t*>(w.zeros)[at] = is_there ? zeros[from] : 0;
      if (w.minima != nullptr) const_cast<uint16_t*>(w.minima)[at] = is_there ? minima[from] : 0;
    }
    pack_bias(w, column, row, bias);
  }
}

// out = norm(x) * weight + bias, or residual + it; norm_weight null: x as it is. out null: float32 to out_float.
void penstock_linear(const Weight* weight, const uint16_t* x, const uint16_t* norm_weight, float eps, int64_t rows, const uint16_t* residual,
                     uint16_t* out, float* out_float) {
  if (rows == 0) return;  // a step of chunks that are not the last of their prompts wants no logits
  Gemm gemm = {};
  gemm.residual = residual;
  gemm.out = out;
  gemm.out_float = out_float;
  run_rows(*weight, x, norm_weight, eps, rows, gemm);
}

// queries and out [tokens] as in kernels.h; workspace is found here.
void penstock_attention(const Attention* attention) {
  Attention a = *attention;
  a.workspace = partials.take(chosen->attention_workspace(a));
  chosen->attention(a);
}

void penstock_rotate_and_write(const Rotation* rotation) { chosen->rotate_and_write(*rotation); }

void penstock_find_largest(const Largest* largest) {
  if (largest->rows == 0) return;
  Largest l = *largest;
  l.maxima = reinterpret_cast<float*>(partials.take(l.rows * (l.vocab / kChunk + 1) * 4));
  chosen->find_largest(l);
}

void penstock_sum_masses(const Masses* masses) {
  Masses m = *masses;
  m.partial = reinterpret_cast<float*>(partials.take(m.count * (m.vocab / kChunk + 1) * 4));
  chosen->sum_masses(m);
}

// out = x + multiplier * norm(h).
void penstock_add_rows(const Addition* addition) { chosen->add_rows(*addition); }

// logits [count] become cap * tanh(multiplier * logit / cap), where they are.
void penstock_finish_logits(float* logits, int64_t count, float multiplier, float cap) { chosen->finish_logits(logits, count, multiplier, cap); }

// out = residual + down(activation(gate) * up), with gate and up from norm(x); residual or norm_weight null: without it.
void penstock_mlp(const Weight* gate_up, const Weight* down, const uint16_t* x, const uint16_t* norm_weight, float eps, int64_t rows,
                  const uint16_t* residual, uint16_t* out) {
  if (rows == 0) return;
  Gemm first = {}, second = {};
  const int64_t inter = (gate_up->n / 2 + 31) / 32 * 32;
  first.out = reinterpret_cast<uint16_t*>(hidden.take((rows + 31) / 32 * 32 * inter * 2));
  first.out_padded_k = inter;
  run_rows(*gate_up, x, norm_weight, eps, rows, first);
  second.residual = residual;
  second.out = out;
  run_tiles(*down, first.out, inter, rows, second);
}
}
