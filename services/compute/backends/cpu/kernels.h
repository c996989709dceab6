// What an instruction set offers, and the weights it works on. One table of functions for each;
// registry.inc has them all.
#pragma once

#include <cstdint>

// OpenMP's functions. macOS has no header that declares them.
extern "C" {
int omp_get_thread_num();
int omp_get_num_threads();
int omp_get_max_threads();
int omp_get_level();
}

namespace penstock {

// Weights stand in tiles of 16 output columns: for each 4 (int8) or 2 (bf16) inputs in a row, the
// 16 columns' values side by side. All instruction sets read this one layout: AMX's B tiles and the
// operands of the dot-product instructions have it.
constexpr int64_t kColumns = 16;
constexpr int64_t kPair = 32;  // columns of the two tiles that are computed together

// A unit of 64 inputs (32 with groups of 32) of four-bit codes of a tile takes half the bytes: in each
// byte the low four bits are a code of the unit's first half, the high four one of its second.
//
// kInt8 has a scale for each column. So has kInt4, and is computed as kInt8 is: its int8 values are
// (code - zero) * step, with a zero and a step for each group of a column's inputs.
//
// With kFourBit, kInt8Groups and kPlanes each group has a scale, and perhaps a zero or a minimum:
// weight = (value - zero) * scale + minimum. The values of kFourBit stand in a table of 16 int8.
//
// kPlanes are codes of two to six bits, less an offset. A unit of 64 inputs of a tile is a plane of
// the codes' low four bits (two, of codes of less than four), and one of the bits above, if there
// are any. A plane of b bits is [8 b][16][4] bytes: the byte [quad][column][i] has in its lowest b
// bits those of input 4 * quad + i, in the next those of input 4 * (quad + 8 b) + i, and so on.
enum WeightType : int64_t { kBf16 = 0, kInt8 = 1, kInt4 = 2, kFourBit = 3, kInt8Groups = 4, kPlanes = 5 };
// What an instruction set multiplies in a GEMM by groups (its kValues): int8 values, or unsigned
// bytes, which are the values and as much as makes the lowest 0.
enum ValueKind { kSigned, kUnsigned, kUnsignedIfNarrow };
enum Activation : int64_t { kSilu = 0, kGeluTanh = 1, kClampedSwiglu = 2 };

constexpr int64_t kBlock = 256;

constexpr bool is_by_columns(int64_t type) { return type == kInt8 || type == kInt4; }
constexpr bool is_by_groups(int64_t type) { return type >= kFourBit; }

struct Weight {
  int64_t type;             // WeightType
  int64_t n, k;             // output and input features
  int64_t padded_n;         // a multiple of kPair
  int64_t padded_k;         // a multiple of 64 bytes, and of the group
  // columns alternate by tiles between gate and up: the output is the gate's activation times up,
  // half as wide
  int64_t is_gated;
  // [padded_n / 16][padded_k / (4 or 2)][16][4 or 2]; with fewer bits as described above
  const void* data;
  const float* scales;      // by columns: [padded_n]
  const int32_t* sums;      // by columns: [padded_n], of each column's int8 values
  const float* bias;        // [padded_n] or null
  int64_t group;            // by groups: inputs that share a scale, 16, 32, 64 or 128; kInt4: a step
  const int8_t* table;      // kFourBit: [16]
  // by groups: float16 [padded_n / kPair][padded_k / group][kPair]; with steps, of blocks of
  // kBlock inputs in the place of groups
  const uint16_t* group_scales;
  const int8_t* zeros;           // kFourBit: the same, or null; value - zero is an int8
  const uint16_t* minima;        // by groups: as group_scales, or null
  int64_t activation;            // Activation, of the gate
  // A layer of several matrices with the same inputs: the one whose outputs come next, or null. With
  // is_gate this one is a gate, and the next is what its activation is multiplied by.
  const Weight* next;
  int64_t is_gate;
  int64_t bits, offset;          // planes: of a code; a value is the code less the offset
  int64_t lowest, highest;       // by groups: values that there may be, less their zeros
  // [padded_n / kPair][padded_k / group][kPair], or null; by groups: a group's scale is so many of
  // its block's, and its minimum. kInt4: step - 1 in the low four bits, the zero in the high four
  const int8_t *steps, *minimum_steps;
  // not 0: activations stay bf16, and the weights become bf16 before each product
  int64_t is_widened;

  // of a weight
  int64_t data_bits() const { return type == kBf16 ? 16 : type == kInt4 || type == kFourBit ? 4 : type == kPlanes ? bits : 8; }
  bool takes_bf16() const { return type == kBf16 || is_widened; }
  // the inputs of a row of activations
  int64_t row_inputs() const { return is_widened ? (k + 31) / 32 * 32 : padded_k; }
  bool is_summed_by_groups() const { return is_by_groups(type) && !is_widened; }
  int64_t tile_bytes() const { return padded_k * kColumns * data_bits() / 8; }
  // of the layer that this is the first matrix of
  int64_t outputs() const { return is_gated ? n / 2 : next == nullptr || is_gate ? n : n + next->outputs(); }
};

// With y = activations * weights (+ bias): out = y, or residual + y, or, where the weight is gated,
// activation(gate) * up of y's columns, or, where there are gates, activation(gates) * y.
struct Gemm {
  const Weight* weight;
  // rows rounded up to 32, of padded_k int8 or bf16, zero beyond k; in tiles, see rows.inc
  const void* activations;
  const float* scales;      // of int8 activations: [rows]; by groups: [rows / 16][padded_k / group][16]
  // by groups: the same. What a group's sum begins with (sum_groups), and what is taken off again
  // when it is a float (AVX-512); and scales * the sum of the activations' int8 values
  const int32_t* sums;
  const float *shifts, *totals;
  int64_t rows;
  int64_t groups;            // by groups: of a row, padded_k / group
  int64_t width;             // of rows of out, out_float and residual, which begin with this matrix's outputs
  const float* gates;        // [rows][n] or null
  const uint16_t* residual;  // bf16 [rows][n] or null
  uint16_t* out;             // bf16 [rows][n], or [rows][n / 2] if gated; null: out_float
  // gated: not 0 if the result is to be in tiles, as bf16 activations of so many inputs
  int64_t out_padded_k;
  float* out_float;          // [rows][n]
  void* workspace;
};

constexpr int64_t kMaxHeadDim = 512;

// One layer's keys and values, or their int8 codes with a float16 scale for each group of
// dimensions. cache.inc has the layout of a head's part of a block.
struct CacheRows {
  // [blocks][num_kv_heads][block_size rows], so that what a head reads of a block lies in one piece
  char *keys, *values;
  int64_t block_size, num_kv_heads;  // block_size: a multiple of 16
  int64_t row_bytes;  // that a position of a head takes
  int64_t group;      // dimensions that share a scale; 0: bf16
};

// Two slabs of keys, or of values, that are multiplied together, and those that are read next.
// These are prefetched meanwhile, a line or two at a time: a processor drops prefetches that come
// all at once. `next` null: nothing is prefetched.
struct Slabs {
  const char *now[2], *next[2];

  Slabs at(int64_t bytes) const {
    if (next[0] == nullptr) return {{now[0] + bytes, now[1] + bytes}, {nullptr, nullptr}};
    return {{now[0] + bytes, now[1] + bytes}, {next[0] + bytes, next[1] + bytes}};
  }
};

// Causal attention of a step's new tokens over each sequence's cached ones, theirs included.
struct Attention {
  // bf16 [tokens][query_stride], of which the first num_heads * head_dim are q
  const uint16_t* queries;
  int64_t query_stride;
  int64_t gate_column;  // of those rows, from where on as many numbers are, by whose sigmoid the result is multiplied; 0: none
  CacheRows cache;
  const int64_t* query_starts;     // [num_sequences + 1]: where each sequence's tokens begin
  const int64_t* context_lens;     // [num_sequences]: tokens in the cache, the step's included
  const int64_t* block_tables;     // [num_sequences][table_width]
  const int64_t* block_lens;       // the same: of each block, how many of its positions are tokens; or null: all
  const int64_t* last_seen;        // [tokens]: the last position that each sees, at least its own and rising in a sequence; or null: its own
  int64_t num_sequences, table_width;
  int64_t num_heads, head_dim;
  // query heads that read each KV head. Some that read the first or the last one may be elsewhere; of
  // those of the first, the first num_before
  int64_t sharing, num_before;
  int64_t window;  // how many tokens back each sees, itself included; 0: all
  float scale;
  float cap;      // a score becomes cap * tanh(score / cap); 0: no cap
  const float* sinks;  // [num_heads], one more score of each softmax, without a value; or null
  uint16_t* out;  // bf16 [tokens][out_stride], of which num_heads * head_dim are written
  int64_t out_stride;
  void* workspace;
};

// Norms and rotates a step's q and k, in either order, and writes k and v to the cache.
struct Rotation {
  // bf16 [tokens][stride], of which the first are q, k and v, as far as they are there; q is changed in place
  uint16_t* qkv;
  int64_t stride;
  const float *cosines, *sines;   // [tokens][rotary_dim / 2]
  // [head_dim], or [heads * head_dim] if the norm is joint; or null
  const uint16_t *q_norm, *k_norm;
  float eps;
  const int64_t* slots;  // [tokens]
  CacheRows cache;
  int64_t tokens, num_heads, head_dim;
  int64_t rotary_dim;     // a multiple of 32; dimensions from there on are not rotated
  int64_t is_norm_joint;  // the norm is over all heads of q, and of k, not over each
  int64_t norms_after_rotation;  // of each head; else before
  int64_t kv_projections;  // 2: k and v; 1: k, before its norm, is also the values; 0: neither, others have written them
  int64_t has_value_norm;   // of each head of v, without a weight
};

// The recurrent layers of a model: recurrence.inc has their formulas.
enum RecurrenceKind : int64_t { kDelta = 0, kChannelDelta = 1, kMamba2 = 2, kConvolution = 3 };

// A recurrent layer's own. Weights are float32; heads are those of values.
struct RecurrentLayer {
  float* states;      // [slots][num_heads][key_dim][value_dim]; null: the kind has none
  uint16_t* inputs;   // bf16 [slots][ring][logged()]: of a sequence's last tokens, each at position % ring
  int64_t ring;
  const float* convolution;       // [kernel][channels()]: the last tap is the token's own
  const float* convolution_bias;  // [channels()] or null
  const float* decay;             // [num_heads]: rates, negative
  const float* step_bias;         // [num_heads], with a decay by channel [num_heads][key_dim]
  const float* skip;              // kMamba2: D, [num_heads]; or null
  const float* norm;              // [norm_width] or null: the results are gated only
};

// What is in the place of attention in a recurrent layer, of a step.
struct Recurrence {
  int64_t kind;                      // RecurrenceKind
  int64_t num_heads, num_key_heads;  // kConvolution: 1 each
  int64_t is_tiled;                  // a key head's values are num_key_heads apart; else they are neighbours
  int64_t key_dim, value_dim;        // multiples of 16; kConvolution: value_dim is the number of channels
  int64_t kernel;                    // the convolution's taps, from 2 to 8
  int64_t norm_group, norm_width;    // columns that have one norm, a multiple of 16; and how many weights it has in turn
  int64_t is_gated_first;            // the gate is before the norm
  int64_t has_sigmoid_gate;          // else it is SiLU's
  float least_step, most_step;       // kMamba2: of dt
  float eps;
  // of the step's sequences. A state holds num_folded tokens when the step begins, and fold_to after it; the
  // log has the others up to the step's first one, whose position is `starts`
  const int64_t *query_starts, *starts, *slots, *num_folded, *fold_to;
  int64_t num_sequences;
  // bf16 [tokens][width()]: what is convolved, what decays are made of, and gates.
  //   kDelta          queries, keys, values | b, a | z
  //   kChannelDelta   queries, keys, values | b, a [num_heads][key_dim] | z
  //   kMamba2         values, keys, queries | dt | z
  //   kConvolution    B, C, x; the log has B * x
  const uint16_t* projected;
  uint16_t* out;  // bf16 [tokens][out_stride], of which num_heads * value_dim are written
  int64_t out_stride;
  RecurrentLayer layer;
  void* workspace;

  int64_t channels() const { return kind == kConvolution ? value_dim : num_heads * value_dim + 2 * num_key_heads * key_dim; }
  int64_t logged() const { return channels() + (kind == kConvolution ? 0 : kind == kMamba2 ? num_heads : kind == kDelta ? 2 * num_heads : num_heads * (1 + key_dim)); }
  int64_t width() const { return kind == kConvolution ? 3 * value_dim : logged() + num_heads * value_dim; }
};

// out = scale * (x + multiplier * h), of which h is normalized first if there is a norm, and the sum rounded.
struct Addition {
  const uint16_t *x, *h;        // bf16 [rows][k]; x null: there is nothing to add to
  const uint16_t* norm_weight;  // [k] or null
  float eps, multiplier, scale;
  int64_t rows, k;
  uint16_t* out;  // bf16 [rows][k]
};

constexpr int64_t kChunk = 64;  // logits that share a maximum

// The k largest of each row of logits, by falling value, equal ones by rising id. If a row has a
// NaN anywhere, all its values are NaN.
struct Largest {
  const float* logits;  // [rows][vocab]
  int64_t rows, vocab, k;
  float* values;  // [rows][k]
  int64_t* ids;   // [rows][k]
  float* maxima;  // workspace
};

// The mass of some rows of logits.
struct Masses {
  const float* logits;  // [...][vocab]
  int64_t vocab, count;
  const int64_t* rows;        // [count]
  const float *largest, *temperatures;  // [count]
  double* out;                // [count]
  float* partial;             // workspace
};

// What decides the tokens of some rows of candidates: shared/model/decision.py's Draws.
struct Draws {
  const float* logits;       // [rows][k], falling
  const int32_t* token_ids;  // [rows][k]
  int64_t rows, k;
  const int32_t* num_kept;       // [rows]
  const double* tail_mass;       // [rows]
  const double* temperatures;    // [rows]
  const uint64_t* seeds;         // [rows]
  const int32_t* positions;      // [rows]
  int64_t* columns;  // [rows]
};

// Norms of a layer, [hidden] or null: a family has some of them.
struct Norms {
  const uint16_t *before_attention, *after_attention, *before_mlp, *after_mlp, *q, *k;
  int64_t is_qk_joint;
};

// One layer of a decoder.
struct Layer {
  const Weight *qkv, *output, *gate_up, *down;
  Norms norms;
  CacheRows cache;
  int64_t window;  // Attention's
  int64_t rope;    // whose cosines and sines
  const float* sinks;  // Attention's
  RecurrentLayer recurrent;  // inputs null: the layer has attention
  int64_t head_dim, sharing, gate_column, rotary_dim, kv_projections;  // Attention's and Rotation's
  float scalar;  // multiplies what leaves the layer
};

// The results of which each rank of a group has computed some columns.
enum Gathered : int64_t { kAttended = 0, kOutput = 1, kIntermediate = 2, kDown = 3 };

// The ranks that divide every layer's outputs among them, and where this one's columns are. The
// buffers are as wide as all ranks' columns; x of Layers is one of them where h is null, else h is.
struct Group {
  void (*meet)(void* with, int64_t gathered);  // returns when all ranks' columns are there
  void* meet_with;
  int64_t first_output, first_intermediate;  // columns, multiples of kPair
  const uint16_t* attended;  // bf16 [tokens][q heads * head_dim]; Attention's out is in it
  uint16_t* intermediate;    // in tiles of bf16, of padded_intermediate inputs
  int64_t padded_intermediate;
};

// All layers of a step. rotation, attention and recurrence hold what all layers have in common; each layer
// fills in the rest. In a group a layer lacks what this rank has no columns of.
struct Layers {
  const Layer* layers;
  int64_t num_layers, hidden_size;
  uint16_t* x;  // bf16 [tokens][hidden]: of the embedding, and then of the last layer
  // bf16 [tokens][hidden]: normalized or multiplied before it is added to x; null: nothing is
  uint16_t* h;
  float eps, multiplier;  // x + multiplier * h
  const float *const *cosines, *const *sines;  // by rope
  Rotation rotation;
  Attention attention;
  Recurrence recurrence;
  const Group* group;  // null: this process computes all
};

// The functions from gemm to recurrence are called by all threads of a parallel region (or by
// one thread without a region), with the same arguments. They return when the caller's part is
// done; those of rows wait for all threads.
struct Kernels {
  const char* name;
  // flips bits of activations for weights by columns: -128 where they are multiplied as unsigned bytes, else 0
  int8_t flip;
  int64_t (*gemm_workspace)(const Gemm&, int64_t threads);  // bytes
  void (*gemm)(const Gemm&);
  // norm_weight null: no normalization. Rows of x [rows][k] bf16 become activations.
  void (*to_bf16)(const uint16_t* x, const uint16_t* norm_weight, float eps, int64_t rows, int64_t k, int64_t padded_k, uint16_t* out);
  // group: inputs that share a scale, padded_k where it is the whole row; scales as in Gemm. flip: bits of each byte that are flipped.
  void (*to_int8)(const uint16_t* x, const uint16_t* norm_weight, float eps, int64_t rows, int64_t k, int64_t padded_k, int64_t group, int8_t flip,
                  int8_t* out, float* scales);
  // The same from rows that stand in tiles of bf16, with padded_from inputs.
  void (*tiles_to_int8)(const uint16_t* tiles, int64_t padded_from, int64_t rows, int64_t padded_k, int64_t group, int8_t flip, int8_t* out, float* scales);
  // of activations and scales, which are shortened
  void (*sum_groups)(const Gemm&, float* scales, int32_t* sums, float* shifts, float* totals);
  void (*add_rows)(const Addition&);
  int64_t (*attention_workspace)(const Attention&);  // bytes
  // the most of all steps of so many tokens, with no longer context
  int64_t (*attention_most_workspace)(const Attention&);
  void (*attention)(const Attention&);
  void (*rotate_and_write)(const Rotation&);
  int64_t (*recurrence_workspace)(const Recurrence&);  // bytes
  void (*recurrence)(const Recurrence&);
  // These begin a region of their own.
  // cap * tanh(multiplier * logit / cap); a cap of 0 is none
  void (*finish_logits)(float* logits, int64_t count, float multiplier, float cap);
  void (*find_largest)(const Largest&);
  void (*sum_masses)(const Masses&);
};

extern const Kernels kAvx2, kAvxVnni, kAvx512Vnni, kAvx512, kAmx;  // x86-64
extern const Kernels kNeon, kI8mm;                                 // aarch64

// The same bits on every instruction set: draw.cpp.
void decide(const Draws&);

}  // namespace penstock
