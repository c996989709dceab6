// The C interface: contexts, packing, and the operations of a layer. Nothing here is global but constants: two contexts don't know of each other.

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

#include "kernels.h"
#include "registry.inc"

namespace penstock {
namespace {

// Grows to the largest request, and is given back with its context: a step allocates nothing. In large pages where the system has them: a block of rows
// touches one place in each row, and rows lie pages apart.
class Workspace {
 public:
  Workspace() = default;
  Workspace(const Workspace&) = delete;
  ~Workspace() { give_back(); }

  char* take(int64_t bytes) {
    if (bytes > size_) {
      give_back();
      const int64_t size = (bytes + kPage - 1) / kPage * kPage;
      void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);  // zeros; pages come when they are written
      if (mapped == MAP_FAILED) throw std::bad_alloc();
      madvise(mapped, size, MADV_HUGEPAGE);
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

// What a caller opens: an instruction set, and room to work in.
struct Context {
  const Kernels& kernels;
  Workspace activations, scales, group_sums, group_totals, hidden, unpacked, partials;
};

namespace {

int64_t padded(int64_t rows) { return (rows + 31) / 32 * 32; }

// How many inputs of a row share a scale.
int64_t row_group(const Weight& w) { return is_by_groups(w.type) ? w.group : w.padded_k; }

int8_t row_flip(const Context& context, const Weight& w) { return w.type == kInt8 ? context.kernels.flip : 0; }

// The inputs that the layer after a gated one reads, of tiles of its results.
int64_t hidden_inputs(const Weight& gate_up) { return (gate_up.n / 2 + 31) / 32 * 32; }

// Room for a number of each chunk of some rows of logits.
float* take_partials(Context& context, int64_t rows, int64_t vocab) {
  return reinterpret_cast<float*>(context.partials.take(rows * (vocab / kChunk + 1) * 4));
}

// Room for a layer's activations.
void* take_activations(Context& context, const Weight& w, int64_t rows) {
  return context.activations.take(padded(rows) * w.padded_k * (w.type == kBf16 ? 2 : 1));
}

uint16_t* take_hidden(Context& context, const Weight& gate_up, int64_t rows) {
  return reinterpret_cast<uint16_t*>(context.hidden.take(padded(rows) * hidden_inputs(gate_up) * 2));
}

// Room for what else a layer needs, which the gemm is told.
void begin(Context& context, const Weight& w, int64_t rows, Gemm& gemm) {
  gemm.weight = &w;
  gemm.rows = rows;
  const int64_t bytes = padded(rows) * (w.padded_k / row_group(w)) * 4;
  if (w.type != kBf16) gemm.scales = reinterpret_cast<float*>(context.scales.take(bytes));
  if (is_by_groups(w.type)) {
    gemm.sums = reinterpret_cast<int32_t*>(context.group_sums.take(bytes));
    gemm.totals = reinterpret_cast<float*>(context.group_totals.take(bytes));
  }
  gemm.workspace = context.unpacked.take(context.kernels.gemm_workspace(gemm));
}

// What follows is called by all threads of a region: whatever they share is there before, and once there is only looked at.

void run(Context& context, Gemm& gemm) {
  const Weight& w = *gemm.weight;
  if (is_by_groups(w.type)) {
    const int8_t* activations = static_cast<const int8_t*>(gemm.activations);
    context.kernels.sum_groups(activations, gemm.scales, gemm.rows, w.padded_k, w.group, const_cast<int32_t*>(gemm.sums), const_cast<float*>(gemm.totals));
  }
  context.kernels.gemm(gemm);
#pragma omp barrier
}

// The layer of the rows of x, normalized if there is a norm_weight.
void run_rows(Context& context, const Weight& w, const uint16_t* x, const uint16_t* norm_weight, float eps, int64_t rows, Gemm& gemm) {
  begin(context, w, rows, gemm);
  void* to = take_activations(context, w, rows);
  if (w.type == kBf16) {
    context.kernels.to_bf16(x, norm_weight, eps, rows, w.k, w.padded_k, static_cast<uint16_t*>(to));
  } else {
    context.kernels.to_int8(x, norm_weight, eps, rows, w.k, w.padded_k, row_group(w), row_flip(context, w), static_cast<int8_t*>(to),
                            const_cast<float*>(gemm.scales));
  }
  gemm.activations = to;
  run(context, gemm);
}

// The layer of rows that stand in tiles of bf16.
void run_tiles(Context& context, const Weight& w, const uint16_t* tiles, int64_t padded_from, int64_t rows, Gemm& gemm) {
  begin(context, w, rows, gemm);
  gemm.activations = tiles;
  if (w.type != kBf16) {
    int8_t* to = static_cast<int8_t*>(take_activations(context, w, rows));
    context.kernels.tiles_to_int8(tiles, padded_from, rows, w.padded_k, row_group(w), row_flip(context, w), to, const_cast<float*>(gemm.scales));
    gemm.activations = to;
  }
  run(context, gemm);
}

void run_mlp(Context& context, const Weight& gate_up, const Weight& down, const uint16_t* x, const uint16_t* norm_weight, float eps, int64_t rows,
             const uint16_t* residual, uint16_t* out) {
  Gemm first = {}, second = {};
  first.out = take_hidden(context, gate_up, rows);
  first.out_padded_k = hidden_inputs(gate_up);
  run_rows(context, gate_up, x, norm_weight, eps, rows, first);
  second.residual = residual;
  second.out = out;
  run_tiles(context, down, first.out, first.out_padded_k, rows, second);
}

// x + multiplier * norm(h), and h is in l.h; or what the layer before has added already.
void add_to_residual(Context& context, const Layers& l, const uint16_t* norm_weight, int64_t hidden) {
  if (l.h == nullptr) return;
  context.kernels.add_rows({l.x, l.h, norm_weight, l.eps, l.multiplier, l.rotation.tokens, hidden, l.x});
}

void run_layer(Context& context, const Layers& l, const Layer& layer) {
  const Norms& norms = layer.norms;
  const int64_t rows = l.rotation.tokens, hidden = layer.qkv->k;
  const uint16_t* residual = l.h == nullptr ? l.x : nullptr;
  Rotation rotation = l.rotation;
  Attention attention = l.attention;
  rotation.cache = attention.cache = layer.cache;
  rotation.cosines = l.cosines[layer.rope], rotation.sines = l.sines[layer.rope];
  rotation.q_norm = norms.q, rotation.k_norm = norms.k, rotation.is_norm_joint = norms.is_qk_joint;
  attention.window = layer.window;

  Gemm qkv = {}, output = {};
  qkv.out = rotation.qkv;
  run_rows(context, *layer.qkv, l.x, norms.before_attention, l.eps, rows, qkv);
  context.kernels.rotate_and_write(rotation);
  context.kernels.attention(attention);
#pragma omp barrier
  output.residual = residual;
  output.out = residual != nullptr ? l.x : l.h;
  run_rows(context, *layer.output, attention.out, nullptr, 0.0f, rows, output);
  add_to_residual(context, l, norms.after_attention, hidden);
  run_mlp(context, *layer.gate_up, *layer.down, l.x, norms.before_mlp, l.eps, rows, residual, output.out);
  add_to_residual(context, l, norms.after_mlp, hidden);
}

void reserve(Context& context, const Weight& w, int64_t rows) {
  Gemm gemm = {};
  begin(context, w, rows, gemm);
  take_activations(context, w, rows);
  if (w.is_gated) take_hidden(context, w, rows);
}

}  // namespace
}  // namespace penstock

#include "packing.inc"

using namespace penstock;

extern "C" {

// What this library was built from.
const char* penstock_source_id() { return PENSTOCK_SOURCE_ID; }

// The size of a structure of kernels.h that crosses this border; -1 for a name that is none.
int64_t penstock_size_of(const char* structure) {
  static constexpr struct {
    const char* name;
    int64_t size;
  } kSizes[] = {
      {"Weight", sizeof(Weight)},     {"CacheRows", sizeof(CacheRows)}, {"Attention", sizeof(Attention)}, {"Rotation", sizeof(Rotation)},
      {"Addition", sizeof(Addition)}, {"Largest", sizeof(Largest)},     {"Masses", sizeof(Masses)},
      {"Norms", sizeof(Norms)},       {"Layer", sizeof(Layer)},         {"Layers", sizeof(Layers)},
  };
  for (const auto& each : kSizes) {
    if (std::strcmp(each.name, structure) == 0) return each.size;
  }
  return -1;
}

// A context with the named instruction set, or with the best for "auto"; null if this machine does not have it. One thread at a time uses a context.
Context* penstock_open(const char* name) {
  const Kernels* kernels = find_kernels(name);
  return kernels != nullptr ? new Context{*kernels} : nullptr;
}

void penstock_close(Context* context) { delete context; }

const char* penstock_instruction_set(const Context* context) { return context->kernels.name; }

// What the workspaces have grown to.
int64_t penstock_workspace_bytes(const Context* context) {
  int64_t bytes = 0;
  for (const Workspace* each : {&context->activations, &context->scales, &context->group_sums, &context->group_totals, &context->hidden,
                                &context->unpacked, &context->partials}) {
    bytes += each->size();
  }
  return bytes;
}

// Grow the workspaces to what a layer of so many rows needs, with what an MLP needs between two.
void penstock_reserve(Context* context, const Weight* weight, int64_t rows) { reserve(*context, *weight, rows); }

// The same for attention of such a step; pointers to a layer's own are not followed.
void penstock_reserve_attention(Context* context, const Attention* attention) {
  context->partials.take(context->kernels.attention_most_workspace(*attention));
}

// The same for a search through such logits.
void penstock_reserve_search(Context* context, int64_t rows, int64_t vocab) { take_partials(*context, rows, vocab); }

// Pack source [n][k] bf16 (and bias [n] or null) into the weight's data, scales, sums and bias, which are the caller's: as it is, or quantized by
// columns.
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

// Pack codes [n][k], one in a byte, four-bit or int8, with their groups' scales (float16), zeros and minima (float16; or null): [n][ceil(k / group)].
void penstock_pack_groups(Context*, const Weight* weight, const uint8_t* codes, const uint16_t* group_scales, const int8_t* zeros, const uint16_t* minima,
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
void penstock_linear(Context* context, const Weight* weight, const uint16_t* x, const uint16_t* norm_weight, float eps, int64_t rows,
                     const uint16_t* residual, uint16_t* out, float* out_float) {
  if (rows == 0) return;  // a step of chunks that are not the last of their prompts wants no logits
  reserve(*context, *weight, rows);
#pragma omp parallel
  {
    Gemm gemm = {};
    gemm.residual = residual;
    gemm.out = out;
    gemm.out_float = out_float;
    run_rows(*context, *weight, x, norm_weight, eps, rows, gemm);
  }
}

// out = residual + down(activation(gate) * up), with gate and up from norm(x); residual or norm_weight null: without it.
void penstock_mlp(Context* context, const Weight* gate_up, const Weight* down, const uint16_t* x, const uint16_t* norm_weight, float eps, int64_t rows,
                  const uint16_t* residual, uint16_t* out) {
  if (rows == 0) return;
  reserve(*context, *gate_up, rows);
  reserve(*context, *down, rows);
#pragma omp parallel
  run_mlp(*context, *gate_up, *down, x, norm_weight, eps, rows, residual, out);
}

// queries and out [tokens] as in kernels.h; workspace is found here.
void penstock_attention(Context* context, const Attention* attention) {
  Attention a = *attention;
  a.workspace = context->partials.take(context->kernels.attention_workspace(a));
#pragma omp parallel
  context->kernels.attention(a);
}

void penstock_rotate_and_write(Context* context, const Rotation* rotation) {
#pragma omp parallel
  context->kernels.rotate_and_write(*rotation);
}

// A step's layers, one after the other, in one region: threads wait for each other, and for nothing else.
void penstock_run_layers(Context* context, const Layers* layers) {
  Layers l = *layers;
  if (l.rotation.tokens == 0) return;
  for (int64_t number = 0; number < l.num_layers; ++number) {
    for (const Weight* each : {l.layers[number].qkv, l.layers[number].output, l.layers[number].gate_up, l.layers[number].down}) {
      reserve(*context, *each, l.rotation.tokens);
    }
    l.attention.cache = l.layers[number].cache;
    l.attention.workspace = context->partials.take(context->kernels.attention_workspace(l.attention));
  }
#pragma omp parallel
  for (int64_t number = 0; number < l.num_layers; ++number) run_layer(*context, l, l.layers[number]);
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
}
