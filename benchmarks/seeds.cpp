// SPDX-License-Identifier: Apache-2.0
// The plain loops that engines use as their references, re-stated as peers for speed: seeds.py compiles this.
//
//   paged     one row at a time, online softmax; an element's stored dtype is asked for at every read
//   absorbed  the dense forms: whole rows of scores, softmax, sums in order; these stand for Rust at its
//   naive     release settings for this machine, whose loops keep the order of sums just as C++ does
//
// All are sequential, f32, one thread, libm's expf. No fast-math: a sum's order is its loop's.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

enum Dtype { f32 = 0, f16 = 1, bf16 = 2 };

struct Tensor {
  const void *data;
  Dtype dtype;
};

// Exported, so never inlined, as where conversions are compiled apart: one switch per element stays.
extern "C" {
float from_f16(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 1023u;
  if (exponent == 0) return std::copysign(std::ldexp(float(mantissa), -24), sign ? -1.0f : 1.0f);
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

float from_bf16(uint16_t h) {
  const uint32_t bits = uint32_t(h) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
}

namespace {

float element(const Tensor &x, int64_t index) {
  switch (x.dtype) {
    case f32: return static_cast<const float *>(x.data)[index];
    case f16: return from_f16(static_cast<const uint16_t *>(x.data)[index]);
    case bf16: return from_bf16(static_cast<const uint16_t *>(x.data)[index]);
  }
  throw std::invalid_argument("dtype is none of f32, f16, bf16");
}

float dot(const float *a, const float *b, size_t n, float sum = 0) {
  for (size_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

void add_scaled(float *sum, float factor, const float *x, size_t n) {
  for (size_t i = 0; i < n; ++i) sum[i] += factor * x[i];
}

void softmax(std::vector<float> &scores) {
  float most = -INFINITY, sum = 0;
  for (float s : scores) most = std::fmax(most, s);
  for (float &s : scores) sum += s = std::exp(s - most);
  for (float &s : scores) s *= 1 / sum;
}

}  // namespace

// q [B, H, D], cache [pages, block_size, D], table [B, max_blocks], seq_lens [B] -> out [B, H, V]
extern "C" void paged(const Tensor *q, const Tensor *cache, const int32_t *table,
                      const int32_t *seq_lens, float scale, float *out, int64_t B, int64_t H, int64_t D,
                      int64_t V, int64_t block_size, int64_t max_blocks) {
  std::vector<float> query(D), sums(V);
  for (int64_t row = 0; row < B * H; ++row) {
    const int64_t b = row / H;
    for (int64_t d = 0; d < D; ++d) query[d] = element(*q, row * D + d);
    std::fill(sums.begin(), sums.end(), 0.0f);
    float most = -INFINITY, weights = 0;
    for (int64_t i = 0; i < seq_lens[b]; ++i) {
      const int64_t page = table[b * max_blocks + i / block_size];
      const int64_t first = (page * block_size + i % block_size) * D;
      float score = 0;
      for (int64_t d = 0; d < D; ++d) score += query[d] * element(*cache, first + d);
      score *= scale;
      const float peak = score > most ? score : most;
      const float keep = std::isinf(most) ? 0.0f : std::exp(most - peak), weight = std::exp(score - peak);
      for (int64_t d = 0; d < V; ++d) sums[d] = sums[d] * keep + weight * element(*cache, first + d);
      weights = weights * keep + weight;
      most = peak;
    }
    for (int64_t d = 0; d < V; ++d) out[row * V + d] = weights > 0 ? sums[d] / weights : 0.0f;
  }
}

// One query token.
// q_nope [H, P], q_pe [H, R], c_kv [T, L], k_pe [T, R], w_uk [H, P, L], w_uv [H, V, L] -> out [H, V]
extern "C" void absorbed(const float *q_nope, const float *q_pe, const float *c_kv, const float *k_pe,
                         const float *w_uk, const float *w_uv, float scale, float *out, size_t H, size_t T,
                         size_t P, size_t R, size_t L, size_t V) {
  std::vector<float> query(L), latent(L), scores(T);
  for (size_t h = 0; h < H; ++h) {
    std::fill(query.begin(), query.end(), 0.0f);
    std::fill(latent.begin(), latent.end(), 0.0f);
    for (size_t p = 0; p < P; ++p) add_scaled(query.data(), q_nope[h * P + p], w_uk + (h * P + p) * L, L);
    for (size_t t = 0; t < T; ++t)
      scores[t] = scale * dot(q_pe + h * R, k_pe + t * R, R, dot(query.data(), c_kv + t * L, L));
    softmax(scores);
    for (size_t t = 0; t < T; ++t) add_scaled(latent.data(), scores[t], c_kv + t * L, L);
    for (size_t v = 0; v < V; ++v) out[h * V + v] = dot(w_uv + (h * V + v) * L, latent.data(), L);
  }
}

// The same arguments; keys and values of one head at a time, the whole cache long.
extern "C" void naive(const float *q_nope, const float *q_pe, const float *c_kv, const float *k_pe,
                      const float *w_uk, const float *w_uv, float scale, float *out, size_t H, size_t T,
                      size_t P, size_t R, size_t L, size_t V) {
  std::vector<float> keys(T * P), values(T * V), scores(T);
  for (size_t h = 0; h < H; ++h) {
    for (size_t t = 0; t < T; ++t) {
      for (size_t p = 0; p < P; ++p) keys[t * P + p] = dot(w_uk + (h * P + p) * L, c_kv + t * L, L);
      for (size_t v = 0; v < V; ++v) values[t * V + v] = dot(w_uv + (h * V + v) * L, c_kv + t * L, L);
    }
    for (size_t t = 0; t < T; ++t)
      scores[t] = scale * dot(q_pe + h * R, k_pe + t * R, R, dot(q_nope + h * P, keys.data() + t * P, P));
    softmax(scores);
    float *o = out + h * V;
    std::fill(o, o + V, 0.0f);
    for (size_t t = 0; t < T; ++t) add_scaled(o, scores[t], values.data() + t * V, V);
  }
}
