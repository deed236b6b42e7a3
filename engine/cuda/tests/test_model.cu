// The native target and drafter against the goldens of the NumPy reference: every array of a pass, and 24 tokens.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <kdtr/compare.hpp>

#include "model/drafter.h"
#include "tests/check.h"

using namespace kdtree;

namespace {

std::string path_of(const std::string& name) { return std::string(check::golden(name).path()); }

std::vector<int32_t> integers(const kdtr::Tensor& tensor) {
  const auto view = tensor.as<int32_t>();
  return {view.begin(), view.begin() + view.size};
}

// A target with the cache of one request.
struct Decoder {
  Target target;
  int capacity, entry;
  check::Array<float> cache;
  int length = 0;

  Decoder(const std::string& file, int most_rows, int capacity_, std::vector<int> taps = {}, Arithmetic arithmetic = {})
      : target(read_kdtr(path_of(file), "model"), most_rows, capacity_, std::move(taps), arithmetic),
        capacity(capacity_),
        entry(target.config().kv_lora_rank + target.config().qk_rope_head_dim),
        cache(static_cast<size_t>(target.config().num_hidden_layers) * capacity * entry) {}

  // Logits [N, V] of the rows `tokens` behind the committed ones; parents empty: a chain.
  std::vector<float> pass(const std::vector<int32_t>& tokens, const std::vector<int32_t>& parents = {},
                          Trace* trace = nullptr, std::vector<float>* features = nullptr) {
    const int rows = static_cast<int>(tokens.size());
    int depth = 1;
    std::vector<std::vector<int32_t>> paths;
    std::vector<int32_t> positions;
    for (int i = 0; i < rows; ++i) {
      const int parent = parents.empty() ? i - 1 : parents[static_cast<size_t>(i)];
      std::vector<int32_t> path = parent < 0 ? std::vector<int32_t>{} : paths[static_cast<size_t>(parent)];
      path.push_back(i);
      depth = std::max(depth, static_cast<int>(path.size()));
      positions.push_back(length + static_cast<int32_t>(path.size()) - 1);
      paths.push_back(path);
    }
    std::vector<int32_t> flat(static_cast<size_t>(rows) * depth, -1);
    for (int i = 0; i < rows; ++i)
      std::copy(paths[static_cast<size_t>(i)].begin(), paths[static_cast<size_t>(i)].end(),
                flat.begin() + static_cast<ptrdiff_t>(i) * depth);
    const check::Array<int32_t> d_tokens(tokens), d_positions(positions), d_paths(flat), d_count{rows - 1},
        d_prefix{length};
    const size_t vocab = static_cast<size_t>(target.config().vocab_size);
    check::Array<float> logits(static_cast<size_t>(rows) * vocab);
    check::Array<float> tapped(features != nullptr ? features->size() : 0);
    TargetPass pass{};
    pass.rows = Rows{1,
                     rows,
                     d_count.get(),
                     d_prefix.get(),
                     d_tokens.get(),
                     d_positions.get(),
                     parents.empty() ? nullptr : d_paths.get(),
                     depth,
                     nullptr};
    pass.cache.base = cache.get();
    pass.cache.row_bytes = entry * 4;
    pass.cache.row_stride = entry * 4;
    pass.cache.layer_stride = pass.cache.request_stride = static_cast<int64_t>(capacity) * entry * 4;
    pass.cache.layers = target.config().num_hidden_layers;
    pass.cache.capacity = capacity;
    pass.longest = capacity;
    pass.logits = logits.get();
    pass.features = features != nullptr ? tapped.get() : nullptr;
    target.forward(pass, nullptr, trace);
    if (features != nullptr) *features = tapped.read();
    return logits.read();
  }
};

int32_t best(const std::vector<float>& logits, size_t row, size_t vocab) {
  const auto first = logits.begin() + static_cast<ptrdiff_t>(row * vocab);
  return static_cast<int32_t>(std::max_element(first, first + static_cast<ptrdiff_t>(vocab)) - first);
}

// Every golden under `prefix` against the array of that name; "<name>.last_row" against its last row.
int compare(const kdtr::File& golden, const std::string& prefix, const Trace& trace) {
  std::map<std::string, const Trace::Array*> arrays;
  for (const Trace::Array& array : trace.arrays()) {
    std::string name = array.name;
    std::replace(name.begin(), name.end(), '/', '.');
    arrays[prefix + name] = &array;
  }
  int compared = 0;
  for (uint64_t i = 0; i < golden.size(); ++i) {
    const kdtr::Tensor expected = golden[i];
    std::string name(expected.name);
    if (name.compare(0, prefix.size(), prefix) != 0) continue;
    const std::string last = ".last_row";
    const bool last_row = name.size() > last.size() && name.compare(name.size() - last.size(), last.size(), last) == 0;
    if (last_row) name.resize(name.size() - last.size());
    const auto found = arrays.find(name);
    if (found == arrays.end()) continue;
    std::vector<unsigned char> bytes = found->second->bytes;
    if (last_row) bytes.erase(bytes.begin(), bytes.end() - static_cast<ptrdiff_t>(expected.nbytes));
    CHECK_EQUAL(bytes.size(), expected.nbytes);
    if (found->second->dtype == "i32") {
      std::vector<int32_t> values(bytes.size() / 4);
      std::memcpy(values.data(), bytes.data(), bytes.size());
      kdtr::compare(expected, values).raise_if_failed();
    } else {
      std::vector<float> values(bytes.size() / 4);
      std::memcpy(values.data(), bytes.data(), bytes.size());
      kdtr::compare(expected, values).raise_if_failed();
    }
    ++compared;
  }
  return compared;
}

void golden_run(const std::string& name) {
  const kdtr::File golden = check::golden(name + "_run.kdtr");
  const std::vector<int32_t> prompt = integers(golden.at("prompt"));
  std::vector<int32_t> tokens = integers(golden.at("tokens"));
  if (check::tiny()) tokens.resize(2);
  Decoder decoder(name + ".kdtr", 32, 64);
  const size_t vocab = static_cast<size_t>(decoder.target.config().vocab_size);

  Trace prefill;
  const std::vector<float> first = decoder.pass(prompt, {}, &prefill);
  const int in_prefill = compare(golden, "prefill.", prefill);
  decoder.length = static_cast<int>(prompt.size());
  Trace tree;
  decoder.pass(integers(golden.at("tree.tokens")), integers(golden.at("tree.parents")), &tree);
  const int in_tree = compare(golden, "tree.", tree);

  const auto expected = golden.at("logits").as<float, 2>();
  std::vector<float> logits(first.end() - static_cast<ptrdiff_t>(vocab), first.end());
  const double limit = golden.at("logits").tolerance.atol;
  double most = 0;
  for (size_t t = 0; t < tokens.size(); ++t) {
    for (size_t v = 0; v < vocab; ++v) {
      const double difference = std::fabs(static_cast<double>(logits[v]) - expected(t, v));
      CHECK(difference <= limit);
      most = std::max(most, difference);
    }
    const int32_t token = best(logits, 0, vocab);
    CHECK_EQUAL(token, tokens[t]);
    logits = decoder.pass({token});
    ++decoder.length;
  }
  CHECK(in_prefill >= 30);
  CHECK_EQUAL(in_tree, in_prefill);
  std::printf(
      "PASS %s: AR==golden (%zu tokens), greedy-exact, largest logit difference %.2g, %d arrays of a prefill and "
      "%d of a tree within their tolerances\n",
      name.c_str(), tokens.size(), most, in_prefill, in_tree);
}

}  // namespace

TEST(tiny) { golden_run("tiny"); }
TEST(tiny_mla) {
  if (!check::tiny()) golden_run("tiny_mla");
}

TEST(drafter) {
  const kdtr::File golden = check::golden("tiny_drafter_run.kdtr");
  Decoder target("tiny.kdtr", 32, 64);
  Drafter drafter(read_kdtr(path_of("tiny_drafter.kdtr"), "drafter"), target.target, 1, 64, 32, 0);
  const size_t vocab = static_cast<size_t>(target.target.config().vocab_size);
  int length = 0, compared = 0;
  for (int round = 0; golden.contains("round_" + std::to_string(round) + ".logits"); ++round) {
    const std::string at = "round_" + std::to_string(round) + ".";
    const kdtr::Tensor features = golden.at(at + "features");
    const int rows = static_cast<int>(features.shape[0]);
    const check::Array<float> d_features(features.as<float>());
    const check::Array<int32_t> accepted{rows - 1}, lengths{length},
        root{golden.at(at + "root_token").scalar<int32_t>()};
    Trace trace;
    drafter.observe(d_features.get(), rows, nullptr, 0, accepted.get(), lengths.get(), 1, nullptr, &trace);
    length += rows;
    const check::Array<int32_t> now{length};
    check::Array<float> logits(static_cast<size_t>(drafter.block_size() - 1) * vocab);
    drafter.propose(root.get(), now.get(), logits.get(), 1, nullptr, &trace);
    (void)logits.read();
    compared += compare(golden, at, trace);
  }
  CHECK(compared > 30);
  std::printf("PASS drafter: %d arrays within their tolerances\n", compared);
}

TEST(what_is_wrong_with_a_model_is_said) {
  TensorMap tensors = read_kdtr(path_of("tiny.kdtr"), "model");
  const auto message = [](const TensorMap& broken) {
    try {
      Target(broken, 4, 8, {}, {});
    } catch (const ModelError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK_EQUAL(message(tensors), std::string());
  TensorMap missing = tensors;
  missing.erase("model.norm.weight");
  missing["model.extra"] = tensors["lm_head.weight"];
  CHECK(message(missing).find("missing model.norm.weight [32]") != std::string::npos);
  CHECK(message(missing).find("surplus model.extra") != std::string::npos);
  TensorMap unknown = tensors;
  unknown["config/attention_sink"] = tensors["config/vocab_size"];
  CHECK(message(unknown).find("attention_sink = 101") != std::string::npos);
  TensorMap other = tensors;
  other["config/scoring_func"].data = Bytes::copied("softmax", 7);
  CHECK(message(other).find("scoring_func is softmax, supported is sigmoid") != std::string::npos);
}
