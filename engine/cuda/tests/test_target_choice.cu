// Choices: argmax against a plain loop, known draws, mixed batches, rows left alone, refused arguments.
#include <algorithm>

#include "tests/check.h"

namespace {

constexpr int32_t kUntouched = static_cast<int32_t>(0xa5a5a5a5u);

uint16_t bf16_bits(float value) {  // of a value that bf16 holds
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>(bits >> 16);
}

// Small whole numbers with many ties, -0.0 among them.
float logit(uint32_t i) {
  const uint32_t mixed = i * 2654435761u;
  const int value = static_cast<int>((mixed >> 13) % 23) - 22;
  return value == 0 && mixed % 2 == 0 ? -0.0f : static_cast<float>(value);
}

struct Choice {
  kdtree_target_choice_args a{};
  check::Array<int32_t> choices;
  check::Array<unsigned char> workspace;

  Choice(int requests, int rows, int vocab_size, int dtype, const void* logits, int64_t row_stride)
      : choices(static_cast<size_t>(requests) * rows),
        workspace(kdtree_target_choice_workspace(requests, rows, vocab_size)) {
    a.struct_size = sizeof(a);
    a.requests = requests;
    a.rows = rows;
    a.vocab_size = vocab_size;
    a.dtype = dtype;
    a.row_stride = row_stride;
    a.logits = logits;
    a.choices = choices.get();
    a.workspace = workspace.size() > 0 ? workspace.get() : nullptr;
    a.workspace_size = workspace.size();
  }

  std::vector<int32_t> run() {
    CHECK_OK(kdtree_target_choice(&a));
    workspace.read();  // its guards
    return choices.read();
  }
};

std::vector<int32_t> argmax(const std::vector<float>& logits, int rows, int vocab_size, int64_t row_stride) {
  std::vector<int32_t> best;
  for (int row = 0; row < rows; ++row) {
    const float* first = logits.data() + row * row_stride;
    best.push_back(static_cast<int32_t>(std::max_element(first, first + vocab_size) - first));
  }
  return best;
}

// One logit row of equal values: a draw is floor(u * V).
int32_t flat_draw(int vocab_size, uint64_t seed, int32_t position) {
  const check::Array<float> logits(std::vector<float>(vocab_size, 1.5f));
  const check::Array<float> temperature{0.75f};
  const check::Array<uint64_t> seeds{seed};
  const check::Array<int32_t> positions{position};
  Choice choice(1, 1, vocab_size, KDTREE_F32, logits.get(), vocab_size);
  choice.a.temperatures = temperature.get();
  choice.a.seeds = seeds.get();
  choice.a.positions = positions.get();
  return choice.run()[0];
}

}  // namespace

TEST(greedy_rows_of_any_size_and_address) {
  const int most = check::tiny() ? 1291 : 163840;
  for (const int vocab_size : {1, 2, 7, 8, 9, 33, 1000, 1291, most}) {
    for (int offset = 0; offset < (vocab_size == 1291 ? 8 : 2); ++offset) {
      const int rows = 3;
      const int64_t stride = vocab_size + 3 * offset;
      std::vector<float> logits(rows * stride);
      std::vector<uint16_t> narrow;
      for (size_t i = 0; i < logits.size(); ++i) logits[i] = logit(static_cast<uint32_t>(i) + offset);
      for (const float value : logits) narrow.push_back(bf16_bits(value));
      const std::vector<int32_t> expected = argmax(logits, rows, vocab_size, stride);
      logits.insert(logits.begin(), offset, 1e30f);
      narrow.insert(narrow.begin(), offset, bf16_bits(128));
      const check::Array<float> wide(logits);
      const check::Array<uint16_t> half(narrow);
      CHECK_EQUAL_ALL(Choice(1, rows, vocab_size, KDTREE_F32, wide.get() + offset, stride).run(), expected, "f32");
      CHECK_EQUAL_ALL(Choice(1, rows, vocab_size, KDTREE_BF16, half.get() + offset, stride).run(), expected, "bf16");
    }
  }
}

TEST(one_block_a_row_and_several_agree) {
  const int vocab_size = 20000, rows = 60;
  std::vector<float> logits(static_cast<size_t>(rows) * vocab_size);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = logit(static_cast<uint32_t>(i));
  const check::Array<float> device(logits);
  CHECK_EQUAL(kdtree_target_choice_workspace(1, rows, vocab_size), size_t{0});
  CHECK(kdtree_target_choice_workspace(1, 1, vocab_size) > 0);
  const std::vector<int32_t> together = Choice(1, rows, vocab_size, KDTREE_F32, device.get(), vocab_size).run();
  CHECK_EQUAL_ALL(together, argmax(logits, rows, vocab_size, vocab_size), "together");
  for (const int row : {0, 31, 59}) {
    Choice alone(1, 1, vocab_size, KDTREE_F32, device.get() + static_cast<size_t>(row) * vocab_size, vocab_size);
    CHECK_EQUAL(alone.run()[0], together[row]);
  }
}

TEST(the_random_number_of_a_position) {
  // Random123, tests/kat_vectors: philox4x32 10 of counter 0 and key 0 begins with 6627e8d5.
  CHECK_EQUAL(flat_draw(1 << 16, 0, 0), 0x6627);
  CHECK_EQUAL(flat_draw(1 << 11, 0, 0), 0x6627 >> 5);
  CHECK_EQUAL(flat_draw(1, 0, 0), 0);
  CHECK(flat_draw(1 << 16, 1, 0) != 0x6627);
  CHECK(flat_draw(1 << 16, uint64_t{1} << 32, 0) != 0x6627);
  CHECK(flat_draw(1 << 16, 0, 1) != 0x6627);
  CHECK_EQUAL(flat_draw(1000, 0, -1), -1);
}

TEST(filters_and_mixed_requests) {
  // Ten equal logits among lower ones: top_k and top_p leave the ids in front.
  const int vocab_size = 40, rows = 50, requests = 3;
  std::vector<float> logits(requests * rows * vocab_size);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = i % 4 == 1 ? 2.0f : -9.0f;
  std::vector<int32_t> positions(requests * rows);
  for (size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int32_t>(i);
  const check::Array<float> device(logits), temperatures{1, 1, 0}, top_p{1, 0.45f, 1};
  const check::Array<int32_t> place(positions), top_k{3, 0, 0};
  Choice choice(requests, rows, vocab_size, KDTREE_F32, device.get(), vocab_size);
  choice.a.positions = place.get();
  choice.a.temperatures = temperatures.get();
  choice.a.top_k = top_k.get();
  choice.a.top_p = top_p.get();
  const std::vector<int32_t> choices = choice.run();
  const auto distinct = [&](int request) {
    std::vector<int32_t> found(choices.begin() + request * rows, choices.begin() + (request + 1) * rows);
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
  };
  CHECK_EQUAL_ALL(distinct(0), (std::vector<int32_t>{1, 5, 9}), "top_k");
  CHECK_EQUAL_ALL(distinct(1), (std::vector<int32_t>{1, 5, 9, 13, 17}), "top_p");
  CHECK_EQUAL_ALL(distinct(2), (std::vector<int32_t>{1}), "greedy");
}

TEST(rows_without_a_choice_and_rows_left_alone) {
  const int vocab_size = 100, rows = 4, requests = 3;
  std::vector<float> logits(requests * rows * vocab_size, 0.5f);
  logits[1 * vocab_size + 99] = std::nanf("");
  logits[2 * vocab_size] = INFINITY;
  std::fill_n(logits.begin() + 3 * vocab_size, vocab_size, -INFINITY);
  std::fill_n(logits.begin() + 6 * vocab_size, 6 * vocab_size, std::nanf(""));
  const check::Array<float> device(logits);
  const check::Array<int32_t> node_count{3, 1, 3}, before{0, 0, 0, 0, 0, 0, 7, 1, 1};
  Choice choice(requests, rows, vocab_size, KDTREE_F32, device.get(), vocab_size);
  choice.a.node_count = node_count.get();
  choice.a.before = before.get();
  const std::vector<int32_t> expected = {0,          -1,         -1,         -1,         0,          0,
                                         kUntouched, kUntouched, kUntouched, kUntouched, kUntouched, kUntouched};
  CHECK_EQUAL_ALL(choice.run(), expected, "choices");
}

TEST(arguments_are_refused_with_their_numbers) {
  const check::Array<float> logits(std::vector<float>(20000, 0.0f)), temperature{1.0f};
  const auto refused = [&](kdtree_status status, const char* message, auto change) {
    Choice choice(1, 1, 20000, KDTREE_F32, logits.get(), 20000);
    change(choice.a);
    CHECK_STATUS(kdtree_target_choice(&choice.a), status);
    CHECK(std::strstr(kdtree_last_error(), message) != nullptr);
    CHECK_EQUAL(choice.choices.read()[0], kUntouched);
  };
  CHECK_STATUS(kdtree_target_choice(nullptr), KDTREE_POINTER);
  refused(KDTREE_VERSION, "struct_size is 1", [](auto& a) { a.struct_size = 1; });
  refused(KDTREE_SIZE, "requests is 0", [](auto& a) { a.requests = 0; });
  refused(KDTREE_SIZE, "rows is 1026, it must be in [1, 1025]", [](auto& a) { a.rows = 1026; });
  refused(KDTREE_SIZE, "vocab_size is 0", [](auto& a) { a.vocab_size = 0; });
  refused(KDTREE_SIZE, "dtype is 2, it must be in [0, 1]", [](auto& a) { a.dtype = 2; });
  refused(KDTREE_SIZE, "row_stride is 19999, it must be in [20000,", [](auto& a) { a.row_stride = 19999; });
  refused(KDTREE_POINTER, "logits is NULL", [](auto& a) { a.logits = nullptr; });
  refused(KDTREE_POINTER, "choices is NULL", [](auto& a) { a.choices = nullptr; });
  refused(KDTREE_POINTER, "positions is NULL", [&](auto& a) { a.temperatures = temperature.get(); });
  refused(KDTREE_ALIGNMENT, "not aligned to 4 bytes",
          [](auto& a) { a.logits = static_cast<const char*>(a.logits) + 2; });
  refused(KDTREE_WORKSPACE, "the workspace has 3 bytes, 24 are needed", [](auto& a) { a.workspace_size = 3; });
  refused(KDTREE_POINTER, "workspace is NULL", [](auto& a) { a.workspace = nullptr; });
  refused(KDTREE_ALIGNMENT, "not aligned to 256 bytes",
          [](auto& a) { a.workspace = static_cast<char*>(a.workspace) + 8; });
  CHECK_EQUAL(kdtree_target_choice_workspace(0, 1, 20000), size_t{0});
  CHECK_EQUAL(kdtree_target_choice_workspace(1, 1026, 20000), size_t{0});
}
