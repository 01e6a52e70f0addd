// SPDX-License-Identifier: Apache-2.0
//
// A harness that speaks flashmla-dense: it takes a generated call apart, writes it again as its own, asks what the call
// returns, and whether that is right, then whether it is with an LSE in base 2.   call ID FOLDER
#include <cmath>
#include <iostream>

#include "mla_oracle.hpp"

int main(int, char** argv) {
  using namespace mla_oracle;
  const Path folder = argv[2];
  const Options dialect = {{"dialect", "flashmla-dense"}};
  Server server;
  Oracle oracle;
  try {
    for (Client* client : {static_cast<Client*>(&server), static_cast<Client*>(&oracle)}) {
      client->generate(argv[1], folder / "call.safetensors", dialect);
      Tensors call = read(folder / "call.safetensors");
      std::vector<Tensor> arguments;
      for (const char* name : {"q", "k_cache", "block_table", "cache_seqlens"}) arguments.push_back(call.at(name));
      write(folder / "own.safetensors", arguments,
            {{"schema", "mla-oracle-call/1"}, {"dialect", "flashmla-dense"}, {"head_dim_v", "512"}, {"causal", "true"},
             {"softmax_scale", "0.0625"}});
      Tensors results = client->run(folder / "own.safetensors", folder / "actual.safetensors",
                                    {{"dialect", "flashmla-dense"}, {"precision", "f32"}});
      std::cout << client->check(folder / "own.safetensors", folder / "actual.safetensors", dialect).pass;
      Tensor lse = results.at("lse");
      std::vector<float> wrong(lse.as<float>(), lse.as<float>() + lse.count());
      for (float& value : wrong) value *= 1.442695f;
      write(folder / "wrong.safetensors", {results.at("out"), Tensor::view("lse", wrong.data(), lse.shape)});
      std::cout << client->check(folder / "own.safetensors", folder / "wrong.safetensors", dialect).pass << '\n';
    }
  } catch (const Error& error) {
    std::cerr << error.what() << '\n';
    return 3;
  }
}
