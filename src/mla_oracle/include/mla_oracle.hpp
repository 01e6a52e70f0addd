// SPDX-License-Identifier: Apache-2.0
//
// mla_oracle.hpp: ask mla-oracle, from an engine's own test harness, whether its MLA decode kernel is right.
// Headers only, C++17 and POSIX.   c++ -std=c++17 -I"$(mla-oracle info --include-dir)" harness.cpp
//
//   using namespace mla_oracle;
//   TempDir tmp;
//   Case::paged(Tensor::view("q", DType::bf16, q, {B, T, H, 576}),            // the engine's own memory
//               Tensor::view("kv_cache", DType::bf16, cache, {num_blocks, 64, 576}),
//               Tensor::view("block_table", table, {B, max_blocks}),          // const int32_t*
//               Tensor::view("seq_lens", lens, {B}), softmax_scale, 512)
//       .causal(true).write(tmp / "case.safetensors");
//   ...                                                                       // run the kernel
//   write(tmp / "actual.safetensors", {Tensor::view("out", out, {B, T, H, 512}),
//                                      Tensor::view("lse", lse, {B, T, H})});
//   Server oracle;                        // or Oracle: the same calls, one process per question
//   Verdict verdict = oracle.check(tmp / "case.safetensors", tmp / "actual.safetensors");
//   if (!verdict.pass) std::cerr << verdict.reason << '\n';
//
// Design
//   a. Tensors and their files are in mla_oracle_tensors.hpp. Here are cases, processes and answers, in that
//      order.
//   b. A crash never reads as a mismatch. `check` returns a Verdict only if exit code and JSON agree: 0 and
//      "pass", or 1 and "fail". All else is thrown, as BadInput, Unsupported, Environment or Crash, and
//      what() is the oracle's own line.
//   c. No shell. The command is one program, its arguments are argv. It is the constructor's argument, else
//      the environment variable MLA_ORACLE, else `mla-oracle` on PATH.
//   d. One poll loop serves a child's three streams, so that neither side waits for the other. Its stdin is
//      half a socket pair: to write to a dead child is an error, not SIGPIPE, and no signal setting is
//      touched. Descriptors are born CLOEXEC. Any thread may ask; a Server takes its questions in turn.
//   e. A child is reaped by its pid. A harness that ignores SIGCHLD, or waits for any child, takes the exit
//      code away: a Crash too.
#ifndef MLA_ORACLE_HPP
#define MLA_ORACLE_HPP

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <locale>
#include <mutex>
#include <optional>
#include <sstream>

#include "mla_oracle_tensors.hpp"

extern "C" { extern char** environ; }

namespace mla_oracle {

namespace detail {

inline std::string number(double value) {  // reads back as the same double; ignores the harness's locale
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text.precision(std::numeric_limits<double>::max_digits10);
  text << value;
  return text.str();
}

}  // namespace detail

// ---- cases

enum class LseBase { e, two };

// A call in an engine's own words (`mla-oracle dialects` lists them) is no Case but a file of its own: the tensors
// under the names of the call's arguments, its numbers in the metadata. Results are under the call's names, too.
//
//   write(tmp / "call.safetensors",
//         {Tensor::view("q", DType::bf16, q, {b, s_q, h, 576}), Tensor::view("k_cache", DType::bf16, k, {n, 64, 1, 576}),
//          Tensor::view("block_table", table, {b, max_blocks}), Tensor::view("cache_seqlens", lens, {b})},
//         {{"schema", "mla-oracle-call/1"}, {"dialect", "flashmla-dense"}, {"head_dim_v", "512"}, {"causal", "true"}});
//   oracle.check(tmp / "call.safetensors", tmp / "actual.safetensors", {{"dialect", "flashmla-dense"}});
//
// `generate` writes such a file and `run` what the call returns, with the same option.
//
// A whole layer is a file too: hidden_states and positions, and in the metadata where its config and weights are.
//
//   write(tmp / "layer.safetensors", {Tensor::view("hidden_states", x, {T, C}), Tensor::view("positions", p, {T})},
//         {{"schema", "mla-oracle-layer/1"}, {"config", "DeepSeek-V3"}, {"weights", "DeepSeek-V3"}, {"layer", "3"}});
//   oracle.check(tmp / "layer.safetensors", tmp / "dump.safetensors", {{"stages", true}});
class Case {  // one problem: arrays, and the conventions that give them meaning
 public:
  explicit Case(const std::string& kind) : metadata_{{"schema", "mla-oracle-case/1"}, {"kind", kind}} {}

  // q [B, T, H, D] or [B, H, D], kv_cache [num_blocks, block_size, D], block_table [B, max_blocks] i32,
  // seq_lens [B] i32. A key's value is its first head_dim_v elements. Unless told otherwise: causal, natural
  // logarithm, and an lse of -inf where a query sees no key.
  //
  // Beyond that, tensors by add() and conventions by set(), under the names of mla_oracle.cases.extensions:
  //   .add("topk_indices", indices)                     [B, T, K] i32, tokens of the request by position
  //   .set("window_left", "128").set("window_first", "4").set("softcap", "30").add("sinks", sinks)
  //   .set("cache_format", "fp8_ds_mla")                kv_cache is u8 [num_blocks, block_size, 656]
  //   .set("lse_axes", "BHT")                           the engine's lse is [B, H, T]
  // Indices that are slots need no table: start from Case("paged"), add q, kv_cache and topk_indices, and set
  // softmax_scale, head_dim_v, causal = false and topk_by = slot. `mla-oracle explain` says a case in words.
  static Case paged(Tensor q, Tensor kv_cache, Tensor block_table, Tensor seq_lens, double softmax_scale,
                    std::int64_t head_dim_v) {
    Case made("paged");
    made.add("q", std::move(q)).add("kv_cache", std::move(kv_cache));
    made.add("block_table", std::move(block_table)).add("seq_lens", std::move(seq_lens));
    made.set("softmax_scale", detail::number(softmax_scale)).set("head_dim_v", std::to_string(head_dim_v));
    return made.causal(true).lse_base(LseBase::e).empty_lse(-std::numeric_limits<double>::infinity());
  }

  Case& causal(bool on) { return set("causal", on ? "true" : "false"); }
  Case& lse_base(LseBase base) { return set("lse_base", base == LseBase::e ? "e" : "2"); }
  Case& empty_lse(double value) { return set("empty_lse", detail::number(value)); }
  Case& set(const std::string& convention, const std::string& value) {
    metadata_[convention] = value;
    return *this;
  }
  Case& add(const std::string& name, Tensor tensor) {
    tensor.name = name;
    tensors_.push_back(std::move(tensor));
    return *this;
  }
  void write(const Path& path) const { mla_oracle::write(path, tensors_, metadata_); }

 private:
  std::vector<Tensor> tensors_;
  Metadata metadata_;
};

// ---- a child process

namespace detail {

class Fd {  // owns a descriptor
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { reset(); }
  bool open() const { return fd_ >= 0; }
  int get() const { return fd_; }
  void reset() {
    if (open()) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_;
};

class Process {
 public:
  explicit Process(const std::vector<std::string>& command) {
    int pair[2];
    const auto own = [&](int failed) {
      if (failed) throw Environment(system_error("cannot connect to " + command[0]));
      std::array<Fd, 2> ends{Fd(pair[0]), Fd(pair[1])};
      for (Fd& fd : ends)  // 0 to 2 are for the child, even if the harness has closed its own
        if (fd.get() <= 2) fd = Fd(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 3));
      return ends;
    };
    auto stdin_ends = own(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair));
    auto stdout_ends = own(::pipe2(pair, O_CLOEXEC));
    auto stderr_ends = own(::pipe2(pair, O_CLOEXEC));

    std::vector<char*> argv;
    for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    sigset_t none;  // the child starts with no signal blocked, whatever this thread blocks
    sigemptyset(&none);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, stdin_ends[1].get(), 0);
    posix_spawn_file_actions_adddup2(&actions, stdout_ends[1].get(), 1);
    posix_spawn_file_actions_adddup2(&actions, stderr_ends[1].get(), 2);
    const int failed = posix_spawnp(&pid_, argv[0], &actions, &attributes, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    if (failed) throw Environment(system_error("cannot start " + command[0], failed));
    in_ = std::move(stdin_ends[0]);
    out_ = std::move(stdout_ends[0]);
    err_ = std::move(stderr_ends[0]);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  ~Process() {
    in_.reset();
    if (pid_ > 0) reap(patience_ms);
  }
  void kill() { ::kill(pid_, SIGKILL); }

  // Sends `text` and takes one line of stdout; none if the child has closed either of the two.
  std::optional<std::string> exchange(std::string_view text) {
    std::size_t end = out.find('\n');
    while (!text.empty() || end == out.npos) {
      const std::size_t searched = out.size();
      if (!in_.open() || !out_.open() || !pump(text, -1)) return std::nullopt;
      if (end == out.npos) end = out.find('\n', searched);
    }
    std::string line = out.substr(0, end);
    out.erase(0, end + 1);
    return line;
  }

  // Ends stdin, reads both outputs to their end, reaps: a wait status, or -1 if another wait has taken it. A
  // child that stays silent for `patience` milliseconds is killed; -1 waits for ever.
  int finish(int patience) {
    std::string_view nothing;
    in_.reset();
    while ((out_.open() || err_.open()) && pump(nothing, patience)) {}
    return reap(patience);
  }

  static constexpr int patience_ms = 2000;
  std::string out, err;  // read and not yet taken; of err, the end

 private:
  bool pump(std::string_view& text, int patience) {  // waits until a stream can move, and moves it
    pollfd ready[] = {{out_.get(), POLLIN, 0}, {err_.get(), POLLIN, 0}, {in_.get(), POLLOUT, 0}};
    const int moving = ::poll(ready, text.empty() ? 2 : 3, patience);
    if (moving <= 0) return moving < 0 && errno == EINTR;
    if (ready[0].revents) take(out_, out);
    if (ready[1].revents) take(err_, err);
    if (out.size() > (64u << 20)) throw Crash("the oracle printed more than 64 MiB on stdout", err);
    if (err.size() > (64u << 10)) err.erase(0, err.size() - (32u << 10));
    if (ready[2].revents) {
      const ssize_t n = ::send(in_.get(), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n >= 0) text.remove_prefix(static_cast<std::size_t>(n));
      else if (errno != EINTR && errno != EAGAIN) in_.reset();
    }
    return true;
  }
  static void take(Fd& from, std::string& into) {
    char buffer[1 << 16];
    const ssize_t n = ::read(from.get(), buffer, sizeof buffer);
    if (n > 0) into.append(buffer, static_cast<std::size_t>(n));
    else if (n == 0 || errno != EINTR) from.reset();
  }
  int reap(int patience) {
    out_.reset();
    err_.reset();
    int status = -1;
    for (int waited = 0;; waited += 5) {
      const pid_t got = ::waitpid(pid_, &status, patience < 0 ? 0 : WNOHANG);
      if (got == pid_ || (got < 0 && errno != EINTR)) break;
      if (waited == patience) kill();
      if (got == 0) ::poll(nullptr, 0, 5);
    }
    pid_ = -1;
    return status;
  }

  pid_t pid_ = -1;
  Fd in_, out_, err_;
};

[[noreturn]] inline void raise(int exit_code, const std::string& line, const std::string& log) {
  switch (exit_code) {
    case 2: throw BadInput(line, log);
    case 3: throw Unsupported(line, log);
    case 4: case 126: case 127: throw Environment(line, log);  // 126, 127: a wrapper did not find its command
    default: throw Crash(line, log);
  }
}

inline std::string last_line(std::string_view text) {
  constexpr std::string_view prefix = "mla-oracle: ";
  text = text.substr(0, text.find_last_not_of(" \r\n") + 1);
  text.remove_prefix(text.rfind('\n') + 1);
  return std::string(text.substr(0, prefix.size()) == prefix ? text.substr(prefix.size()) : text);
}

inline std::string no_answer(const std::string& op, int status, const std::string& words) {
  std::string line = "mla-oracle " + op + " gave no valid answer and ";
  if (status == -1) line += "another wait took its exit code";
  else if (WIFSIGNALED(status)) line += "was killed by signal " + std::to_string(WTERMSIG(status));
  else line += "ended with exit code " + std::to_string(WEXITSTATUS(status));
  return words.empty() ? line : line + ": " + words;
}

}  // namespace detail

// ---- asking

struct Option {  // as on the command line: {"numerics", "flashmla"}, {"tol", 1e-3}, {"stages", true}
  Option(std::string key, std::string text) : name(std::move(key)), value(text), json(Json::quote(text)) {}
  template <class Flag, std::enable_if_t<std::is_same_v<Flag, bool>, int> = 0>  // bool alone, not what converts to it
  Option(std::string key, Flag on) : name(std::move(key)), json(on ? "true" : "false") {}
  Option(std::string key, double x) : Option(std::move(key), detail::number(x)) {
    if (std::isfinite(x)) json = value;  // JSON has no other numbers; the oracle says what is wrong with a word
  }
  std::string name, value, json;  // of a flag, no value
};
using Options = std::vector<Option>;

struct Verdict {
  bool pass;
  std::string reason, json;  // json: all that `check` answered
};

class Client {  // what can be asked; `problem` is a case file or a case id
 public:
  virtual ~Client() = default;

  // Writes the case that an id stands for; with {"dialect", NAME}, the call that asks the same.
  void generate(const std::string& id, const Path& path, Options options = {}) {
    options.insert(options.begin(), {{"case", id}, {"out", absolute(path)}});
    ask("case", options);
  }

  // What a right kernel gives; the file `result` keeps it.
  Tensors run(const Path& problem, const Path& result, Options options = {}) {
    options.insert(options.begin(), {{"case", file_or_id(problem)}, {"out", absolute(result)}});
    ask("run", options);
    try {
      return read(result);
    } catch (const BadInput& error) {
      throw Crash(std::string("mla-oracle run ended well, but ") + error.what());
    }
  }

  // Whether the tensors in the file `actual` are right.
  Verdict check(const Path& problem, const Path& actual, Options options = {}) {
    options.insert(options.begin(), {{"case", file_or_id(problem)}, {"actual", absolute(actual)}});
    const Answer answer = ask("check", options);
    return {answer.exit_code == 0, answer.json.text_of("reason"), answer.json.text};
  }

 protected:
  struct Answer {
    int exit_code;
    Json json;
  };
  virtual Answer ask(const std::string& op, const Options& request) = 0;  // gives only sound answers

  static bool sound(const std::string& op, const Answer& answer) {
    if (answer.json.kind != Json::object) return false;
    if (op != "check") return answer.exit_code == 0;
    const std::string verdict = answer.json.text_of("verdict");
    return (verdict == "pass" && answer.exit_code == 0) || (verdict == "fail" && answer.exit_code == 1);
  }
  static std::string command_or_default(const std::string& command) {
    const char* set = std::getenv("MLA_ORACLE");
    return !command.empty() ? command : set && *set ? set : "mla-oracle";
  }

 private:
  static std::string absolute(const Path& path) { return std::filesystem::absolute(path).string(); }
  static std::string file_or_id(const Path& path) {
    std::error_code unknown;
    return std::filesystem::exists(path, unknown) ? absolute(path) : path.string();
  }
};

class Oracle : public Client {  // a process per question
 public:
  explicit Oracle(const std::string& command = {}) : command_(command_or_default(command)) {}

 private:
  Answer ask(const std::string& op, const Options& request) override {
    std::vector<std::string> argv{command_, op};
    for (auto [name, value, json] : request) {
      std::replace(name.begin(), name.end(), '_', '-');
      if (json == "true") argv.push_back("--" + name);
      else if (json != "false") argv.push_back(name == "case" || name == "actual" ? value : "--" + name + "=" + value);
    }
    detail::Process child(argv);
    const int status = child.finish(-1);
    Answer answer{WIFEXITED(status) ? WEXITSTATUS(status) : 70, {}};
    try {
      answer.json = Json::parse(child.out);
    } catch (const BadInput&) {  // answer.json is null, which is not sound
    }
    if (sound(op, answer)) return answer;
    const Json* error = answer.json.find("error");
    std::string words = error ? error->text_of("message") : detail::last_line(child.err);
    const bool its_own = WIFEXITED(status) && answer.exit_code > 1;
    if (!its_own || words.empty()) words = detail::no_answer(op, status, words);
    detail::raise(its_own ? answer.exit_code : 70, words, child.err);
  }

  std::string command_;
};

class Server : public Client {  // one process, `mla-oracle serve`, for all questions
 public:
  explicit Server(const std::string& command = {})
      : child_(new detail::Process({command_or_default(command), "serve"})) {}

 private:
  Answer ask(const std::string& op, const Options& request) override {
    const std::lock_guard<std::mutex> turn(mutex_);
    if (!child_) throw Crash("mla-oracle serve is gone since its last crash");
    auto child = std::move(child_);  // given back only after an answer
    const std::string id = std::to_string(++asked_);
    std::string line = "{\"id\":" + id + ",\"op\":" + Json::quote(op);
    for (const Option& option : request) line += "," + Json::quote(option.name) + ":" + option.json;
    const std::optional<std::string> answered = child->exchange(line + "}\n");
    if (!answered) {
      const int status = child->finish(detail::Process::patience_ms);
      const int code = WIFEXITED(status) && WEXITSTATUS(status) >= 126 ? WEXITSTATUS(status) : 70;
      detail::raise(code, detail::no_answer("serve", status, detail::last_line(child->err)), child->err);
    }
    bool ok = false;
    Answer answer{};
    try {
      const Json json = Json::parse(*answered);
      ok = json.at("ok", Json::boolean).text == "true";
      const std::string to = json.text_of("id");
      if (to != id && (ok || to != "null")) throw BadInput("it is to another question");
      answer.json = json.at(ok ? "result" : "error", Json::object);
      const Json& code = ok ? json.at("exit_code", Json::number) : answer.json.at("code", Json::number);
      answer.exit_code = static_cast<int>(code.integer());
      if (ok && !sound(op, answer)) throw BadInput("its exit code and its result do not agree");
    } catch (const BadInput& malformed) {
      child->kill();
      throw Crash("mla-oracle serve gave no valid answer: " + std::string(malformed.what()), child->err);
    }
    child_ = std::move(child);
    if (!ok) detail::raise(answer.exit_code, answer.json.text_of("message"), child_->err);
    return answer;
  }

  std::mutex mutex_;
  std::unique_ptr<detail::Process> child_;
  std::uint64_t asked_ = 0;
};

class TempDir {  // a fresh folder, gone with all it holds at the end of its scope
 public:
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "mla-oracle-XXXXXX").string();
    if (!::mkdtemp(name.data())) throw Environment(detail::system_error("cannot make " + name));
    path_ = name;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const Path& path() const { return path_; }
  Path operator/(const std::string& name) const { return path_ / name; }

 private:
  Path path_;
};

}  // namespace mla_oracle

#endif
