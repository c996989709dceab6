// Calls the library with random numbers, and prints a hash of each result: to be compared with
// what the same calls give elsewhere.
//   driver LIBRARY            the instruction set that the machine has
//   driver LIBRARY SET        the results of that set

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../../../services/compute/backends/cpu/kernels.h"

using namespace penstock;

namespace {

struct Context;
void* library;

template <typename Function>
Function* find(const char* name) {
  void* found = dlsym(library, (std::string("penstock_") + name).c_str());
  if (found == nullptr) std::printf("%s is missing\n", name), std::exit(1);
  return reinterpret_cast<Function*>(found);
}

uint64_t state = 1;

uint32_t random_bits() {  // Knuth's MMIX
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(state >> 32);
}

int64_t between(int64_t low, int64_t high) { return low + static_cast<int64_t>(random_bits() % static_cast<uint64_t>(high - low + 1)); }

// Of about a normal distribution.
float random_float() {
  float total = 0.0f;
  for (int i = 0; i < 4; ++i) total += static_cast<float>(random_bits() >> 8) * (1.0f / 16777216.0f) - 0.5f;
  return total;
}

uint16_t random_bf16() {
  const float value = random_float();
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>(bits >> 16);
}

// A float16 of 2^-8 to 2^-5.
uint16_t random_half() { return static_cast<uint16_t>((7 + random_bits() % 3) << 10 | (random_bits() & 1023)); }

template <typename Value, typename Of>
std::vector<Value> filled(int64_t count, Of&& of) {
  std::vector<Value> values(count);
  for (Value& each : values) each = static_cast<Value>(of());
  return values;
}

// Aligned as tensors are, with room behind.
struct Memory {
  std::vector<char> bytes;
  char* data;

  explicit Memory(int64_t count) : bytes(count + 256, 0), data(bytes.data() + (64 - reinterpret_cast<uintptr_t>(bytes.data()) % 64)) {}
};

void show(const std::string& name, const void* data, int64_t bytes) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (int64_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<const uint8_t*>(data)[i]) * 1099511628211u;
  std::printf("%s %016llx\n", name.c_str(), static_cast<unsigned long long>(hash));
}

// A layer whose parts are as kernels.h describes them, of random numbers.
struct Made {
  Weight weight = {};
  Memory data{0};
  std::vector<float> scales, bias;
  std::vector<int32_t> sums;
  std::vector<uint16_t> halves, minima;
  std::vector<int8_t> table, zeros, steps, minimum_steps;

  Made(Context* context, WeightType type, int64_t n, int64_t k, int64_t group, int64_t bits, bool has_more, bool is_gated) {
    Weight& w = weight;
    const bool has_steps = type == kPlanes && has_more;
    const int64_t unit = type == kBf16 ? 32 : std::max<int64_t>(group, has_steps ? kBlock : 64);
    w.type = type, w.n = n, w.k = k, w.is_gated = is_gated, w.group = group, w.bits = bits, w.offset = type == kPlanes ? (1 << bits) / 2 : 128;
    w.padded_n = is_gated ? (n / 2 + 15) / 16 * 32 : (n + 31) / 32 * 32;
    w.padded_k = (k + unit - 1) / unit * unit;
    w.activation = has_more ? kGeluTanh : kSilu;
    data = Memory(w.padded_n / kColumns * w.tile_bytes());
    w.data = data.data;
    bias = filled<float>(w.padded_n, random_float);
    w.bias = bias.data();
    const int64_t numbers = w.padded_n * w.padded_k / std::max<int64_t>(group, 1), of_blocks = has_steps ? w.padded_n * w.padded_k / kBlock : numbers;
    if (is_by_columns(type)) {
      scales.resize(w.padded_n), sums.resize(w.padded_n);
      w.scales = scales.data(), w.sums = sums.data();
    }
    if (type == kInt4) {
      steps.resize(numbers);
      w.steps = steps.data();
    }
    if (type == kBf16 || type == kInt8) {
      const auto source = filled<uint16_t>(n * k, random_bf16), of_bias = filled<uint16_t>(n, random_bf16);
      find<void(Context*, const Weight*, const uint16_t*, const uint16_t*)>("pack")(context, &w, source.data(), of_bias.data());
    } else if (type == kInt4) {
      const auto codes = filled<uint8_t>(n * k, [] { return between(0, 15); });
      const auto of_steps = filled<int8_t>(n * ((k + group - 1) / group), [] { return between(0, 255); });
      const auto column_scales = filled<float>(n, [] { return std::fabs(random_float()) + 0.01f; });
      find<void(Context*, const Weight*, const uint8_t*, const float*, const int8_t*, const uint16_t*)>("pack_int4")(context, &w, codes.data(), column_scales.data(),
                                                                                                                   of_steps.data(), nullptr);
    } else {
      for (int64_t i = 0; i < w.padded_n / kColumns * w.tile_bytes(); ++i) data.data[i] = static_cast<char>(random_bits());
      halves = filled<uint16_t>(of_blocks, random_half);
      w.group_scales = halves.data();
      w.lowest = -w.offset, w.highest = (1 << w.bits) - 1 - w.offset;
      if (type == kFourBit) {
        table = filled<int8_t>(16, [] { return between(-100, 100); });
        w.table = table.data(), w.lowest = -115, w.highest = 100;
        if (has_more) zeros = filled<int8_t>(numbers, [] { return between(0, 15); }), w.zeros = zeros.data();
      }
      if (has_more) minima = filled<uint16_t>(of_blocks, random_half), w.minima = minima.data();
      if (has_steps) {
        steps = filled<int8_t>(numbers, [] { return between(1, 63); }), w.steps = steps.data();
        minimum_steps = filled<int8_t>(numbers, [] { return between(0, 63); }), w.minimum_steps = minimum_steps.data();
      }
    }
  }
};

void show_linear(Context* context) {
  const auto linear = find<void(Context*, const Weight*, const uint16_t*, const uint16_t*, float, int64_t, const uint16_t*, uint16_t*, float*, int64_t)>("linear");
  const auto mlp = find<void(Context*, const Weight*, const Weight*, const uint16_t*, const uint16_t*, float, int64_t, const uint16_t*, uint16_t*)>("mlp");
  struct Form {
    const char* name;
    WeightType type;
    int64_t group, bits;
    bool has_more;
  };
  const Form forms[] = {
      {"bf16", kBf16, 64, 8, false},         {"int8", kInt8, 64, 8, false},         {"int4:32", kInt4, 32, 8, false},      {"int4:64", kInt4, 64, 8, false},      {"int4:128", kInt4, 128, 8, false},
      {"fourbit:32", kFourBit, 32, 8, false}, {"fourbit:64", kFourBit, 64, 8, true}, {"fourbit:128", kFourBit, 128, 8, true},
      {"int8:16", kInt8Groups, 16, 8, false}, {"int8:32", kInt8Groups, 32, 8, true}, {"planes2:16", kPlanes, 16, 2, true},  {"planes3:16", kPlanes, 16, 3, true},
      {"planes4:32", kPlanes, 32, 4, true},   {"planes5:32", kPlanes, 32, 5, true},  {"planes6:16", kPlanes, 16, 6, true},  {"planes4:64", kPlanes, 64, 4, false},
  };
  for (const Form& form : forms) {
    const int64_t k = 1100, n = 72;
    const Made plain(context, form.type, n, k, form.group, form.bits, form.has_more, false);
    const Made gated(context, form.type, 2 * n, k, form.group, form.bits, form.has_more, true), down(context, form.type, k, n, form.group, form.bits, form.has_more, false);
    for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 23, 40, 130}) {
      const auto x = filled<uint16_t>(rows * k, random_bf16), norm = filled<uint16_t>(k, random_bf16), residual = filled<uint16_t>(rows * n, random_bf16);
      std::vector<uint16_t> out(rows * n), hidden(rows * k);
      std::vector<float> wide(rows * n);
      const std::string name = std::string(form.name) + " rows=" + std::to_string(rows);
      linear(context, &plain.weight, x.data(), norm.data(), 1e-5f, rows, residual.data(), out.data(), nullptr, 0);
      show("linear " + name, out.data(), rows * n * 2);
      linear(context, &plain.weight, x.data(), nullptr, 0.0f, rows, nullptr, nullptr, wide.data(), 0);
      show("logits " + name, wide.data(), rows * n * 4);
      mlp(context, &gated.weight, &down.weight, x.data(), norm.data(), 1e-5f, rows, x.data(), hidden.data());
      show("mlp " + name, hidden.data(), rows * k * 2);
    }
  }
}

void show_attention(Context* context) {
  struct Case {
    int64_t dim, group, window;
    float cap;
  };
  for (const Case& each : {Case{64, 0, 0, 0.0f}, Case{128, 0, 40, 0.0f}, Case{64, 32, 0, 0.0f}, Case{64, 8, 0, 20.0f}, Case{96, 32, 33, 0.0f}, Case{32, 0, 0, 30.0f}}) {
    const int64_t num_heads = 6, num_kv_heads = 2, block_size = 16, num_blocks = 100, dim = each.dim, width = 90;
    const int64_t row_bytes = each.group == 0 ? dim * 2 : dim + dim / each.group * 2;
    Memory keys(num_blocks * num_kv_heads * block_size * row_bytes), values(num_blocks * num_kv_heads * block_size * row_bytes);
    const CacheRows cache = {keys.data, values.data, block_size, num_kv_heads, row_bytes, each.group};
    // one sequence of 1,300 tokens, in chunks
    std::vector<int64_t> table(width);
    for (int64_t i = 0; i < width; ++i) table[i] = (i * 37 + 5) % num_blocks;
    int64_t context_len = 0;
    for (const int64_t tokens : {1250, 1, 2, 3, 7, 20, 1}) {
      const int64_t stride = (2 * num_heads + 2 * num_kv_heads) * dim, gate_column = each.window > 0 ? stride - num_heads * dim : 0;
      auto qkv = filled<uint16_t>(tokens * stride, random_bf16);
      const auto norm = filled<uint16_t>(dim, random_bf16);
      const auto cosines = filled<float>(tokens * dim / 2, random_float), sines = filled<float>(tokens * dim / 2, random_float);
      std::vector<int64_t> slots(tokens);
      for (int64_t i = 0; i < tokens; ++i) slots[i] = table[(context_len + i) / block_size] * block_size + (context_len + i) % block_size;
      const Rotation rotation = {qkv.data(), stride, cosines.data(), sines.data(), norm.data(), nullptr, 1e-6f, slots.data(), cache, tokens, num_heads, dim, dim, 0};
      find<void(Context*, const Rotation*)>("rotate_and_write")(context, &rotation);
      context_len += tokens;
      const int64_t starts[2] = {0, tokens};
      std::vector<uint16_t> out(tokens * num_heads * dim);
      Attention attention = {};
      attention.queries = qkv.data(), attention.query_stride = stride, attention.gate_column = gate_column, attention.cache = cache;
      attention.query_starts = starts, attention.context_lens = &context_len, attention.block_tables = table.data();
      attention.num_sequences = 1, attention.table_width = width, attention.num_heads = num_heads, attention.head_dim = dim;
      attention.sharing = num_heads / num_kv_heads, attention.window = each.window, attention.scale = 0.125f, attention.cap = each.cap;
      attention.out = out.data(), attention.out_stride = num_heads * dim;
      find<void(Context*, const Attention*)>("attention")(context, &attention);
      const std::string name = "dim=" + std::to_string(dim) + " group=" + std::to_string(each.group) + " window=" + std::to_string(each.window) + " tokens=" + std::to_string(tokens);
      show("queries " + name, qkv.data(), tokens * stride * 2);
      show("attention " + name, out.data(), tokens * num_heads * dim * 2);
    }
    show("keys", keys.data, num_blocks * num_kv_heads * block_size * row_bytes);
    show("values", values.data, num_blocks * num_kv_heads * block_size * row_bytes);
  }
}

void show_recurrence(Context* context) {
  struct Case {
    const char* name;
    RecurrenceKind kind;
    int64_t num_heads, num_key_heads, key_dim, value_dim, norm_group;
  };
  for (const Case& each : {Case{"delta", kDelta, 4, 2, 64, 96, 96}, Case{"channel delta", kChannelDelta, 2, 2, 32, 80, 80}, Case{"mamba2", kMamba2, 4, 1, 48, 64, 256},
                           Case{"convolution", kConvolution, 1, 1, 16, 112, 112}}) {
    Recurrence r = {};
    r.kind = each.kind, r.num_heads = each.num_heads, r.num_key_heads = each.num_key_heads, r.key_dim = each.key_dim, r.value_dim = each.value_dim, r.kernel = 4;
    r.norm_group = r.norm_width = each.norm_group, r.is_gated_first = each.kind == kMamba2, r.has_sigmoid_gate = each.kind == kChannelDelta;
    r.most_step = 10.0f, r.eps = 1e-6f;
    const int64_t ring = 6, of_state = r.num_heads * r.key_dim * r.value_dim;
    std::vector<float> states(of_state);
    std::vector<uint16_t> inputs(ring * r.logged());
    const auto taps = filled<float>(4 * r.channels(), random_float), bias = filled<float>(r.channels(), random_float), skip = filled<float>(r.num_heads, random_float);
    const auto decay = filled<float>(r.num_heads, [] { return -std::fabs(random_float()); });
    const auto step_bias = filled<float>(r.num_heads * r.key_dim, random_float), norm = filled<float>(r.norm_group, random_float);
    r.layer = {states.data(), inputs.data(), ring, taps.data(), bias.data(), decay.data(), step_bias.data(), each.kind == kMamba2 ? skip.data() : nullptr, norm.data()};
    // all but the last token of a step are folded
    const int64_t slot = 0;
    int64_t start = 0, num_folded = 0;
    for (const int64_t tokens : {90, 1, 3}) {
      const int64_t starts[2] = {0, tokens}, fold_to = start + tokens - 1;
      const auto projected = filled<uint16_t>(tokens * r.width(), random_bf16);
      std::vector<uint16_t> out(tokens * r.num_heads * r.value_dim);
      r.query_starts = starts, r.starts = &start, r.slots = &slot, r.num_folded = &num_folded, r.fold_to = &fold_to, r.num_sequences = 1;
      r.projected = projected.data(), r.out = out.data(), r.out_stride = r.num_heads * r.value_dim;
      find<void(Context*, const Recurrence*)>("recurrence")(context, &r);
      show(std::string(each.name) + " tokens=" + std::to_string(tokens), out.data(), static_cast<int64_t>(out.size()) * 2);
      start += tokens, num_folded = fold_to;
    }
    show(std::string(each.name) + " states", states.data(), of_state * 4);
    show(std::string(each.name) + " inputs", inputs.data(), static_cast<int64_t>(inputs.size()) * 2);
  }
}

void show_search(Context* context) {
  const int64_t rows = 5, vocab = 9001, k = 40;
  auto logits = filled<float>(rows * vocab, [] { return 20.0f * random_float(); });
  find<void(Context*, float*, int64_t, float, float)>("finish_logits")(context, logits.data(), rows * vocab, 0.5f, 15.0f);
  show("finished logits", logits.data(), rows * vocab * 4);
  std::vector<float> values(rows * k);
  std::vector<int64_t> ids(rows * k);
  const Largest largest = {logits.data(), rows, vocab, k, values.data(), ids.data(), nullptr};
  find<void(Context*, const Largest*)>("find_largest")(context, &largest);
  show("largest", values.data(), rows * k * 4);
  show("their ids", ids.data(), rows * k * 8);
  const int64_t which[rows] = {4, 3, 2, 1, 0};
  std::vector<float> tops(rows), temperatures(rows, 0.7f);
  for (int64_t row = 0; row < rows; ++row) tops[row] = values[which[row] * k];
  double masses[rows];
  const Masses wanted = {logits.data(), vocab, rows, which, tops.data(), temperatures.data(), masses, nullptr};
  find<void(Context*, const Masses*)>("sum_masses")(context, &wanted);
  show("masses", masses, rows * 8);
  std::vector<int32_t> token_ids(ids.begin(), ids.end()), kept(rows, 40), positions(rows, 7);
  std::vector<double> tails(rows, 0.01), warmth(rows, 0.9);
  std::vector<uint64_t> seeds = {1, 2, 3, 4, 5};
  int64_t columns[rows];
  const Draws draws = {values.data(), token_ids.data(), rows, k, kept.data(), tails.data(), warmth.data(), seeds.data(), positions.data(), columns};
  find<void(Context*, const Draws*)>("decide")(context, &draws);
  show("draws", columns, rows * 8);
  auto x = filled<uint16_t>(rows * 500, random_bf16), h = filled<uint16_t>(rows * 500, random_bf16), norm = filled<uint16_t>(500, random_bf16);
  std::vector<uint16_t> out(rows * 500);
  const Addition addition = {x.data(), h.data(), norm.data(), 1e-5f, 0.3f, rows, 500, out.data()};
  find<void(Context*, const Addition*)>("add_rows")(context, &addition);
  show("sum of rows", out.data(), rows * 500 * 2);
}

}  // namespace

int main(int count, char** arguments) {
  library = dlopen(arguments[1], RTLD_NOW);
  if (library == nullptr) return std::printf("%s\n", dlerror()), 1;
  Context* context = find<Context*(const char*)>("open")(count > 2 ? arguments[2] : "auto");
  if (count == 2) return std::printf("%s\n", context == nullptr ? "none" : find<const char*(const Context*)>("instruction_set")(context)), 0;
  if (context == nullptr) return std::printf("this machine has no %s\n", arguments[2]), 1;
  show_linear(context);
  show_attention(context);
  show_recurrence(context);
  show_search(context);
}
