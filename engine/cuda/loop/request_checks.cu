#include "loop/request_checks.h"

namespace kdtree {
namespace {

void check_tokens(int request, const char* what, const int32_t* tokens, int count, int vocab) {
  for (int i = 0; i < count; ++i)
    if (tokens[i] < 0 || tokens[i] >= vocab)
      refuse(request, std::string(what) + " " + std::to_string(tokens[i]) + " at " + std::to_string(i) +
                          " is outside the vocabulary 0.." + std::to_string(vocab - 1));
}

}  // namespace

void refuse(int request, const std::string& what) {
  throw EngineFailure(KDTREE_SIZE, "request " + std::to_string(request) + ": " + what);
}

void check_request(int r, const kdtree_request& q, int method, Decoder* decoder) {
  const auto at_least = [r](const char* name, int64_t value, int64_t least) {
    if (value < least)
      refuse(r, std::string(name) + " is " + std::to_string(value) + ", it must be at least " + std::to_string(least));
  };
  const kdtree_decoder_args& limits = decoder->args();
  if (q.struct_size != sizeof(q))
    throw EngineFailure(KDTREE_VERSION, "kdtree_request: struct_size is " + std::to_string(q.struct_size) +
                                            ", this library's is " + std::to_string(sizeof(q)));
  at_least("prompt_length", q.prompt_length, 1);
  at_least("max_new_tokens", q.max_new_tokens, 0);
  at_least("budget", q.budget, 0);
  at_least("capacity", q.capacity, 0);
  at_least("stop_count", q.stop_count, 0);
  if (q.prompt == nullptr || (q.stop_count > 0 && q.stop_tokens == nullptr))
    throw EngineFailure(KDTREE_POINTER, "request " + std::to_string(r) + ": prompt or stop_tokens is NULL");
  if (q.budget > limits.max_budget)
    refuse(r,
           "budget is " + std::to_string(q.budget) + ", the engine was made for " + std::to_string(limits.max_budget));
  const int capacity = q.capacity > 0 ? q.capacity : limits.capacity;
  if (capacity > limits.capacity)
    refuse(r,
           "capacity is " + std::to_string(capacity) + ", the engine has " + std::to_string(limits.capacity) + " rows");
  if (q.prompt_length > capacity)
    refuse(r, "the prompt needs " + std::to_string(q.prompt_length) + " cache rows, " + std::to_string(capacity) +
                  " are available");
  check_tokens(r, "prompt token", q.prompt, q.prompt_length, decoder->vocab_size());
  if (!(q.temperature >= 0) || !(q.top_p > 0 && q.top_p <= 1) || q.top_k < 0)
    refuse(r, "temperature " + std::to_string(q.temperature) + ", top_k " + std::to_string(q.top_k) + " or top_p " +
                  std::to_string(q.top_p) + " is out of range");
  if (method == KDTREE_AR) return;
  if (q.drafter < KDTREE_DRAFT_DFLASH || q.drafter > KDTREE_DRAFT_REPLAY)
    refuse(r, "drafter is " + std::to_string(q.drafter) + ", no such kind");
  if (q.drafter == KDTREE_DRAFT_DFLASH) {
    if (decoder->drafter() == nullptr) refuse(r, "the engine has no drafter");
    return;
  }
  at_least("block_size", q.block_size, 1);
  if (q.block_size > limits.block_size)
    refuse(r, "block_size is " + std::to_string(q.block_size) + ", the engine was made for " +
                  std::to_string(limits.block_size));
  if (q.drafter == KDTREE_DRAFT_REPLAY) {
    at_least("list_count", q.list_count, 0);
    if (q.list_count > 0) {
      at_least("list_width", q.list_width, 1);
      at_least("list_depths", q.list_depths, 0);
      const int64_t entries = static_cast<int64_t>(q.list_count) * q.list_depths * q.list_width;
      check_tokens(r, "list id", q.list_ids, static_cast<int>(entries), decoder->vocab_size());
    }
  } else {
    at_least("golden_count", q.golden_count, 0);
    at_least("max_rank", q.max_rank, 0);
    check_tokens(r, "golden token", q.golden, q.golden_count, decoder->vocab_size());
    if (!(q.miss >= 0 && q.miss <= 1)) refuse(r, "miss is " + std::to_string(q.miss) + ", a probability is in [0, 1]");
    if (q.drafter == KDTREE_DRAFT_ORACLE && q.right < q.golden_count && decoder->vocab_size() == 1)
      refuse(r, "a vocabulary of one token leaves no wrong proposal");
  }
}

}  // namespace kdtree
