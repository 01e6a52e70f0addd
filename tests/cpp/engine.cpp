// SPDX-License-Identifier: Apache-2.0
//
// engine.cpp: the test harness of an engine in miniature. It has a paged MLA decode of its own and asks the
// oracle whether it is right: about a small case that it builds in memory, or about a case file it is given.
//
//   engine [CASE] [--oracle COMMAND] [--server] [--cache f32|bf16] [--lse-base-2] [--bug rope|tail|scale]
//
// Exit code: 0 pass, 1 mismatch, else that of the error: 2 bad input, 3 unsupported, 4 environment, 70 crash.
// To add a bug: plant it in `decode` and name it in tests/test_cpp.py.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "mla_oracle.hpp"

namespace {

using namespace mla_oracle;
using Index = std::int64_t;

struct Problem {
  Tensor q;            // [B, T, H, D] or [B, H, D]
  Tensor kv_cache;     // [num_blocks, block_size, D]
  Tensor block_table;  // [B, max_blocks]
  Tensor seq_lens;     // [B]
  double softmax_scale = 0;
  Index head_dim_v = 0;
  bool causal = true;
  LseBase lse_base = LseBase::e;
  double empty_lse = -INFINITY;
};

struct Result {
  std::vector<float> out;  // [B, T, H, V]
  std::vector<float> lse;  // [B, T, H]
};

// ---- the engine's own kernel

void load_row(const Tensor& from, Index row, Index width, float* to) {
  if (from.dtype == DType::f32) {
    std::copy_n(from.as<float>() + row * width, width, to);
  } else if (from.dtype == DType::bf16) {
    const std::uint16_t* bits = from.as<std::uint16_t>() + row * width;
    for (Index d = 0; d < width; ++d) {
      const std::uint32_t wide = std::uint32_t{bits[d]} << 16;
      std::memcpy(to + d, &wide, sizeof wide);
    }
  } else {
    throw Unsupported("this engine has no kernel for " + std::string(info(from.dtype).name));
  }
}

// One pass over the keys of a query token, all heads side by side; bugs are planted on request.
Result decode(const Problem& p, const std::string& bug) {
  const Index B = p.q.shape[0], D = p.q.shape.back(), H = p.q.shape.end()[-2];
  const Index T = p.q.shape.size() == 4 ? p.q.shape[1] : 1, V = p.head_dim_v;
  const Index block_size = p.kv_cache.shape[1], max_blocks = p.block_table.shape[1];
  const Index scored = bug == "rope" ? D - 64 : D;
  const float scale = static_cast<float>(bug == "scale" ? 1 / std::sqrt(D) : p.softmax_scale);
  Result result{std::vector<float>(B * T * H * V), std::vector<float>(B * T * H)};
  std::vector<float> query(H * D), key(D), max(H), sum(H);

  for (Index token = 0; token < B * T; ++token) {
    const Index b = token / T, t = token % T;
    float* out = &result.out[token * H * V];  // [H, V]
    float* lse = &result.lse[token * H];      // [H]
    Index visible = p.seq_lens.as<std::int32_t>()[b] - (p.causal ? T - 1 - t : 0);
    if (bug == "tail") --visible;
    for (Index h = 0; h < H; ++h) load_row(p.q, token * H + h, D, &query[h * D]);
    std::fill(max.begin(), max.end(), -INFINITY);
    std::fill(sum.begin(), sum.end(), 0.0f);

    for (Index j = 0; j < visible; ++j) {
      const Index block = p.block_table.as<std::int32_t>()[b * max_blocks + j / block_size];
      load_row(p.kv_cache, block * block_size + j % block_size, D, key.data());
      for (Index h = 0; h < H; ++h) {
        const float score = scale * std::inner_product(&key[0], &key[0] + scored, &query[h * D], 0.0f);
        const float highest = std::max(max[h], score);
        const float rescale = std::exp(max[h] - highest), weight = std::exp(score - highest);
        for (Index d = 0; d < V; ++d) out[h * V + d] = out[h * V + d] * rescale + weight * key[d];
        sum[h] = sum[h] * rescale + weight;
        max[h] = highest;
      }
    }

    for (Index h = 0; h < H; ++h) {
      const float base = p.lse_base == LseBase::two ? std::log(2.0f) : 1.0f;
      for (Index d = 0; d < V && visible > 0; ++d) out[h * V + d] /= sum[h];
      lse[h] = visible > 0 ? (max[h] + std::log(sum[h])) / base : static_cast<float>(p.empty_lse);
    }
  }
  return result;
}

// ---- cases

// A small ragged case in the engine's own memory. Pages are shuffled, and what no query may read is NaN.
class Small {
 public:
  explicit Small(DType dtype) {
    const Index B = 5, T = 2, H = 4, V = 128, D = V + 64, block_size = 16, max_blocks = 9;
    const Index num_blocks = B * max_blocks;
    lens_ = {37, 0, 64, 1, 130};
    std::mt19937 random(20261130);
    std::normal_distribution<float> normal;
    table_.resize(num_blocks);
    std::iota(table_.begin(), table_.end(), 0);
    std::shuffle(table_.begin(), table_.end(), random);

    q_.resize(B * T * H * D);
    std::generate(q_.begin(), q_.end(), [&] { return normal(random); });
    cache_.assign(num_blocks * block_size * D, NAN);
    for (Index b = 0; b < B; ++b) {
      for (Index j = 0; j < lens_[b]; ++j) {
        const Index block = table_[b * max_blocks + j / block_size];
        float* row = &cache_[(block * block_size + j % block_size) * D];
        std::generate_n(row, D, [&] { return normal(random); });
      }
    }
    problem.q = stored(q_, q_bits_, dtype, {B, T, H, D});
    problem.kv_cache = stored(cache_, cache_bits_, dtype, {num_blocks, block_size, D});
    problem.block_table = Tensor::view("block_table", table_.data(), {B, max_blocks});
    problem.seq_lens = Tensor::view("seq_lens", lens_.data(), {B});
    problem.softmax_scale = 0.1;
    problem.head_dim_v = V;
  }

  Problem problem;

 private:
  static Tensor stored(const std::vector<float>& values, std::vector<std::uint16_t>& bits, DType dtype,
                       std::vector<Index> shape) {
    if (dtype == DType::f32) return Tensor::view("", values.data(), std::move(shape));
    for (const float x : values) {  // to bf16, half to even
      std::uint32_t wide;
      std::memcpy(&wide, &x, sizeof wide);
      const std::uint32_t rounded = (wide + 0x7FFF + (wide >> 16 & 1)) >> 16;
      bits.push_back(static_cast<std::uint16_t>(std::isnan(x) ? 0x7FC0 : rounded));
    }
    return Tensor::view("", dtype, bits.data(), std::move(shape));
  }

  std::vector<float> q_, cache_;
  std::vector<std::uint16_t> q_bits_, cache_bits_;
  std::vector<std::int32_t> table_, lens_;
};

Problem problem_in(const Tensors& file) {
  const auto told = [&](const char* key) {
    const auto found = file.metadata.find(key);
    if (found == file.metadata.end()) throw BadInput(std::string("the case does not tell its ") + key);
    return found->second;
  };
  if (told("kind") != "paged" || file.count("page_ids"))
    throw Unsupported("this engine has plain paged decode only");
  Problem problem;
  problem.q = file["q"];
  problem.kv_cache = file["kv_cache"];
  problem.block_table = file["block_table"];
  problem.seq_lens = file["seq_lens"];
  problem.softmax_scale = std::stod(told("softmax_scale"));
  problem.head_dim_v = std::stoll(told("head_dim_v"));
  problem.causal = told("causal") == "true";
  problem.lse_base = told("lse_base") == "2" ? LseBase::two : LseBase::e;
  problem.empty_lse = std::stod(told("empty_lse"));
  return problem;
}

int judge(const std::vector<std::string>& arguments) {
  std::string command, file, bug;
  bool server = false;
  DType dtype = DType::bf16;
  LseBase lse_base = LseBase::e;
  for (auto argument = arguments.begin(); argument != arguments.end(); ++argument) {
    const auto value = [&] {
      if (argument + 1 == arguments.end()) throw BadInput(*argument + " needs a value");
      return *++argument;
    };
    if (*argument == "--server") server = true;
    else if (*argument == "--oracle") command = value();
    else if (*argument == "--bug") bug = value();
    else if (*argument == "--cache") dtype = value() == "f32" ? DType::f32 : DType::bf16;
    else if (*argument == "--lse-base-2") lse_base = LseBase::two;
    else file = *argument;
  }

  const TempDir tmp;
  const Path case_file = file.empty() ? tmp / "case.safetensors" : Path(file);
  const Path actual_file = tmp / "actual.safetensors";
  Small small(dtype);
  Problem& p = small.problem;
  if (file.empty()) {
    p.lse_base = lse_base;
    Case::paged(p.q, p.kv_cache, p.block_table, p.seq_lens, p.softmax_scale, p.head_dim_v)
        .lse_base(lse_base)
        .write(case_file);
  } else {
    p = problem_in(read(case_file));
  }

  const Result result = decode(p, bug);
  std::vector<Index> rows = p.q.shape, out_shape = p.q.shape;
  rows.pop_back();
  out_shape.back() = p.head_dim_v;
  write(actual_file, {Tensor::view("out", result.out.data(), out_shape),
                      Tensor::view("lse", result.lse.data(), rows)});

  std::unique_ptr<Client> oracle;
  if (server) oracle = std::make_unique<Server>(command);
  else oracle = std::make_unique<Oracle>(command);
  const Verdict verdict = oracle->check(case_file, actual_file);
  std::cout << (verdict.pass ? "pass: " : "mismatch: ") << verdict.reason << '\n';
  return verdict.pass ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return judge({argv + 1, argv + argc});
  } catch (const mla_oracle::Error& error) {
    std::cerr << "engine: " << error.what() << '\n';
    return error.exit_code;
  }
}
