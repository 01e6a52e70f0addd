// SPDX-License-Identifier: Apache-2.0
//
// A harness of whole layers: it writes a layer case of its own, asks what every stage is, and which stage of a dump is
// the first that is wrong: none of the right one, and out where that is half.   dump MODEL STATES FOLDER
#include <iostream>

#include "mla_oracle.hpp"

int main(int, char** argv) {
  using namespace mla_oracle;
  const Path folder = argv[3], layer = folder / "layer.safetensors", actual = folder / "actual.safetensors";
  Server server;
  Oracle oracle;
  try {
    for (Client* client : {static_cast<Client*>(&server), static_cast<Client*>(&oracle)}) {
      const Tensors inputs = read(argv[2]);
      write(layer, {inputs.at("hidden_states"), inputs.at("positions")},
            {{"schema", "mla-oracle-layer/1"}, {"config", argv[1]}, {"weights", argv[1]}, {"layer", "1"}});
      Tensors stages = client->run(layer, folder / "expected.safetensors", {{"precision", "f32"}});
      const Tensor out = stages.at("out");
      std::vector<float> wrong(out.as<float>(), out.as<float>() + out.count());
      write(actual, {stages.at("q_a"), Tensor::view("out", wrong.data(), out.shape)});
      std::cout << client->check(layer, actual, {{"stages", true}, {"complete", false}}).pass;
      for (float& value : wrong) value /= 2;
      write(actual, {stages.at("q_a"), Tensor::view("out", wrong.data(), out.shape)});
      const Verdict verdict = client->check(layer, actual, {{"stages", true}});
      std::cout << verdict.pass << ' ' << verdict.reason.substr(0, 48) << '\n';
    }
  } catch (const Error& error) {
    std::cerr << error.what() << '\n';
    return 3;
  }
}
