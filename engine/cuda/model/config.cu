#include <cmath>
#include <iterator>
#include <sstream>

#include "model/config.h"
#include "model/config_reader.h"

namespace kdtree {
namespace {

constexpr int64_t kMostGridZ = 65535;

using Shapes = std::map<std::string, std::vector<int64_t>>;

std::set<std::string> words(const std::string& text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

// Bookkeeping, training, generation defaults, tokens: nothing that a forward pass reads.
const std::set<std::string>& neutral_keys() {
  static const std::set<std::string> keys = words(
      "architectures auto_map _name_or_path _attn_implementation _attn_implementation_autoset "
      "_commit_hash transformers_version torch_dtype dtype tokenizer_class use_cache return_dict "
      "output_attentions output_hidden_states output_scores output_router_logits torchscript "
      "use_bfloat16 tf_legacy_loss problem_type finetuning_task task_specific_params id2label label2id "
      "pruned_heads is_decoder is_encoder_decoder add_cross_attention cross_attention_hidden_size "
      "tie_encoder_decoder chunk_size_feed_forward initializer_range attention_dropout aux_loss_alpha "
      "seq_aux ep_size pretraining_tp num_nextn_predict_layers num_mtp_layers pad_token_id sep_token_id "
      "decoder_start_token_id prefix bad_words_ids begin_suppress_tokens suppress_tokens "
      "diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size "
      "exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty "
      "max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences "
      "remove_invalid_values repetition_penalty return_dict_in_generate temperature top_k top_p "
      "typical_p");
  return keys;
}

double magnitude(double factor, double mscale) { return factor > 1 ? 0.1 * mscale * std::log(factor) + 1.0 : 1.0; }

bool same_entries(const std::map<std::string, const HostTensor*>& a,
                  const std::map<std::string, const HostTensor*>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.first == y.first && ConfigReader::equal(*x.second, *y.second);
  });
}

// The parts of one spelling that may be written in two ways, or outside of it.
struct RopeBase {
  std::string kind;
  double theta;
};

RopeBase read_rope_base(ConfigReader& config, ConfigReader& inner) {
  inner.only("type", {"default", "yarn"});
  inner.only("rope_type", {"default", "yarn"});
  const RopeBase base{inner.text("type", inner.text("rope_type", "default")),
                      (inner.has("rope_theta") ? inner : config).number("rope_theta")};
  if (config.has("rope_theta") && config.number("rope_theta") != base.theta)
    config.fail("rope_theta", "differs from that of the rope parameters");
  if (inner.has("type") && inner.has("rope_type") && inner.text("rope_type", "") != base.kind)
    inner.fail("type", "differs from rope_type");
  config.ignore("rope_theta");
  return base;
}

// rope_theta beside rope_scaling{type, ...}, or rope_parameters{rope_type, rope_theta, ...}, or both if they say the
// same. mscale_all_dim: also returned, it scales the scores. given_amplitude: whether the config gives the amplitude.
RopeParameters read_rope(ConfigReader& config, double* mscale_all_dim, bool* given_amplitude) {
  *mscale_all_dim = 0;
  *given_amplitude = false;
  RopeParameters rope{0, false, 1, 0, 32, 1, 1, true};
  const bool parameters = config.has_object("rope_parameters"), scaling = config.has_object("rope_scaling");
  if (!scaling && !parameters) {
    rope.theta = config.number("rope_theta");
    return rope;
  }
  ConfigReader inner = config.object(parameters ? "rope_parameters" : "rope_scaling");
  const auto [kind, theta] = read_rope_base(config, inner);
  rope.theta = theta;
  if (scaling && parameters) {
    ConfigReader other = config.object("rope_scaling");
    const RopeBase base = read_rope_base(config, other);
    auto ours = config.entries("rope_parameters"), theirs = config.entries("rope_scaling");
    for (auto* entries : {&ours, &theirs})
      for (const char* name : {"/type", "/rope_type", "/rope_theta"}) entries->erase(name);
    if (base.kind != kind || base.theta != theta || !same_entries(ours, theirs))
      config.fail("rope_scaling", "differs from rope_parameters");
  }
  inner.only("partial_rotary_factor", {"1"});
  if (kind == "yarn") {
    rope.yarn = true;
    rope.factor = inner.number("factor");
    rope.original_length = static_cast<double>(inner.integer("original_max_position_embeddings"));
    rope.beta_fast = inner.number("beta_fast", 32.0);
    rope.beta_slow = inner.number("beta_slow", 1.0);
    rope.truncate = inner.boolean("truncate", true);
    const double mscale = inner.optional_number("mscale").value_or(0);
    const auto amplitude = inner.optional_number("attention_factor");
    *mscale_all_dim = inner.optional_number("mscale_all_dim").value_or(0);
    *given_amplitude = amplitude.has_value();
    if (amplitude)
      rope.amplitude = *amplitude;
    else if (mscale != 0 && *mscale_all_dim != 0)
      rope.amplitude = magnitude(rope.factor, mscale) / magnitude(rope.factor, *mscale_all_dim);
    else
      rope.amplitude = magnitude(rope.factor, 1);
  }
  inner.finish({});
  return rope;
}

bool starts_with(const std::string& text, const std::string& start) {
  return text.compare(0, start.size(), start) == 0;
}

// The nested text_config takes the place of the whole config; what the outer one says of the language model must agree.
void take_text_config(TensorMap* tensors) {
  ConfigReader outer(*tensors, "multimodal config");
  const ConfigReader text = outer.object("text_config");
  TensorMap taken;
  for (const auto& [rest, entry] : outer.entries("text_config")) taken["config" + rest] = *entry;
  for (const std::string key : {"tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters"}) {
    const auto given = outer.entries(key), own = text.entries(key);
    for (const auto& [rest, entry] : given) {
      outer.ignore(key + rest);
      taken.try_emplace("config/" + key + rest, *entry);
    }
    if (!given.empty() && !own.empty() && !same_entries(given, own))
      outer.fail(key, "differs from that of text_config");
  }
  for (const std::string& key : words("model_type bos_token_id eos_token_id quantization_config/ ignore_index "
                                      "use_unified_vision_chunk projection_hidden_size projection_layer_norm_eps"))
    outer.ignore(key);
  for (const char* prefix : {"vision_", "image_", "video_", "media_", "mm_"}) outer.ignore_prefix(prefix);
  outer.finish(neutral_keys());
  const std::string config = "config/";
  auto at = tensors->lower_bound(config);
  while (at != tensors->end() && starts_with(at->first, config)) at = tensors->erase(at);
  tensors->merge(taken);
}

void add_swiglu(Shapes* shapes, const std::string& at, int64_t hidden, int64_t width) {
  (*shapes)[at + "gate_proj.weight"] = {width, hidden};
  (*shapes)[at + "up_proj.weight"] = {width, hidden};
  (*shapes)[at + "down_proj.weight"] = {hidden, width};
}

}  // namespace

TensorMap language_model(TensorMap tensors) {
  const std::string inner = "language_model.", layer = "model.layers.", rotary_buffer = ".rotary_emb.inv_freq";
  const bool nested = ConfigReader(tensors, "").has_object("text_config");
  if (nested) take_text_config(&tensors);
  ConfigReader config(tensors, "target config");
  const int64_t layers = config.integer("num_hidden_layers", 1, 0);
  const char* const predicting = config.has("num_nextn_predict_layers") ? "num_nextn_predict_layers" : "num_mtp_layers";
  const int64_t predicted = config.integer(predicting, 0, 0);
  const auto unread = [&](const std::string& name) {
    if (nested && (starts_with(name, "vision_tower.") || starts_with(name, "mm_projector."))) return true;
    if (name.size() >= rotary_buffer.size() && name.rfind(rotary_buffer) == name.size() - rotary_buffer.size())
      return true;
    if (!starts_with(name, layer)) return false;
    char* end = nullptr;
    const int64_t number = std::strtoll(name.c_str() + layer.size(), &end, 10);
    return *end == '.' && number >= layers && number < layers + predicted;
  };
  TensorMap made;
  while (!tensors.empty()) {
    auto node = tensors.extract(tensors.begin());
    if (nested && starts_with(node.key(), inner)) node.key().erase(0, inner.size());
    if (unread(node.key())) continue;
    const auto done = made.insert(std::move(node));
    if (!done.inserted) throw ModelError(done.node.key() + " is there twice, once behind " + inner);
  }
  return made;
}

TargetConfig TargetConfig::read(const TensorMap& tensors) {
  ConfigReader config(tensors, "target config");
  const auto integer = [&config](const char* key, int64_t least = 1) {
    return static_cast<int>(config.integer(key, least));
  };
  config.only("model_type", {"deepseek_v3", "kimi_k2"});
  config.only("hidden_act", {"silu"});
  config.only("scoring_func", {"sigmoid"});
  config.only("topk_method", {"noaux_tc"});
  config.only("moe_layer_freq", {"1"});
  config.only("attention_bias", {"false"});
  config.only("sliding_window", {});
  TargetConfig c{};
  c.vocab_size = integer("vocab_size");
  c.hidden_size = integer("hidden_size");
  c.intermediate_size = integer("intermediate_size");
  c.moe_intermediate_size = integer("moe_intermediate_size");
  c.num_hidden_layers = integer("num_hidden_layers");
  c.num_attention_heads = integer("num_attention_heads");
  c.q_lora_rank = static_cast<int>(config.integer("q_lora_rank", 1, 0));
  c.kv_lora_rank = integer("kv_lora_rank");
  c.qk_nope_head_dim = integer("qk_nope_head_dim");
  c.qk_rope_head_dim = integer("qk_rope_head_dim");
  c.v_head_dim = integer("v_head_dim");
  c.n_routed_experts = integer("n_routed_experts");
  c.n_shared_experts = integer("n_shared_experts");
  c.num_experts_per_tok = integer("num_experts_per_tok");
  c.n_group = integer("n_group");
  c.topk_group = integer("topk_group");
  c.first_k_dense_replace = integer("first_k_dense_replace", 0);
  c.norm_topk_prob = config.boolean("norm_topk_prob");
  c.tie_word_embeddings = config.boolean("tie_word_embeddings", false);
  c.routed_scaling_factor = config.number("routed_scaling_factor");
  c.rms_norm_eps = config.number("rms_norm_eps");
  c.latent_norm_eps = config.number("latent_norm_eps", 1e-6);
  c.rope_layout = config.boolean("rope_interleave", true) ? RopeLayout::kInterleaved : RopeLayout::kHalf;
  config.only("num_key_value_heads", {std::to_string(c.num_attention_heads)});
  config.only("head_dim", {std::to_string(c.qk_rope_head_dim)});
  config.only("qk_head_dim", {std::to_string(c.qk_nope_head_dim + c.qk_rope_head_dim)});
  config.ignore("quantization_config/");  // about storage: weights come here dequantised
  for (const char* key : {"max_position_embeddings", "bos_token_id", "eos_token_id"}) config.ignore(key);
  double mscale_all_dim = 0;
  bool given = false;
  c.rope = read_rope(config, &mscale_all_dim, &given);
  c.softmax_scale = 1 / std::sqrt(static_cast<double>(c.qk_nope_head_dim + c.qk_rope_head_dim));
  if (mscale_all_dim != 0) c.softmax_scale *= std::pow(magnitude(c.rope.factor, mscale_all_dim), 2);
  config.finish(neutral_keys());

  if (c.qk_rope_head_dim % 2 != 0) config.fail("qk_rope_head_dim", "must be even");
  if (c.n_routed_experts % c.n_group != 0 || c.n_routed_experts / c.n_group < 2)
    config.fail("n_routed_experts", "must be n_group " + std::to_string(c.n_group) + " times at least 2");
  if (c.topk_group > c.n_group) config.fail("topk_group", "is more than n_group " + std::to_string(c.n_group));
  if (c.num_experts_per_tok > c.topk_group * (c.n_routed_experts / c.n_group))
    config.fail("num_experts_per_tok", "is more than the experts of topk_group groups");
  return c;
}

Shapes TargetConfig::weight_shapes() const {
  const int64_t hidden = hidden_size, heads = num_attention_heads,
                query = heads * (qk_nope_head_dim + qk_rope_head_dim);
  Shapes shapes{{"model.embed_tokens.weight", {vocab_size, hidden}}, {"model.norm.weight", {hidden}}};
  if (!tie_word_embeddings) shapes["lm_head.weight"] = {vocab_size, hidden};
  for (int layer = 0; layer < num_hidden_layers; ++layer) {
    const std::string at = "model.layers." + std::to_string(layer) + ".", attention = at + "self_attn.";
    shapes[at + "input_layernorm.weight"] = {hidden};
    shapes[at + "post_attention_layernorm.weight"] = {hidden};
    if (q_lora_rank == 0) {
      shapes[attention + "q_proj.weight"] = {query, hidden};
    } else {
      shapes[attention + "q_a_proj.weight"] = {q_lora_rank, hidden};
      shapes[attention + "q_a_layernorm.weight"] = {q_lora_rank};
      shapes[attention + "q_b_proj.weight"] = {query, q_lora_rank};
    }
    shapes[attention + "kv_a_proj_with_mqa.weight"] = {kv_lora_rank + qk_rope_head_dim, hidden};
    shapes[attention + "kv_a_layernorm.weight"] = {kv_lora_rank};
    shapes[attention + "kv_b_proj.weight"] = {heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank};
    shapes[attention + "o_proj.weight"] = {hidden, heads * v_head_dim};
    if (layer < first_k_dense_replace) {
      add_swiglu(&shapes, at + "mlp.", hidden, intermediate_size);
      continue;
    }
    shapes[at + "mlp.gate.weight"] = {n_routed_experts, hidden};
    shapes[at + "mlp.gate.e_score_correction_bias"] = {n_routed_experts};
    for (int expert = 0; expert < n_routed_experts; ++expert)
      add_swiglu(&shapes, at + "mlp.experts." + std::to_string(expert) + ".", hidden, moe_intermediate_size);
    add_swiglu(&shapes, at + "mlp.shared_experts.", hidden,
               static_cast<int64_t>(moe_intermediate_size) * n_shared_experts);
  }
  return shapes;
}

DrafterConfig DrafterConfig::read(const TensorMap& tensors) {
  ConfigReader config(tensors, "drafter config");
  const auto integer = [&config](const char* key) { return static_cast<int>(config.integer(key)); };
  config.only("model_type", {"qwen3", "dflash", "kimi_k2", "deepseek_v3"});
  config.only("hidden_act", {"silu"});
  config.only("attention_bias", {"false"});
  config.only("use_sliding_window", {"false"});
  config.only("sliding_window", {});
  DrafterConfig c{};
  c.hidden_size = integer("hidden_size");
  c.intermediate_size = integer("intermediate_size");
  c.num_hidden_layers = integer("num_hidden_layers");
  c.num_attention_heads = integer("num_attention_heads");
  c.num_key_value_heads = integer("num_key_value_heads");
  c.head_dim = integer("head_dim");
  c.num_target_layers = integer("num_target_layers");
  c.vocab_size = integer("vocab_size");
  c.rms_norm_eps = config.number("rms_norm_eps");
  if (!config.has_object("dflash_config")) config.fail("dflash_config", "is missing");
  ConfigReader nested = config.object("dflash_config");
  c.mask_token_id = static_cast<int>(nested.integer("mask_token_id", 0));
  c.target_layer_ids = nested.integers("target_layer_ids", 0);
  c.block_size =
      static_cast<int>(config.has("block_size") ? config.integer("block_size") : nested.integer("block_size"));
  nested.only("block_size", {std::to_string(c.block_size)});
  // Some writers repeat the nested keys outside; the two must agree.
  config.only("block_size", {std::to_string(c.block_size)});
  config.only("mask_token_id", {std::to_string(c.mask_token_id)});
  if (config.has("target_layer_ids") && config.integers("target_layer_ids", 0) != c.target_layer_ids)
    config.fail("target_layer_ids", "differs from that of dflash_config");
  for (const char* key :
       {"max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id", "max_window_layers"})
    config.ignore(key);
  double mscale_all_dim = 0;
  bool given = false;
  c.rope = read_rope(config, &mscale_all_dim, &given);
  nested.finish({});
  config.finish(neutral_keys());

  if (c.head_dim % 2 != 0) config.fail("head_dim", "must be even");
  if (c.num_attention_heads % c.num_key_value_heads != 0)
    config.fail("num_attention_heads", "is no multiple of num_key_value_heads");
  // One block of threads each, in a dimension of the grid that holds no more.
  if (const int64_t heads = static_cast<int64_t>(c.num_hidden_layers) * c.num_key_value_heads; heads > kMostGridZ)
    config.fail("num_key_value_heads", "of all layers are " + std::to_string(heads) + ", at most " +
                                           std::to_string(kMostGridZ) + " are possible");
  if (c.mask_token_id >= c.vocab_size) config.fail("mask_token_id", "is outside the vocabulary");
  if (c.target_layer_ids.empty()) config.fail("target_layer_ids", "is empty");
  for (size_t i = 0; i < c.target_layer_ids.size(); ++i)
    // The last layer's output is the residual stream to some and the normed one to others, so nobody taps it.
    if (c.target_layer_ids[i] >= c.num_target_layers - 1 ||
        (i > 0 && c.target_layer_ids[i] <= c.target_layer_ids[i - 1]))
      config.fail("target_layer_ids",
                  "must increase and stay below the last target layer, " + std::to_string(c.num_target_layers - 1));
  if (c.rope.yarn && !given)
    config.fail("rope_scaling", "must give attention_factor: 1 and 0.1 ln(factor) + 1 are both in use");
  return c;
}

Shapes DrafterConfig::weight_shapes() const {
  const int64_t hidden = hidden_size, query = static_cast<int64_t>(num_attention_heads) * head_dim;
  const int64_t key = static_cast<int64_t>(num_key_value_heads) * head_dim;
  Shapes shapes{{"fc.weight", {hidden, static_cast<int64_t>(target_layer_ids.size()) * hidden}},
                {"hidden_norm.weight", {hidden}},
                {"norm.weight", {hidden}}};
  for (int layer = 0; layer < num_hidden_layers; ++layer) {
    const std::string at = "layers." + std::to_string(layer) + ".";
    shapes[at + "input_layernorm.weight"] = {hidden};
    shapes[at + "self_attn.q_proj.weight"] = {query, hidden};
    shapes[at + "self_attn.k_proj.weight"] = {key, hidden};
    shapes[at + "self_attn.v_proj.weight"] = {key, hidden};
    shapes[at + "self_attn.o_proj.weight"] = {hidden, query};
    shapes[at + "self_attn.q_norm.weight"] = {head_dim};
    shapes[at + "self_attn.k_norm.weight"] = {head_dim};
    shapes[at + "post_attention_layernorm.weight"] = {hidden};
    add_swiglu(&shapes, at + "mlp.", hidden, intermediate_size);
  }
  return shapes;
}

void check_weights(const TensorMap& tensors, const Shapes& shapes, const Shapes& optional) {
  std::string faults;
  int count = 0;
  const auto fault = [&](const std::string& text) { faults += (count++ > 0 ? "; " : "") + text; };
  const auto misshapen = [&](const std::string& name, const std::vector<int64_t>& shape) {
    const auto found = tensors.find(name);
    if (found != tensors.end() && found->second.shape != shape)
      fault(name + " has shape " + shape_text(found->second.shape) + ", the config says " + shape_text(shape));
  };
  for (const auto& [name, shape] : shapes)
    if (tensors.count(name) == 0) fault("missing " + name + " " + shape_text(shape));
  for (const auto& [name, tensor] : tensors)
    if (!starts_with(name, "config/") && shapes.count(name) == 0 && optional.count(name) == 0) fault("surplus " + name);
  for (const auto& [name, shape] : shapes) misshapen(name, shape);
  for (const auto& [name, shape] : optional) misshapen(name, shape);
  if (count > 0) throw ModelError(std::to_string(count) + " faults in the weights: " + faults);
}

}  // namespace kdtree
