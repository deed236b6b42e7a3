// Whole decodings through the C ABI, as another program would use it: plain, chain and tree give the golden tokens, and
// the same bits.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "kdtree_decode.h"
#include "tests/check.h"

namespace {

std::string path_of(const std::string& name) { return std::string(check::golden(name).path()); }

std::vector<int32_t> integers(const kdtr::Tensor& tensor) {
  const auto view = tensor.as<int32_t>();
  return {view.begin(), view.begin() + view.size};
}

using Model = std::unique_ptr<kdtree_model, decltype(&kdtree_model_destroy)>;
using Decoder = std::unique_ptr<kdtree_decoder, decltype(&kdtree_decoder_destroy)>;
using Run = std::unique_ptr<kdtree_run, decltype(&kdtree_run_destroy)>;

Model read(const char* kind, const std::string& name) {
  kdtree_model* model = nullptr;
  CHECK_OK(kdtree_model_create(kind, &model));
  Model owned(model, kdtree_model_destroy);
  CHECK_OK(kdtree_model_read(model, path_of(name).c_str()));
  return owned;
}

kdtree_decoder_args arguments() {
  kdtree_decoder_args args{};
  args.struct_size = sizeof(args);
  args.max_requests = 3;
  args.capacity = 200;
  args.max_budget = 64;
  args.prefill_rows = 12;
  return args;
}

Decoder make(kdtree_decoder_args args, const std::string& target, const std::string& drafter = "") {
  const Model model = read("model", target);
  Model second(nullptr, kdtree_model_destroy);
  if (!drafter.empty()) second = read("drafter", drafter);
  args.target = model.get();
  args.drafter = second.get();
  kdtree_decoder* decoder = nullptr;
  CHECK_OK(kdtree_decoder_create(&args, &decoder));
  return Decoder(decoder, kdtree_decoder_destroy);
}

kdtree_request request(const std::vector<int32_t>& prompt, int tokens) {
  kdtree_request q{};
  q.struct_size = sizeof(q);
  q.prompt = prompt.data();
  q.prompt_length = static_cast<int32_t>(prompt.size());
  q.max_new_tokens = tokens;
  q.top_p = 1;
  return q;
}

struct Outcome {
  std::vector<int32_t> tokens;
  int finish, cache_length;
  std::vector<kdtree_round> rounds;
  std::vector<float> logits;

  double tau() const {
    double accepted = 0;
    for (const kdtree_round& round : rounds) accepted += round.accepted;
    return 1 + accepted / static_cast<double>(rounds.size());
  }
};

std::vector<Outcome> decode(const Decoder& decoder, int method, const std::vector<kdtree_request>& requests,
                            bool steps = false) {
  kdtree_run_args args{};
  args.struct_size = sizeof(args);
  args.method = method;
  args.requests = static_cast<int32_t>(requests.size());
  args.keep_logits = 1;
  args.request = requests.data();
  kdtree_run* made = nullptr;
  CHECK_OK(kdtree_run_create(decoder.get(), &args, &made));
  const Run run(made, kdtree_run_destroy);
  CHECK_OK(kdtree_run_prefill(made));
  int32_t active = 1;
  while (active > 0)
    if (steps)
      for (int stage = KDTREE_STAGE_DRAFT; stage <= KDTREE_STAGE_COMMIT && active > 0; ++stage)
        CHECK_OK(kdtree_run_stage(made, stage, nullptr, &active));
    else
      CHECK_OK(kdtree_run_round(made, &active));
  std::vector<Outcome> outcomes;
  for (int32_t r = 0; r < args.requests; ++r) {
    kdtree_request_state state{};
    state.struct_size = sizeof(state);
    CHECK_OK(kdtree_run_state(made, r, &state));
    Outcome outcome{{state.tokens, state.tokens + state.token_count}, state.finish, state.cache_length, {}, {}};
    outcome.rounds.resize(static_cast<size_t>(state.rounds));
    CHECK_OK(kdtree_run_rounds(made, r, 0, state.rounds, outcome.rounds.data()));
    int32_t rows = 0;
    CHECK_OK(kdtree_run_logits(made, r, &rows, nullptr));
    kdtree_decoder_info info{};
    info.struct_size = sizeof(info);
    CHECK_OK(kdtree_decoder_query(decoder.get(), &info));
    outcome.logits.resize(static_cast<size_t>(rows) * static_cast<size_t>(info.vocab_size));
    CHECK_OK(kdtree_run_logits(made, r, nullptr, outcome.logits.data()));
    outcomes.push_back(std::move(outcome));
  }
  return outcomes;
}

void same_bits(const std::vector<float>& a, const std::vector<float>& b, const char* what) {
  CHECK_EQUAL(a.size(), b.size());
  CHECK_EQUAL(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0);
  (void)what;
}

// steps: also stage by stage.
void golden_decodings(const std::string& name, bool steps) {
  const kdtr::File golden = check::golden(name + "_run.kdtr");
  const std::vector<int32_t> prompt = integers(golden.at("prompt"));
  std::vector<int32_t> tokens = integers(golden.at("tokens"));
  if (check::tiny()) tokens.resize(8);
  const Decoder decoder = make(arguments(), name + ".kdtr");
  kdtree_request q = request(prompt, static_cast<int>(tokens.size()));
  const Outcome ar = decode(decoder, KDTREE_AR, {q})[0];
  CHECK_EQUAL_ALL(ar.tokens, tokens, "tokens of plain decoding");
  CHECK_EQUAL(ar.finish, static_cast<int>(KDTREE_FINISH_LENGTH));

  const auto expected = golden.at("logits").as<float, 2>();
  double most = 0;
  for (size_t i = 0; i < tokens.size() * expected.shape[1]; ++i) {
    const double difference = std::fabs(static_cast<double>(ar.logits[i]) - expected.data[i]);
    CHECK(difference <= 8e-6);
    most = std::max(most, difference);
  }

  q.drafter = KDTREE_DRAFT_ORACLE;
  q.block_size = 8;
  q.budget = 7;
  q.golden = tokens.data();
  q.golden_count = q.right = static_cast<int32_t>(tokens.size());
  const Outcome tree = decode(decoder, KDTREE_DDTREE, {q})[0], chain = decode(decoder, KDTREE_CHAIN, {q})[0];
  std::vector<Outcome> others{tree, chain};
  if (steps) others.push_back(decode(decoder, KDTREE_DDTREE, {q}, true)[0]);
  for (const Outcome& outcome : others) {
    CHECK_EQUAL_ALL(outcome.tokens, tokens, "tokens");
    CHECK_EQUAL(outcome.rounds.size(), tokens.size() / 8);
    CHECK_EQUAL(outcome.tau(), 8.0);
    same_bits(outcome.logits, ar.logits, "logits");
  }
  std::printf(
      "PASS %s: AR==golden and DDTREE==golden (%zu tokens), greedy-exact, rounds %zu, tau %.1f, largest logit "
      "difference %.2g, all logits bit for bit those of plain decoding\n",
      name.c_str(), tokens.size(), tree.rounds.size(), tree.tau(), most);
}

}  // namespace

TEST(tiny) { golden_decodings("tiny", true); }
TEST(tiny_mla) {
  if (!check::tiny()) golden_decodings("tiny_mla", false);
}

TEST(trees_of_every_size_have_the_bits_of_plain_decoding) {
  const std::vector<int32_t> prompt{3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9}, other{2, 7, 1, 8};
  const int wanted = check::tiny() ? 6 : 26;
  for (const int paged : check::tiny() ? std::vector<int>{16} : std::vector<int>{0, 16}) {
    kdtree_decoder_args args = arguments();
    args.cache_block_size = paged;
    const Decoder decoder = make(args, "tiny.kdtr", "tiny_drafter.kdtr");
    const Outcome ar = decode(decoder, KDTREE_AR, {request(prompt, wanted)})[0];
    const Outcome ar_other = decode(decoder, KDTREE_AR, {request(other, wanted / 2)})[0];
    std::vector<int> depths(9, 0), moves(9, 0);
    std::vector<int> budgets = check::tiny() || paged > 0 ? std::vector<int>{9} : std::vector<int>{2, 9, 40};
    for (const int budget : budgets) {
      kdtree_request noisy = request(prompt, wanted), dflash = request(other, wanted / 2);
      noisy.drafter = KDTREE_DRAFT_NOISY;
      noisy.block_size = 8;
      noisy.golden = ar.tokens.data();
      noisy.golden_count = static_cast<int32_t>(ar.tokens.size());
      noisy.miss = 0.2;
      noisy.max_rank = budgets.size() > 1 && budget < 40 ? 0 : 1;  // of several, small trees are deep ones
      noisy.noise_seed = static_cast<uint64_t>(200 + budget);
      noisy.budget = budget;
      dflash.budget = std::max(budget / 2, 1);
      for (const int method : {KDTREE_CHAIN, KDTREE_DDTREE}) {
        if (method == KDTREE_CHAIN && budget > 9) continue;  // a chain knows no budget
        const std::vector<Outcome> both = decode(decoder, method, {noisy, dflash});
        CHECK_EQUAL_ALL(both[0].tokens, ar.tokens, "tokens with a noisy oracle");
        CHECK_EQUAL_ALL(both[1].tokens, ar_other.tokens, "tokens with the drafter");
        same_bits(both[0].logits, ar.logits, "logits with a noisy oracle");
        same_bits(both[1].logits, ar_other.logits, "logits with the drafter");
        for (const kdtree_round& round : both[0].rounds) {
          ++depths[static_cast<size_t>(round.accepted)];
          int moved = 0;
          for (int i = 0; i <= round.accepted; ++i) moved += round.path[i] != i;
          ++moves[static_cast<size_t>(moved)];
        }
      }
    }
    if (check::tiny() || paged > 0) continue;
    std::printf("accepted depths 0..7:");
    for (int depth = 0; depth < 8; ++depth) std::printf(" %d", depths[static_cast<size_t>(depth)]);
    std::printf(", moved rows 0..7:");
    for (int moved = 0; moved < 8; ++moved) std::printf(" %d", moves[static_cast<size_t>(moved)]);
    std::printf("\n");
    for (int depth = 0; depth < 8; ++depth) CHECK(depths[static_cast<size_t>(depth)] > 0);
    CHECK(moves[1] + moves[2] + moves[3] > 0);
  }
}

TEST(the_mask_variant_gives_the_same_tokens) {
  const kdtr::File golden = check::golden("tiny_run.kdtr");
  const std::vector<int32_t> prompt = integers(golden.at("prompt")), tokens = integers(golden.at("tokens"));
  kdtree_decoder_args args = arguments();
  args.attention = KDTREE_ATTENTION_MASK;
  const Decoder decoder = make(args, "tiny.kdtr");
  kdtree_request q = request(prompt, static_cast<int>(tokens.size()));
  q.drafter = KDTREE_DRAFT_NOISY;
  q.block_size = 8;
  q.budget = 9;
  q.golden = tokens.data();
  q.golden_count = static_cast<int32_t>(tokens.size());
  q.max_rank = 1;
  if (check::tiny()) q.max_new_tokens = 4;
  const std::vector<int32_t> wanted(tokens.begin(), tokens.begin() + q.max_new_tokens);
  for (const int method : {KDTREE_AR, KDTREE_CHAIN, KDTREE_DDTREE})
    CHECK_EQUAL_ALL(decode(decoder, method, {q})[0].tokens, wanted, "tokens");
}

TEST(what_does_not_fit_is_refused_with_its_numbers) {
  const Decoder decoder = make(arguments(), "tiny.kdtr");
  const std::vector<int32_t> prompt{1, 2, 300};
  kdtree_request q = request(prompt, 4);
  kdtree_run_args args{};
  args.struct_size = sizeof(args);
  args.requests = 1;
  args.request = &q;
  kdtree_run* run = nullptr;
  CHECK_STATUS(kdtree_run_create(decoder.get(), &args, &run), KDTREE_SIZE);
  CHECK_EQUAL(std::string(kdtree_last_error()), "request 0: prompt token 300 at 2 is outside the vocabulary 0..100");
  q.prompt_length = 2;
  q.budget = 65;
  CHECK_STATUS(kdtree_run_create(decoder.get(), &args, &run), KDTREE_SIZE);
  q.budget = 0;
  CHECK_OK(kdtree_run_create(decoder.get(), &args, &run));
  kdtree_run* second = nullptr;
  CHECK_STATUS(kdtree_run_create(decoder.get(), &args, &second), KDTREE_SIZE);
  int32_t active = 0;
  CHECK_STATUS(kdtree_run_round(run, &active), KDTREE_SIZE);  // before the prompt
  kdtree_run_destroy(run);
}
