// SPDX-License-Identifier: Apache-2.0
//
// probe.cpp: one program through which tests/test_cpp.py reaches every part of the headers. It is linked with
// engine.cpp, whose `main` is renamed: two translation units, one program.
//
//   probe read FILE...                        a line per file: what it holds, or the error
//   probe json FILE...                        a line per file: the value written again, or the error
//   probe write FILE                          every dtype, with metadata that needs escapes
//   probe typed FILE                          what that file's tensors may be read as
//   probe ask oracle|server COMMAND 'OP|A|B[|OPTION=VALUE]'...
//                                             one client, a line per answer; the value @9 is nine letters x
//   probe threads COMMAND                     eight threads, each with an Oracle, all with one Server, all talking
//   probe blocked COMMAND                     asks with every signal blocked; all must be so afterwards
//   probe interrupted COMMAND                 asks while a signal arrives every millisecond
//   probe engine ARGUMENTS                    engine.cpp
//
// Numbers have a decimal comma in this program's locale, as they may have in an engine's.
#include <sys/time.h>

#include <csignal>
#include <fstream>
#include <iostream>
#include <iterator>
#include <thread>

#include "mla_oracle.hpp"

using mla_oracle::Json;
using mla_oracle::Tensor;

int engine_main(int argc, char** argv);

struct Bf16 { std::uint16_t bits; };
template <> inline constexpr auto mla_oracle::dtype_of<Bf16> = mla_oracle::DType::bf16;

namespace {

struct Comma : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
};

using Words = std::vector<std::string>;

std::string name_of(const mla_oracle::Error& error) {
  switch (error.exit_code) {
    case 2: return "BadInput";
    case 3: return "Unsupported";
    case 4: return "Environment";
    default: return "Crash";
  }
}

template <class F> void line_or_error(const F& line) {
  try {
    std::cout << line() << std::endl;
  } catch (const mla_oracle::Error& error) {
    std::cout << name_of(error) << ": " << error.what() << std::endl;
  }
}

std::string contents(const std::string& path) {
  mla_oracle::Tensors file = mla_oracle::read(path);
  std::string line = "ok";
  for (const auto& [name, tensor] : file) {
    std::uint64_t sum = 0;  // every byte is looked at, for the sanitizers
    const auto* bytes = static_cast<const unsigned char*>(tensor.data);
    for (std::size_t i = 0; i < tensor.nbytes(); ++i) sum = sum * 31 + bytes[i];
    line += " " + Json::quote(name) + ":" + info(tensor.dtype).name;
    for (const std::int64_t extent : tensor.shape) line += ":" + std::to_string(extent);
    line += "=" + std::to_string(sum);
  }
  for (const auto& [key, value] : file.metadata) line += " " + Json::quote(key) + "=" + Json::quote(value);
  return line;
}

std::string spelt(const Json& json) {
  if (json.kind == Json::string) return Json::quote(json.text);
  if (json.kind != Json::array && json.kind != Json::object) return json.text;
  std::string line;
  for (std::size_t i = 0; i < json.items.size(); ++i) {
    if (i > 0) line += ",";
    if (json.kind == Json::object) line += Json::quote(json.keys[i]) + ":";
    line += spelt(json.items[i]);
  }
  return json.kind == Json::array ? "[" + line + "]" : "{" + line + "}";
}

void write_everything(const std::string& path) {
  static const unsigned char bytes[64] = {1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<Tensor> tensors;
  for (const mla_oracle::DTypeInfo& dtype : mla_oracle::dtypes) {
    if (std::string(dtype.name) == "bool" || std::string(dtype.name) == "bf16") continue;
    const auto of_table = static_cast<mla_oracle::DType>(&dtype - mla_oracle::dtypes);
    tensors.push_back(Tensor::view(dtype.name, of_table, bytes, {2, 3}));
  }
  const bool flags[] = {true, false, true};
  const Bf16 halves[] = {{0x3F80}, {0xC000}};
  const double scalar = 0.1;
  tensors.push_back(Tensor::view("bool", flags, {3}));
  tensors.push_back(Tensor::view("bf16", halves, {2}));
  tensors.push_back(Tensor::view("scalar", &scalar, {}));
  tensors.push_back(Tensor::view<std::int64_t>("empty", nullptr, {0, 7}));
  mla_oracle::write(path, tensors, {{"quoted \"\\\n\x01", "\xE2\x82\xAC"}, {"schema", "any"}});
}

void read_as(const std::string& path) {
  const mla_oracle::Tensors file = mla_oracle::read(path);
  line_or_error([&] { return std::to_string(file["bf16"].as<Bf16>()[1].bits); });
  line_or_error([&] { return std::to_string(file["bf16"].as<std::uint16_t>()[1]); });
  line_or_error([&] { return std::to_string(file["bf16"].as<std::int16_t>()[1]); });
  line_or_error([&] { return std::to_string(file["f32"].as<double>()[0]); });
  line_or_error([&] { return std::to_string(file["scalar"].as<double>()[0] == 0.1); });
  line_or_error([&] { return file["lse"].name; });
  const Tensor null = Tensor::view<float>("x", nullptr, {1});
  const Tensor negative = Tensor::view<float>("x", nullptr, {-1});
  for (const std::vector<Tensor>& wrong : {std::vector<Tensor>{file["f32"], file["f32"]}, {null}, {negative}})
    line_or_error([&] { return mla_oracle::write(path, wrong), "written"; });
}

std::unique_ptr<mla_oracle::Client> client(const std::string& kind, const std::string& command) {
  if (kind == "server") return std::make_unique<mla_oracle::Server>(command);
  return std::make_unique<mla_oracle::Oracle>(command);
}

std::string answer(mla_oracle::Client& oracle, std::string question) {
  Words words;
  for (std::size_t bar; (bar = question.find('|')) != question.npos; question.erase(0, bar + 1))
    words.push_back(question.substr(0, bar));
  words.push_back(question);
  mla_oracle::Options options;
  for (std::size_t i = 3; i < words.size(); ++i) {
    const std::size_t equals = words[i].find('=');
    const std::string key = words[i].substr(0, equals), value = words[i].substr(equals + 1);
    if (key.find("tol") != key.npos) options.emplace_back(key, std::stod(value));
    else options.emplace_back(key, value[0] == '@' ? std::string(std::stoul(value.substr(1)), 'x') : value);
  }
  if (words[0] == "generate") return oracle.generate(words[1], words[2]), "generated";
  if (words[0] == "run") {
    std::string line = "ran";
    for (const auto& [name, tensor] : oracle.run(words[1], words[2], options))
      line += " " + name + ":" + info(tensor.dtype).name;
    return line;
  }
  const mla_oracle::Verdict verdict = oracle.check(words[1], words[2], options);
  return (verdict.pass ? "pass " : "fail ") + verdict.reason + " | " + verdict.json;
}

int in_threads(const std::string& command) {
  mla_oracle::Server server(command);
  std::vector<int> passed(8);
  std::vector<std::thread> threads;
  for (int& mine : passed)
    threads.emplace_back([&] {
      mla_oracle::Oracle oracle(command);
      for (const int fd : {0, 1, 2})  // what a harness says, even to nobody, must not reach an oracle
        if (::write(fd, "talk\n", 5) != 5) continue;
      mine = server.check("case", "actual").pass + oracle.check("case", "actual").pass;
    });
  for (std::thread& thread : threads) thread.join();
  return passed == std::vector<int>(8, 2) ? 0 : 1;
}

int with_signals_blocked(const std::string& command) {
  struct sigaction before, after;
  sigset_t blocked, pending;
  sigfillset(&blocked);
  pthread_sigmask(SIG_SETMASK, &blocked, nullptr);
  sigaction(SIGPIPE, nullptr, &before);
  for (const char* kind : {"oracle", "server"})
    line_or_error([&] { return answer(*client(kind, command), "check|case|actual"); });
  sigaction(SIGPIPE, nullptr, &after);
  pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  sigpending(&pending);
  const bool kept = before.sa_handler == after.sa_handler && sigismember(&blocked, SIGPIPE);
  return kept && !sigismember(&pending, SIGPIPE) ? 0 : 1;
}

int interrupted(const std::string& command) {
  struct sigaction ring {};  // no SA_RESTART: every blocking call may fail with EINTR
  ring.sa_handler = [](int) {};
  sigaction(SIGALRM, &ring, nullptr);
  const itimerval every_millisecond{{0, 1000}, {0, 1000}};
  setitimer(ITIMER_REAL, &every_millisecond, nullptr);
  for (const char* kind : {"oracle", "server"})
    line_or_error([&] { return answer(*client(kind, command), "check|case|actual|backend=@100000"); });
  return 0;
}

int run(const Words& words) {
  const std::string& what = words.at(0);
  if (what == "read")
    for (std::size_t i = 1; i < words.size(); ++i) line_or_error([&] { return contents(words[i]); });
  if (what == "json")
    for (std::size_t i = 1; i < words.size(); ++i)
      line_or_error([&] {
        std::ifstream file(words[i], std::ios::binary);
        return spelt(Json::parse(std::string(std::istreambuf_iterator<char>(file), {})));
      });
  if (what == "write") line_or_error([&] { return write_everything(words.at(1)), "written"; });
  if (what == "typed") read_as(words.at(1));
  if (what == "threads") return in_threads(words.at(1));
  if (what == "blocked") return with_signals_blocked(words.at(1));
  if (what == "interrupted") return interrupted(words.at(1));
  if (what == "ask") {
    std::unique_ptr<mla_oracle::Client> oracle;
    line_or_error([&] { return oracle = client(words.at(1), words.at(2)), "ready"; });
    for (std::size_t i = 3; oracle && i < words.size(); ++i)
      line_or_error([&] { return answer(*oracle, words[i]); });
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::locale::global(std::locale(std::locale(), new Comma));
  if (argc > 1 && std::string(argv[1]) == "engine") return engine_main(argc - 1, argv + 1);
  return run({argv + 1, argv + argc});
}
