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

Workspace activations, scales, group_sums, hidden, unpacked, partials;

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

// Room for the activations of a layer in int8, and what is known of each row.
int8_t* begin_int8(const Weight& w, int64_t rows, Gemm& gemm, float*& row_scales) {
  const int64_t padded_rows = (rows + 31) / 32 * 32;
  row_scales = reinterpret_cast<float*>(scales.take(padded_rows * 4));
  gemm.activations = activations.take(padded_rows * w.padded_k + 64);  // a half of a tile may be read from its middle
  gemm.scales = row_scales;
  return static_cast<int8_t*>(const_cast<void*>(gemm.activations));
}

void run(const Weight& w, int64_t rows, Gemm& gemm) {
  gemm.weight = &w;
  gemm.rows = rows;
  if (w.type == kFourBit) {
    int32_t* sums = reinterpret_cast<int32_t*>(group_sums.take((rows + 31) / 32 * 32 * (w.padded_k / w.group) * 4));
    chosen->sum_groups(static_cast<const int8_t*>(gemm.activations), rows, w.padded_k, w.group, sums);
    gemm.sums = sums;
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
    chosen->to_int8(x, norm_weight, eps, rows, w.k, w.padded_k, to, row_scales);
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
    chosen->tiles_to_int8(tiles, padded_from, rows, w.k, w.padded_k, to, row_scales);
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

// Pack source [n][k] bf16 (and bias [n] or null) into the weight's data, scales, sums and bias, which are the caller's.
void penstock_pack(const Weight* weight, const uint16_t* source, const uint16_t* bias) {
  const Weight& w = *weight;
  const int64_t depth = w.type == kInt8 ? 4 : 2;
#pragma omp parallel for schedule(static)
  for (int64_t column = 0; column < w.padded_n; ++column) {
    const int64_t row = source_row(w, column);
    const uint16_t* from = source + row * w.k;
    float largest = 0.0f;
    for (int64_t i = 0; row >= 0 && w.type == kInt8 && i < w.k; ++i) largest = std::max(largest, std::fabs(widen(from[i])));
    const float factor = largest > 0.0f ? 127.0f / largest : 0.0f;
    int32_t sum = 0;
    const int64_t tile = column / kColumns * w.padded_k * kColumns, lane = column % kColumns;
    for (int64_t i = 0; i < w.padded_k; ++i) {
      const int64_t at = tile + i / depth * depth * kColumns + lane * depth + i % depth;
      const bool is_there = row >= 0 && i < w.k;
      if (w.type == kInt8) {
        const int32_t value = is_there ? static_cast<int32_t>(std::nearbyint(widen(from[i]) * factor)) : 0;
        static_cast<int8_t*>(const_cast<void*>(w.data))[at] = static_cast<int8_t>(value);
        sum += value;
      } else {
        static_cast<uint16_t*>(const_cast<void*>(w.data))[at] = is_there ? from[i] : 0;
      }
    }
    if (w.type == kInt8) {
      const_cast<float*>(w.scales)[column] = largest / 127.0f;
      const_cast<int32_t*>(w.sums)[column] = sum;
    }
    if (w.bias != nullptr) const_cast<float*>(w.bias)[column] = row >= 0 && bias != nullptr ? widen(bias[row]) : 0.0f;
  }
}

// Pack four-bit codes [n][k], one in a byte, with their groups' scales (float16) and zeros (or null), both [n][ceil(k / group)].
void penstock_pack_codes(const Weight* weight, const uint8_t* codes, const uint16_t* group_scales, const int8_t* zeros, const uint16_t* bias) {
  const Weight& w = *weight;
  const int64_t unit = std::min<int64_t>(w.group, 64), source_groups = (w.k + w.group - 1) / w.group, groups = w.padded_k / w.group;
  const int64_t zero_code = std::find(w.table, w.table + 16, 0) - w.table;
#pragma omp parallel for schedule(static)
  for (int64_t column = 0; column < w.padded_n; ++column) {
    const int64_t row = source_row(w, column), lane = column % kColumns;
    uint8_t* tile = static_cast<uint8_t*>(const_cast<void*>(w.data)) + column / kColumns * w.padded_k * kColumns / 2;
    for (int64_t group = 0; group < groups; ++group) {
      const bool is_there = row >= 0 && group < source_groups;
      for (int64_t i = group * w.group; i < (group + 1) * w.group; ++i) {
        const int64_t code = is_there && i < w.k ? codes[row * w.k + i] : zero_code;
        const int64_t inside = i % unit, half = inside % (unit / 2);
        uint8_t& byte = tile[i / unit * unit * kColumns / 2 + half / 4 * 4 * kColumns + lane * 4 + half % 4];
        byte = inside < unit / 2 ? static_cast<uint8_t>((byte & 0xf0) | code) : static_cast<uint8_t>((byte & 0x0f) | code << 4);
      }
      const int64_t at = (column / kPair * groups + group) * kPair + column % kPair;
      const_cast<uint16_t*>(w.group_scales)[at] = is_there ? group_scales[row * source_groups + group] : 0;
      if (w.zeros != nullptr) const_cast<int8_t*>(w.zeros)[at] = is_there ? zeros[row * source_groups + group] : 0;
    }
    if (w.bias != nullptr) const_cast<float*>(w.bias)[column] = row >= 0 && bias != nullptr ? widen(bias[row]) : 0.0f;
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
