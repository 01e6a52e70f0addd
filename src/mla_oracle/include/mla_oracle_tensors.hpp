// SPDX-License-Identifier: Apache-2.0
//
// mla_oracle_tensors.hpp: tensors in memory and in safetensors files, for mla_oracle.hpp, which includes it.
//
//   Tensors file = read("case.safetensors");
//   const std::uint16_t* q = file["q"].as<std::uint16_t>();                      // bf16 as its bits
//   write("actual.safetensors", {Tensor::view("out", out, {B, H, 512})});        // const float*: f32
//
// Design
//   a. A Tensor is a view of the caller's memory, or shares ownership of what `read` read. Nothing is
//      copied on the way to a file.
//   b. A file is u64 length of the header, the header (JSON), the data without gaps. It is written under a
//      temporary name, then renamed. Its data starts at a multiple of 64, the widest elements first, so that
//      every tensor is aligned to its own element when the file is mapped.
//   c. A file is not trusted: every length and offset is checked before it is used, and what does not fit
//      is a BadInput with one line that names the file.
#ifndef MLA_ORACLE_TENSORS_HPP
#define MLA_ORACLE_TENSORS_HPP

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>
#include <vector>

namespace mla_oracle {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "safetensors data is little-endian");

using Path = std::filesystem::path;
using Metadata = std::map<std::string, std::string>;

// ---- errors: one class per exit code of the command line

struct Error : std::runtime_error {  // what() is one line
  Error(int code, std::string line, std::string tail)
      : std::runtime_error(one_line(std::move(line))), exit_code(code), log(std::move(tail)) {}
  int exit_code;
  std::string log;  // the end of the oracle's stderr: a traceback, if there was one

 private:
  static std::string one_line(std::string text) {
    std::replace_if(text.begin(), text.end(), [](unsigned char c) { return c < 0x20; }, ' ');
    return text;
  }
};
template <int Code> struct ErrorOf : Error {
  explicit ErrorOf(const std::string& line, std::string tail = {}) : Error(Code, line, std::move(tail)) {}
};
struct BadInput : ErrorOf<2> { using ErrorOf::ErrorOf; };
struct Unsupported : ErrorOf<3> { using ErrorOf::ErrorOf; };
struct Environment : ErrorOf<4> { using ErrorOf::ErrorOf; };
struct Crash : ErrorOf<70> { using ErrorOf::ErrorOf; };

// ---- tensors

enum class DType {
  f64, f32, f16, bf16, e4m3, e4m3fnuz, e5m2, e8m0, e2m1, i64, i32, i16, i8, u64, u32, u16, u8, boolean
};

struct DTypeInfo { const char *name, *tag; unsigned bits; };  // tag: safetensors' own name
inline constexpr DTypeInfo dtypes[] = {                       // in the order of DType
    {"f64", "F64", 64}, {"f32", "F32", 32}, {"f16", "F16", 16}, {"bf16", "BF16", 16}, {"e4m3", "F8_E4M3", 8},
    {"e4m3fnuz", "F8_E4M3FNUZ", 8}, {"e5m2", "F8_E5M2", 8}, {"e8m0", "F8_E8M0", 8}, {"e2m1", "F4", 4}, {"i64", "I64", 64}, {"i32", "I32", 32},
    {"i16", "I16", 16}, {"i8", "I8", 8}, {"u64", "U64", 64}, {"u32", "U32", 32}, {"u16", "U16", 16},
    {"u8", "U8", 8}, {"bool", "BOOL", 8}};
constexpr const DTypeInfo& info(DType dtype) { return dtypes[static_cast<int>(dtype)]; }

template <class T> constexpr DType arithmetic_dtype() {
  static_assert(std::is_arithmetic_v<T> && sizeof(T) <= 8, "specialise mla_oracle::dtype_of for this type");
  constexpr int steps_down = sizeof(T) == 8 ? 0 : sizeof(T) == 4 ? 1 : sizeof(T) == 2 ? 2 : 3;
  constexpr DType integer = std::is_signed_v<T> ? DType::i64 : DType::u64;
  constexpr DType widest = std::is_floating_point_v<T> ? DType::f64 : integer;
  return std::is_same_v<T, bool> ? DType::boolean : static_cast<DType>(static_cast<int>(widest) + steps_down);
}
// For a half type of your own:
//   template <> inline constexpr auto mla_oracle::dtype_of<half_t> = mla_oracle::DType::f16;
template <class T> inline constexpr DType dtype_of = arithmetic_dtype<T>();

struct Tensor {  // row-major, contiguous
  std::string name;
  DType dtype;
  std::vector<std::int64_t> shape;
  const void* data;
  std::shared_ptr<const void> owner;  // null for a view, whose memory must outlive it

  static Tensor view(std::string name, DType dtype, const void* data, std::vector<std::int64_t> shape) {
    return {std::move(name), dtype, std::move(shape), data, nullptr};
  }
  template <class T> static Tensor view(std::string name, const T* data, std::vector<std::int64_t> shape) {
    return view(std::move(name), dtype_of<T>, data, std::move(shape));
  }

  std::size_t count() const {  // elements
    constexpr std::int64_t most = std::int64_t{1} << 56;
    std::int64_t n = 1;
    for (const std::int64_t extent : shape) {
      if (extent < 0 || (extent > 0 && n > most / extent))
        throw BadInput(name + " has the extent " + std::to_string(extent) + ", expected 0 to 2^56 in all");
      n *= extent;
    }
    return static_cast<std::size_t>(n);
  }
  std::size_t nbytes() const {
    const std::size_t bits = count() * info(dtype).bits;
    if (bits % 8 != 0) throw BadInput(name + " has an odd count of 4-bit elements");
    return bits / 8;
  }
  // The elements as their own type, or as the unsigned integers of their width (bf16 as uint16_t).
  template <class T> const T* as() const {
    if (dtype_of<T> != dtype && !(std::is_unsigned_v<T> && info(dtype).bits == 8 * sizeof(T)))
      throw BadInput(name + " is " + info(dtype).name + ", read as " + info(dtype_of<T>).name);
    return static_cast<const T*>(data);
  }
};

struct Tensors : std::map<std::string, Tensor> {  // a file, by tensor name
  Metadata metadata;
  const Tensor& operator[](const std::string& name) const {
    const auto found = find(name);
    if (found == end()) throw BadInput("there is no tensor " + name);
    return found->second;
  }
};

// ---- JSON: as much as a safetensors header and the oracle's answers need

struct Json {
  enum Kind { null, boolean, number, string, array, object } kind = null;
  std::string text;               // what a string says; how anything else is spelt
  std::vector<std::string> keys;  // of an object, one per item
  std::vector<Json> items;

  static Json parse(std::string_view text);  // throws BadInput
  static std::string quote(std::string_view text);

  const Json* find(std::string_view key) const {
    const auto i = static_cast<std::size_t>(std::find(keys.begin(), keys.end(), key) - keys.begin());
    return i < keys.size() ? &items[i] : nullptr;
  }
  const Json& at(std::string_view key, Kind wanted) const {
    const Json* found = find(key);
    if (!found || found->kind != wanted) throw BadInput("missing or mistyped in the JSON: " + quote(key));
    return *found;
  }
  std::string text_of(std::string_view key) const { return find(key) ? find(key)->text : std::string(); }
  std::int64_t integer() const {
    std::int64_t value = 0;
    const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (kind != number || error != std::errc() || stop != text.data() + text.size())
      throw BadInput("not a 64-bit integer: " + text);
    return value;
  }
};

namespace detail {

class JsonParser {
 public:
  explicit JsonParser(std::string_view text) : text_(text) {}
  Json document() {
    Json json = value(64);
    if (space(); at_ != text_.size()) fail("text after the value");
    return json;
  }

 private:
  [[noreturn]] void fail(const char* what) const {
    throw BadInput("malformed JSON at byte " + std::to_string(at_) + ": " + what);
  }
  bool accept(std::string_view word) {
    const bool here = text_.substr(at_, word.size()) == word;
    return at_ += here ? word.size() : 0, here;
  }
  bool any_of(std::string_view set) {
    const bool here = at_ < text_.size() && set.find(text_[at_]) != set.npos;
    return at_ += here, here;
  }
  void space() { while (any_of(" \t\r\n")) {} }
  void digits() {
    if (!any_of("0123456789")) fail("expected a value");
    while (any_of("0123456789")) {}
  }

  Json value(int depth) {
    if (depth == 0) fail("nested too deeply");
    Json json;
    space();
    const std::size_t begin = at_;
    if (accept("\"")) {
      json.kind = Json::string;
      json.text = string();
      return json;
    }
    if (accept("{")) {
      json.kind = Json::object;
      members(json, "}", depth);
    } else if (accept("[")) {
      json.kind = Json::array;
      members(json, "]", depth);
    } else if (accept("true") || accept("false")) {
      json.kind = Json::boolean;
    } else if (!accept("null")) {
      json.kind = Json::number;
      accept("-");
      if (!accept("0")) digits();
      if (accept(".")) digits();
      if (any_of("eE")) any_of("+-"), digits();
    }
    json.text = text_.substr(begin, at_ - begin);
    return json;
  }
  void members(Json& json, std::string_view close, int depth) {
    if (space(); accept(close)) return;
    do {
      if (json.kind == Json::object) {
        if (space(); !accept("\"")) fail("expected a key");
        json.keys.push_back(string());
        if (space(); !accept(":")) fail("expected ':'");
      }
      json.items.push_back(value(depth - 1));
      space();
    } while (accept(","));
    if (!accept(close)) fail("expected ',' or the closing bracket");
  }
  std::string string() {  // after the opening quote
    static constexpr std::string_view escapes = "\"\\/bfnrt", meant = "\"\\/\b\f\n\r\t";
    std::string out;
    while (!accept("\"")) {
      if (at_ == text_.size()) fail("unfinished string");
      const char c = text_[at_++];
      if (static_cast<unsigned char>(c) < 0x20) fail("control character in a string");
      if (c != '\\') out += c;
      else if (any_of(escapes)) out += meant[escapes.find(text_[at_ - 1])];
      else if (accept("u")) append_utf8(out, code_point());
      else fail("unknown escape");
    }
    return out;
  }
  std::uint32_t hex4() {
    static constexpr std::string_view hex = "0123456789abcdefABCDEF";
    std::size_t unit = 0;
    for (int i = 0; i < 4; ++i) {
      if (!any_of(hex)) fail("expected four hexadecimal digits");
      const std::size_t digit = hex.find(text_[at_ - 1]);
      unit = unit << 4 | (digit < 16 ? digit : digit - 6);
    }
    return static_cast<std::uint32_t>(unit);
  }
  std::uint32_t code_point() {  // half a surrogate pair becomes U+FFFD
    const std::uint32_t high = hex4();
    if (high >> 11 != 0x1B) return high;
    const std::size_t after = at_;
    if (high < 0xDC00 && accept("\\u"))
      if (const std::uint32_t low = hex4(); low >> 10 == 0x37)
        return 0x10000 + ((high & 0x3FF) << 10 | (low & 0x3FF));
    return at_ = after, 0xFFFD;
  }
  static void append_utf8(std::string& out, std::uint32_t code) {
    const int tail = code < 0x80 ? 0 : code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    static constexpr std::uint32_t lead[] = {0, 0xC0, 0xE0, 0xF0};
    out += static_cast<char>(lead[tail] | code >> 6 * tail);
    for (int i = tail - 1; i >= 0; --i) out += static_cast<char>(0x80 | (code >> 6 * i & 0x3F));
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

inline std::string system_error(const std::string& what, int error = errno) {
  return what + ": " + std::generic_category().message(error);
}

struct CloseFile { void operator()(std::FILE* file) const { std::fclose(file); } };
using File = std::unique_ptr<std::FILE, CloseFile>;

}  // namespace detail

inline Json Json::parse(std::string_view text) { return detail::JsonParser(text).document(); }

inline std::string Json::quote(std::string_view text) {
  static constexpr char hex[] = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') (out += '\\') += c;
    else if (static_cast<unsigned char>(c) >= 0x20) out += c;
    else ((out += "\\u00") += hex[c >> 4]) += hex[c & 15];
  }
  return out += '"';
}

// ---- safetensors

// All or nothing.
inline void write(const Path& path, std::vector<Tensor> tensors, const Metadata& metadata = {}) {
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const Tensor& a, const Tensor& b) { return info(a.dtype).bits > info(b.dtype).bits; });
  std::string header;
  for (const auto& [key, value] : metadata)
    header += (header.empty() ? "" : ",") + Json::quote(key) + ":" + Json::quote(value);
  header = "{\"__metadata__\":{" + header + "}";
  std::set<std::string> names{"__metadata__"};
  std::size_t end = 0;
  for (const Tensor& tensor : tensors) {
    if (!names.insert(tensor.name).second) throw BadInput("two tensors are called " + tensor.name);
    if (!tensor.data && tensor.nbytes() > 0) throw BadInput(tensor.name + " is a null pointer");
    std::string shape, begin = std::to_string(end);
    for (const auto extent : tensor.shape) shape += (shape.empty() ? "" : ",") + std::to_string(extent);
    end += tensor.nbytes();
    header += "," + Json::quote(tensor.name) + ":{\"dtype\":\"" + info(tensor.dtype).tag + "\",\"shape\":[" +
              shape + "],\"data_offsets\":[" + begin + "," + std::to_string(end) + "]}";
  }
  header += "}";
  header.resize((8 + header.size() + 63) / 64 * 64 - 8, ' ');
  const std::uint64_t length = header.size();

  static std::atomic<unsigned> serial{0};
  const std::string writer = std::to_string(::getpid()) + "-" + std::to_string(serial++);
  const std::string temporary = path.string() + "." + writer;
  detail::File file(std::fopen(temporary.c_str(), "wbxe"));
  if (!file) throw Environment(detail::system_error("cannot write " + path.string()));
  const auto put = [&](const void* data, std::size_t size) {
    return size == 0 || std::fwrite(data, 1, size, file.get()) == size;
  };
  bool done = put(&length, sizeof length) && put(header.data(), length);
  for (const Tensor& tensor : tensors) done = done && put(tensor.data, tensor.nbytes());
  done = std::fclose(file.release()) == 0 && done && std::rename(temporary.c_str(), path.c_str()) == 0;
  if (done) return;
  const std::string line = detail::system_error("cannot write " + path.string());
  std::remove(temporary.c_str());
  throw Environment(line);
}

inline Tensors read(const Path& path) try {
  const detail::File file(std::fopen(path.c_str(), "rbe"));
  struct stat status;
  if (!file || ::fstat(::fileno(file.get()), &status) != 0)
    throw BadInput(detail::system_error("cannot be read"));
  const auto get = [&](void* data, std::size_t size) {
    if (std::fread(data, 1, size, file.get()) != size) throw BadInput("cannot be read to its end");
  };
  const std::uint64_t size = S_ISREG(status.st_mode) ? static_cast<std::uint64_t>(status.st_size) : 0;
  std::uint64_t length = 0;
  if (size < sizeof length) throw BadInput("not a safetensors file");
  get(&length, sizeof length);
  if (length > size - sizeof length) throw BadInput("the header is longer than the file");
  std::string header(length, '\0');
  get(header.data(), length);
  const Json json = Json::parse(header);
  if (json.kind != Json::object) throw BadInput("the header is not a JSON object");

  Tensors tensors;
  std::vector<std::pair<std::array<std::int64_t, 2>, Tensor*>> spans;
  for (std::size_t i = 0; i < json.keys.size(); ++i) {
    const std::string& name = json.keys[i];
    const Json& entry = json.items[i];
    if (name == "__metadata__") {
      for (const std::string& key : entry.keys) tensors.metadata[key] = entry.at(key, Json::string).text;
      continue;
    }
    const std::string& tag = entry.at("dtype", Json::string).text;
    const auto is_tag = [&](const DTypeInfo& dtype) { return dtype.tag == tag; };
    const auto known = std::find_if(std::begin(dtypes), std::end(dtypes), is_tag);
    if (known == std::end(dtypes)) throw BadInput(name + " has the unknown dtype " + tag);
    Tensor tensor = Tensor::view(name, static_cast<DType>(known - std::begin(dtypes)), nullptr, {});
    for (const Json& extent : entry.at("shape", Json::array).items) tensor.shape.push_back(extent.integer());
    const std::vector<Json>& offsets = entry.at("data_offsets", Json::array).items;
    if (offsets.size() != 2) throw BadInput(name + " has data_offsets that are not two numbers");
    const auto [at, fresh] = tensors.emplace(name, std::move(tensor));
    if (!fresh) throw BadInput("two tensors are called " + name);
    spans.push_back({{offsets[0].integer(), offsets[1].integer()}, &at->second});
  }
  std::sort(spans.begin(), spans.end());
  std::uint64_t end = 0, data_size = size - sizeof length - length;
  for (const auto& [span, tensor] : spans) {
    if (static_cast<std::uint64_t>(span[0]) != end)
      throw BadInput(tensor->name + " overlaps another tensor or leaves a gap");
    const std::size_t nbytes = tensor->nbytes();
    if (nbytes > data_size - end) throw BadInput(tensor->name + " ends beyond the file");
    end += nbytes;
    if (static_cast<std::uint64_t>(span[1]) != end)
      throw BadInput(tensor->name + " has data_offsets that do not fit its shape");
    const std::shared_ptr<char[]> bytes(new char[nbytes]);
    get(bytes.get(), nbytes);
    tensor->data = bytes.get();
    tensor->owner = bytes;
  }
  if (end != data_size) throw BadInput("bytes at the end belong to no tensor");
  return tensors;
} catch (const BadInput& error) {
  throw BadInput(path.string() + ": " + error.what());
}

}  // namespace mla_oracle

#endif
