// The decision, as shared/model/decision.py and shared/model/noise.py define it: the same operations
// in the same order, so the same bits. This file is compiled without fused multiply-adds.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels.h"

namespace penstock {
namespace {

// noise.py's philox with the counter (position, 0, 0, 0), whose purpose is the token: 64 bits.
uint64_t row_bits(uint64_t seed, int32_t position) {
  uint32_t c0 = static_cast<uint32_t>(position), c1 = 0, c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * c0, product1 = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(product0);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return uint64_t{c0} << 32 | c1;
}

// token_bits and unit.
double uniform(uint64_t state, int64_t token_id) {
  uint64_t z = state + static_cast<uint64_t>(token_id + 1) * 0x9E3779B97F4A7C15;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  z ^= z >> 31;
  const uint64_t bits = z >> 12 | 0x3FF0000000000000;
  double found;
  std::memcpy(&found, &bits, sizeof(found));
  return found - (1.0 - 0x1p-53);
}

double logarithm(double x) {
  int64_t bits;
  std::memcpy(&bits, &x, sizeof(x));
  const int64_t k = (bits - 0x3FE6A09E667F3BCD) >> 52;
  bits -= static_cast<int64_t>(static_cast<uint64_t>(k) << 52);
  double m;
  std::memcpy(&m, &bits, sizeof(m));
  double s = (m - 1.0) / (m + 1.0);
  const double z = s * s;
  double p = 1.0 / 21.0;
  for (int n = 19; n > 1; n -= 2) p = p * z + 1.0 / n;
  s = s + s;
  return static_cast<double>(k) * 0.6931471805599453 + (s + s * (z * p));
}

double gumbel(double u) { return -logarithm(-logarithm(u)); }

int64_t decide_row(const Draws& d, int64_t row) {
  constexpr int64_t kTail = -1;
  const int64_t kept = d.num_kept[row];
  const double tail = d.tail_mass[row];
  if (kept == 1 && !(tail > 0.0)) return 0;
  const float* logits = d.logits + row * d.k;
  const uint64_t state = row_bits(d.seeds[row], d.positions[row]);
  double most = -std::numeric_limits<double>::infinity();
  int64_t column = 0;
  for (int64_t at = 0; at < kept; ++at) {
    const double shifted = (static_cast<double>(logits[at]) - static_cast<double>(logits[0])) / d.temperatures[row];
    const double sum = shifted + gumbel(uniform(state, d.token_ids[row * d.k + at]));
    if (sum > most) {  // of equal ones the first
      most = sum;
      column = at;
    }
  }
  return tail > 0.0 && logarithm(tail) + gumbel(uniform(state, kTail)) > most ? kept : column;
}

}  // namespace

void decide(const Draws& d) {
  for (int64_t row = 0; row < d.rows; ++row) d.columns[row] = decide_row(d, row);
}

}  // namespace penstock
