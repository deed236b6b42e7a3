// The C ABI of decoding: handles, and exceptions turned into statuses.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <new>

#include "loop/run.h"
#include "model/random_weights.h"

struct kdtree_model {
  std::string kind;
  kdtree::TensorMap tensors;
};
struct kdtree_decoder {
  kdtree::Decoder decoder;
};
struct kdtree_run {
  kdtree::Run run;
};

namespace kdtree {
namespace {

template <typename Body>
kdtree_status guarded(Body body) {
  try {
    body();
    return succeed();
  } catch (const EngineFailure& failure) {
    return fail(failure.status, "%s", failure.what());
  } catch (const ModelError& error) {
    return fail(KDTREE_SIZE, "%s", error.what());
  } catch (const std::bad_alloc&) {
    return fail(KDTREE_CUDA, "out of host memory");
  } catch (const std::exception& error) {
    return fail(KDTREE_SIZE, "%s", error.what());
  }
}

void needed(const char* call, const char* name, const void* pointer) {
  if (pointer == nullptr) throw EngineFailure(KDTREE_POINTER, std::string(call) + ": " + name + " is NULL");
}

void same_size(const char* call, size_t given, size_t expected) {
  if (given != expected)
    throw EngineFailure(KDTREE_VERSION, std::string(call) + ": struct_size is " + std::to_string(given) +
                                            ", this library's is " + std::to_string(expected));
}

// A struct that grew at its end: of callers that know its first bytes, as many as `known` says, the rest is 0.
template <typename T>
T grown(const char* call, const T& given, std::initializer_list<size_t> known) {
  T whole{};
  if (std::find(known.begin(), known.end(), given.struct_size) == known.end())
    same_size(call, given.struct_size, sizeof(T));
  std::memcpy(&whole, &given, given.struct_size);
  return whole;
}

const Progress& progress_of(const char* call, const kdtree_run* run, int32_t request) {
  needed(call, "run", run);
  if (request < 0 || request >= run->run.requests())
    throw EngineFailure(KDTREE_SIZE, std::string(call) + ": request is " + std::to_string(request) + " of " +
                                         std::to_string(run->run.requests()));
  return run->run.progress(request);
}

}  // namespace
}  // namespace kdtree

using namespace kdtree;

extern "C" kdtree_status kdtree_model_create(const char* kind, kdtree_model** model) {
  return guarded([&] {
    needed("kdtree_model_create", "kind", kind);
    needed("kdtree_model_create", "model", model);
    if (std::strcmp(kind, "model") != 0 && std::strcmp(kind, "drafter") != 0)
      throw EngineFailure(KDTREE_SIZE,
                          std::string("kdtree_model_create: kind is '") + kind + "', not model or drafter");
    *model = new kdtree_model{kind, {}};
  });
}

extern "C" kdtree_status kdtree_model_put(kdtree_model* model, const kdtree_tensor* tensor) {
  return guarded([&] {
    const char* const call = "kdtree_model_put";
    needed(call, "model", model);
    needed(call, "tensor", tensor);
    same_size(call, tensor->struct_size, sizeof(*tensor));
    needed(call, "name", tensor->name);
    needed(call, "dtype", tensor->dtype);
    if (tensor->ndim < 0 || tensor->ndim > 8)
      throw EngineFailure(KDTREE_SIZE, std::string(call) + ": ndim is " + std::to_string(tensor->ndim));
    if (tensor->ndim > 0) needed(call, "shape", tensor->shape);
    if (tensor->size > 0) needed(call, "data", tensor->data);
    HostTensor made;
    made.dtype = tensor->dtype;
    made.shape.assign(tensor->shape, tensor->shape + tensor->ndim);
    const size_t element = made.dtype == "f64" || made.dtype == "i64"    ? 8
                           : made.dtype == "f32"                         ? 4
                           : made.dtype == "bf16" || made.dtype == "f16" ? 2
                           : made.dtype == "u8" || made.dtype == "bool"  ? 1
                                                                         : 0;
    if (element == 0)
      throw ModelError(std::string(tensor->name) + " has type " + made.dtype + ", which no model holds");
    const int64_t elements = made.elements();
    if (elements < 0 || static_cast<size_t>(elements) * element != tensor->size)
      throw ModelError(std::string(tensor->name) + " " + shape_text(made.shape) + " of " + made.dtype + " has " +
                       std::to_string(tensor->size) + " bytes");
    made.data = Bytes::copied(tensor->data, tensor->size);
    model->tensors[tensor->name] = std::move(made);
  });
}

extern "C" kdtree_status kdtree_model_read(kdtree_model* model, const char* path) {
  return guarded([&] {
    needed("kdtree_model_read", "model", model);
    needed("kdtree_model_read", "path", path);
    TensorMap tensors = read_kdtr(path, model->kind);
    model->tensors = model->kind == "model" ? language_model(std::move(tensors)) : std::move(tensors);
  });
}

extern "C" kdtree_status kdtree_model_random(kdtree_model* model, uint64_t seed) {
  return guarded([&] {
    needed("kdtree_model_random", "model", model);
    model->tensors = random_weights(model->tensors, model->kind, seed);
  });
}

extern "C" void kdtree_model_destroy(kdtree_model* model) { delete model; }

extern "C" kdtree_status kdtree_decoder_create(const kdtree_decoder_args* args, kdtree_decoder** decoder) {
  return guarded([&] {
    const char* const call = "kdtree_decoder_create";
    needed(call, "args", args);
    needed(call, "decoder", decoder);
    const kdtree_decoder_args whole = grown(call, *args, {offsetof(kdtree_decoder_args, dtype)});
    needed(call, "target", args->target);
    *decoder = new kdtree_decoder{
        Decoder(whole, args->target->tensors, args->drafter != nullptr ? &args->drafter->tensors : nullptr)};
  });
}

extern "C" kdtree_status kdtree_decoder_query(const kdtree_decoder* decoder, kdtree_decoder_info* info) {
  return guarded([&] {
    needed("kdtree_decoder_query", "decoder", decoder);
    needed("kdtree_decoder_query", "info", info);
    const size_t size = info->struct_size;
    if (size != offsetof(kdtree_decoder_info, dtype) && size != offsetof(kdtree_decoder_info, cache_rows))
      same_size("kdtree_decoder_query", size, sizeof(*info));
    kdtree_decoder_info found = decoder->decoder.info();
    found.struct_size = static_cast<uint32_t>(size);
    std::memcpy(info, &found, size);
  });
}

extern "C" void kdtree_decoder_destroy(kdtree_decoder* decoder) { delete decoder; }

extern "C" kdtree_status kdtree_run_create(kdtree_decoder* decoder, const kdtree_run_args* args, kdtree_run** run) {
  return guarded([&] {
    needed("kdtree_run_create", "decoder", decoder);
    needed("kdtree_run_create", "args", args);
    needed("kdtree_run_create", "run", run);
    *run = new kdtree_run{
        {&decoder->decoder,
         grown("kdtree_run_create", *args, {offsetof(kdtree_run_args, eager), offsetof(kdtree_run_args, timed)})}};
  });
}

extern "C" kdtree_status kdtree_run_prefill(kdtree_run* run) {
  return guarded([&] {
    needed("kdtree_run_prefill", "run", run);
    run->run.prefill();
  });
}

extern "C" kdtree_status kdtree_run_round(kdtree_run* run, int32_t* active) {
  return guarded([&] {
    needed("kdtree_run_round", "run", run);
    const int left = run->run.round();
    if (active != nullptr) *active = left;
  });
}

extern "C" kdtree_status kdtree_run_replayed(const kdtree_run* run, int32_t* rounds) {
  return guarded([&] {
    needed("kdtree_run_replayed", "run", run);
    needed("kdtree_run_replayed", "rounds", rounds);
    *rounds = run->run.replayed();
  });
}

extern "C" kdtree_status kdtree_run_prediction(const kdtree_run* run, int32_t round, kdtree_prediction* prediction) {
  return guarded([&] {
    needed("kdtree_run_prediction", "run", run);
    needed("kdtree_run_prediction", "prediction", prediction);
    const std::vector<kdtree_prediction>& made = run->run.predictions();
    if (round < 0 || static_cast<size_t>(round) >= made.size())
      throw EngineFailure(KDTREE_SIZE, "kdtree_run_prediction: round " + std::to_string(round) + " of " +
                                           std::to_string(made.size()) + " predicted");
    *prediction = made[static_cast<size_t>(round)];
  });
}

extern "C" kdtree_status kdtree_run_stage(kdtree_run* run, int32_t stage, const char* dump, int32_t* active) {
  return guarded([&] {
    needed("kdtree_run_stage", "run", run);
    Trace trace;
    const int left = run->run.stage(stage, dump != nullptr ? &trace : nullptr);
    if (dump != nullptr) trace.write(dump);
    if (active != nullptr) *active = left;
  });
}

extern "C" void kdtree_run_destroy(kdtree_run* run) { delete run; }

extern "C" kdtree_status kdtree_run_state(const kdtree_run* run, int32_t request, kdtree_request_state* state) {
  return guarded([&] {
    const Progress& p = progress_of("kdtree_run_state", run, request);
    needed("kdtree_run_state", "state", state);
    same_size("kdtree_run_state", state->struct_size, sizeof(*state));
    state->finish = p.finish;
    state->token_count = static_cast<int32_t>(p.tokens.size());
    state->rounds = static_cast<int32_t>(p.rounds.size());
    state->tokens = p.tokens.data();
    state->cache_length = p.cache_length;
    std::copy(p.status, p.status + 3, state->status);
  });
}

extern "C" kdtree_status kdtree_run_rounds(const kdtree_run* run, int32_t request, int32_t first, int32_t count,
                                           kdtree_round* rounds) {
  return guarded([&] {
    const Progress& p = progress_of("kdtree_run_rounds", run, request);
    if (first < 0 || count < 0 || static_cast<size_t>(first) + static_cast<size_t>(count) > p.rounds.size())
      throw EngineFailure(KDTREE_SIZE, "kdtree_run_rounds: rounds " + std::to_string(first) + " to " +
                                           std::to_string(first + count) + " of " + std::to_string(p.rounds.size()));
    if (count > 0) needed("kdtree_run_rounds", "rounds", rounds);
    std::copy(p.rounds.begin() + first, p.rounds.begin() + first + count, rounds);
  });
}

extern "C" kdtree_status kdtree_run_trace(const kdtree_run* run, int32_t request, int32_t round, kdtree_trace* trace) {
  return guarded([&] {
    const Progress& p = progress_of("kdtree_run_trace", run, request);
    needed("kdtree_run_trace", "trace", trace);
    same_size("kdtree_run_trace", trace->struct_size, sizeof(*trace));
    if (round < 0 || static_cast<size_t>(round) >= p.traces.size())
      throw EngineFailure(KDTREE_SIZE, "kdtree_run_trace: round " + std::to_string(round) + " of " +
                                           std::to_string(p.traces.size()) + " kept");
    const TraceRound& t = p.traces[static_cast<size_t>(round)];
    *trace = {sizeof(*trace),       t.depths,       t.width,         t.ids.data(),    t.lp.data(),
              t.logz.data(),        t.nodes,        t.bonus,         t.tokens.data(), t.parents.data(),
              t.node_depths.data(), t.ranks.data(), t.scores.data(), t.choices.data()};
  });
}

extern "C" kdtree_status kdtree_run_logits(const kdtree_run* run, int32_t request, int32_t* rows, float* data) {
  return guarded([&] {
    const Progress& p = progress_of("kdtree_run_logits", run, request);
    if (rows != nullptr) *rows = static_cast<int32_t>(p.logits.size() / static_cast<size_t>(run->run.vocab_size()));
    if (data != nullptr) std::copy(p.logits.begin(), p.logits.end(), data);
  });
}
