// The C interface: contexts, packing, and the operations of a layer. Nothing here is global but
// constants: two contexts don't know of each other.

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <new>

#include "kernels.h"
#include "registry.inc"

namespace penstock {
namespace {

// Grows to the largest request, and is freed with its context: a step allocates nothing. Uses large
// pages where the system has them: a block of rows touches one place in each row, and rows lie
// pages apart.
class Workspace {
 public:
  Workspace() = default;
  Workspace(const Workspace&) = delete;
  ~Workspace() { give_back(); }

  char* take(int64_t bytes) {
    if (bytes > size_) {
      give_back();
      const int64_t size = (bytes + kPage - 1) / kPage * kPage;
      // zeros; a page takes memory when it is written
      void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (mapped == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
      madvise(mapped, size, MADV_HUGEPAGE);
#endif
      data_ = static_cast<char*>(mapped);
      size_ = size;
    }
    return data_;
  }

  int64_t size() const { return size_; }

 private:
  void give_back() {
    if (data_ != nullptr) munmap(data_, size_);
    data_ = nullptr;
    size_ = 0;
  }

  static constexpr int64_t kPage = 2 << 20;
  char* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace

// What a layer needs besides its rows.
struct Room {
  Workspace activations, scales, group_sums, group_shifts, group_totals, hidden, gates, unpacked;
};

// What a caller opens: an instruction set, and its workspaces: one for all threads together, or one
// for each.
struct Context {
  const Kernels& kernels;
  std::deque<Room> rooms;
  Workspace partials, pieces;  // of attention and searches; of recurrences
};

namespace {

// Room for a number of each chunk of some rows of logits.
float* take_partials(Context& context, int64_t rows, int64_t vocab) {
  return reinterpret_cast<float*>(context.partials.take(rows * (vocab / kChunk + 1) * 4));
}

void* take_pieces(Context& context, const Recurrence& recurrence) { return context.pieces.take(context.kernels.recurrence_workspace(recurrence)); }

}  // namespace
}  // namespace penstock

#include "layers.inc"
#include "meeting.inc"
#include "packing.inc"

using namespace penstock;

extern "C" {

// Which sources this library was built from.
const char* penstock_source_id() { return PENSTOCK_SOURCE_ID; }

// The size of a structure of kernels.h that crosses this border; -1 for a name that is none.
int64_t penstock_size_of(const char* structure) {
  static constexpr struct {
    const char* name;
    int64_t size;
  } kSizes[] = {
      {"Weight", sizeof(Weight)},     {"CacheRows", sizeof(CacheRows)}, {"Attention", sizeof(Attention)}, {"Rotation", sizeof(Rotation)},
      {"Addition", sizeof(Addition)}, {"Largest", sizeof(Largest)},     {"Masses", sizeof(Masses)},
      {"Norms", sizeof(Norms)},       {"Layer", sizeof(Layer)},         {"Layers", sizeof(Layers)},       {"Draws", sizeof(Draws)},
      {"Group", sizeof(Group)},       {"Recurrence", sizeof(Recurrence)}, {"RecurrentLayer", sizeof(RecurrentLayer)},
  };
  for (const auto& each : kSizes) {
    if (std::strcmp(each.name, structure) == 0) return each.size;
  }
  return -1;
}

// A context with the named instruction set, or with the best for "auto"; null if this machine does
// not have it. One thread at a time uses a context.
Context* penstock_open(const char* name) {
  const Kernels* kernels = find_kernels(name);
  return kernels != nullptr ? new Context{*kernels, {}, {}, {}} : nullptr;
}

void penstock_close(Context* context) { delete context; }

const char* penstock_instruction_set(const Context* context) { return context->kernels.name; }

// The size of the workspaces now.
int64_t penstock_workspace_bytes(const Context* context) {
  int64_t bytes = context->partials.size() + context->pieces.size();
  for (const Room& room : context->rooms) {
    for (const Workspace* each :
         {&room.activations, &room.scales, &room.group_sums, &room.group_shifts, &room.group_totals, &room.hidden, &room.gates, &room.unpacked}) {
      bytes += each->size();
    }
  }
  return bytes;
}

// Grow the workspaces to what a layer of so many rows needs, with what an MLP needs between two.
void penstock_reserve(Context* context, const Weight* weight, int64_t rows) { reserve(*context, *weight, rows); }

// The same for attention of such a step; pointers to a layer's own are not followed.
void penstock_reserve_attention(Context* context, const Attention* attention) {
  context->partials.take(context->kernels.attention_most_workspace(*attention));
}

// The same for recurrences of such a step.
void penstock_reserve_recurrence(Context* context, const Recurrence* recurrence) { take_pieces(*context, *recurrence); }

// The same for a search through such logits.
void penstock_reserve_search(Context* context, int64_t rows, int64_t vocab) { take_partials(*context, rows, vocab); }

// Pack source [n][k] bf16 (and bias [n] or null) into the weight's data, scales, sums and bias,
// which are the caller's: as it is, or quantized by columns.
void penstock_pack(Context*, const Weight* weight, const uint16_t* source, const uint16_t* bias) {
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
void penstock_pack_columns(Context*, const Weight* weight, const int8_t* codes, const float* column_scales, const uint16_t* bias) {
  const Weight& w = *weight;
#pragma omp parallel for schedule(static)
  for (int64_t column = 0; column < w.padded_n; ++column) {
    const int64_t row = source_row(w, column);
    pack_int8(w, column, row, row >= 0 ? column_scales[row] : 0.0f, [&](int64_t i) { return codes[row * w.k + i]; });
    pack_bias(w, column, row, bias);
  }
}

// Pack four-bit codes [n][k], one in a byte, with scales [n], and steps and zeros as Weight has them,
// [n][ceil(k / group)].
void penstock_pack_int4(Context*, const Weight* weight, const uint8_t* codes, const float* column_scales, const int8_t* steps, const uint16_t* bias) {
  const Weight& w = *weight;
  const int64_t groups = (w.k + w.group - 1) / w.group;
#pragma omp parallel for schedule(static)
  for (int64_t column = 0; column < w.padded_n; ++column) {
    const int64_t row = source_row(w, column);
    int32_t sum = 0;
    for (int64_t i = 0; row >= 0 && i < w.padded_k; ++i) {
      const uint8_t of_group = i < groups * w.group ? static_cast<uint8_t>(steps[row * groups + i / w.group]) : 0, zero = of_group >> 4;
      const uint8_t code = i < w.k ? codes[row * w.k + i] : zero;
      pack_nibble(w, column, i, code);
      sum += (code - zero) * ((of_group & 15) + 1);
    }
    const_cast<float*>(w.scales)[column] = row >= 0 ? column_scales[row] : 0.0f;
    const_cast<int32_t*>(w.sums)[column] = sum;
    pack_numbers(w, column, row, w.group, steps, w.steps);
    pack_bias(w, column, row, bias);
  }
}

// Pack codes [n][k], one in a byte, four-bit or int8, with their groups' scales (float16), zeros
// and minima (float16; or null), [n][ceil(k / group)]; with steps, and minimum_steps where there are
// minima, of that shape, scales and minima are of blocks.
void penstock_pack_groups(Context*, const Weight* weight, const uint8_t* codes, const uint16_t* group_scales, const int8_t* zeros, const uint16_t* minima,
                          const int8_t* steps, const int8_t* minimum_steps, const uint16_t* bias) {
  const Weight& w = *weight;
  uint8_t* data = static_cast<uint8_t*>(const_cast<void*>(w.data));
#pragma omp parallel for schedule(static)
  for (int64_t column = 0; column < w.padded_n; ++column) {
    const int64_t row = source_row(w, column);
    for (int64_t i = 0; i < w.padded_k; ++i) {
      // activations beyond k are 0
      const uint8_t code = row >= 0 && i < w.k ? codes[row * w.k + i] : 0;
      if (w.type == kPlanes) {
        pack_planes(w, column, i, static_cast<uint8_t>(code + w.offset));
      } else if (w.type == kFourBit) {
        pack_nibble(w, column, i, code);
      } else {
        data[place(w, column, i, 4)] = code;
      }
    }
    const int64_t of_scale = w.steps != nullptr ? kBlock : w.group;
    pack_numbers(w, column, row, of_scale, group_scales, w.group_scales);
    pack_numbers(w, column, row, of_scale, minima, w.minima);
    pack_numbers(w, column, row, w.group, zeros, w.zeros);
    pack_numbers(w, column, row, w.group, steps, w.steps);
    pack_numbers(w, column, row, w.group, minimum_steps, w.minimum_steps);
    pack_bias(w, column, row, bias);
  }
}

// out = norm(x) * weight + bias, or residual + it; norm_weight null: x as it is. out null: float32
// to out_float. width: of rows of what is written, 0: as many as there are outputs.
void penstock_linear(Context* context, const Weight* weight, const uint16_t* x, const uint16_t* norm_weight, float eps, int64_t rows,
                     const uint16_t* residual, uint16_t* out, float* out_float, int64_t width) {
  if (rows == 0) return;  // a step of chunks that are not the last of their prompts wants no logits
  reserve(*context, *weight, rows);
#pragma omp parallel
  {
    Gemm gemm = {};
    gemm.residual = residual;
    gemm.out = out;
    gemm.out_float = out_float;
    gemm.width = width;
    run_rows(*context, *weight, x, norm_weight, eps, all_of(*context, rows), gemm);
  }
}

// out = residual + down(activation(gate) * up), with gate and up from norm(x); residual or
// norm_weight null: without it.
void penstock_mlp(Context* context, const Weight* gate_up, const Weight* down, const uint16_t* x, const uint16_t* norm_weight, float eps, int64_t rows,
                  const uint16_t* residual, uint16_t* out) {
  if (rows == 0) return;
  reserve(*context, *gate_up, rows);
  reserve(*context, *down, rows);
#pragma omp parallel
  run_mlp(*context, *gate_up, *down, x, norm_weight, eps, all_of(*context, rows), residual, out);
}

// queries and out [tokens] as in kernels.h; workspace is found here.
void penstock_attention(Context* context, const Attention* attention) {
  Attention a = *attention;
  a.workspace = context->partials.take(context->kernels.attention_workspace(a));
#pragma omp parallel
  context->kernels.attention(a);
}

// The results of a recurrent layer's projected rows, and what its next step needs of them; workspace is found here.
void penstock_recurrence(Context* context, const Recurrence* recurrence) {
  Recurrence r = *recurrence;
  r.workspace = take_pieces(*context, r);
#pragma omp parallel
  context->kernels.recurrence(r);
}

void penstock_rotate_and_write(Context* context, const Rotation* rotation) {
#pragma omp parallel
  context->kernels.rotate_and_write(*rotation);
}

// A step's layers, one after the other, in one parallel region: threads wait for each other only.
void penstock_run_layers(Context* context, const Layers* layers) {
  Layers l = *layers;
  if (l.rotation.tokens == 0) return;
  for (int64_t number = 0; number < l.num_layers; ++number) {
    for (const Weight* each : {l.layers[number].qkv, l.layers[number].output, l.layers[number].gate_up, l.layers[number].down}) {
      if (each != nullptr) reserve(*context, *each, l.rotation.tokens);
    }
    if (l.layers[number].recurrent.inputs != nullptr) l.recurrence.workspace = take_pieces(*context, l.recurrence);
    if (l.layers[number].qkv == nullptr || l.layers[number].recurrent.inputs != nullptr) continue;
    l.attention.workspace = context->partials.take(context->kernels.attention_workspace(attention_of(l, l.layers[number])));
  }
#pragma omp parallel
  run_layers(*context, l);
}

// out = x + multiplier * norm(h).
void penstock_add_rows(Context* context, const Addition* addition) {
#pragma omp parallel
  context->kernels.add_rows(*addition);
}

// logits [count] become cap * tanh(multiplier * logit / cap), where they are.
void penstock_finish_logits(Context* context, float* logits, int64_t count, float multiplier, float cap) {
  context->kernels.finish_logits(logits, count, multiplier, cap);
}

void penstock_find_largest(Context* context, const Largest* largest) {
  if (largest->rows == 0) return;
  Largest l = *largest;
  l.maxima = take_partials(*context, l.rows, l.vocab);
  context->kernels.find_largest(l);
}

void penstock_sum_masses(Context* context, const Masses* masses) {
  Masses m = *masses;
  m.partial = take_partials(*context, m.count, m.vocab);
  context->kernels.sum_masses(m);
}

void penstock_decide(Context*, const Draws* draws) { decide(*draws); }

// Returns when all ranks of a meeting have come: a Group's meet.
void penstock_meet(void* meeting, int64_t) { static_cast<Meeting*>(meeting)->wait(); }
}
