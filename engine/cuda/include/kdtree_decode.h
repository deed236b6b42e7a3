/* C ABI of the native engine: models, decoding runs, and what a run did. Kernels alone: kdtree_engine.h.
 *
 * C99. A model is named tensors on the host; an engine holds a target, perhaps a drafter, and the caches of its
 * requests on one device; a run decodes a batch of requests by one method. Everything is allocated when an engine or a
 * run is made: a round allocates nothing and waits for the device once, for the records of its commit.
 *
 * Behaviour is that of the NumPy package reference/: loop.py, drafter.py, model.py, dflash.py. An engine is used by one
 * thread at a time; several engines may live side by side.
 */
#ifndef KDTREE_DECODE_H_
#define KDTREE_DECODE_H_

#include "kdtree_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kdtree_model kdtree_model;
typedef struct kdtree_decoder kdtree_decoder;
typedef struct kdtree_run kdtree_run;

/* One tensor. dtype: a KDTR name, "f32", "bf16", "f16", "f64" for weights; config entries are "i64", "f64", "bool",
 * "u8". */
typedef struct kdtree_tensor {
  uint32_t struct_size;
  int32_t ndim;
  const char* name;
  const char* dtype;
  const int64_t* shape; /* [ndim] */
  const void* data;     /* host memory, C order; copied */
  size_t size;          /* bytes */
} kdtree_tensor;

/* kind: "model" or "drafter". Weights go by their published names, config.json as entries `config/<key>`: 0-d i64, f64
 * or bool, 1-d i64 for lists, 1-d u8 for text; null is left out. */
KDTREE_API kdtree_status kdtree_model_create(const char* kind, kdtree_model** model);
KDTREE_API kdtree_status kdtree_model_put(kdtree_model* model, const kdtree_tensor* tensor);
KDTREE_API kdtree_status kdtree_model_read(kdtree_model* model, const char* path); /* all tensors of a KDTR file */
/* Random weights, all that the config entries ask for: functions of the seed, made when a decoder is. */
KDTREE_API kdtree_status kdtree_model_random(kdtree_model* model, uint64_t seed);
KDTREE_API void kdtree_model_destroy(kdtree_model* model);

typedef enum kdtree_gemm { KDTREE_GEMM_ROW_INVARIANT = 0, KDTREE_GEMM_CUBLAS = 1 } kdtree_gemm;
typedef enum kdtree_attention { KDTREE_ATTENTION_EXACT = 0, KDTREE_ATTENTION_MASK = 1 } kdtree_attention;

/* Kernels for any sizes, or those on tensor cores: bf16, of the sizes that they are built for. */
typedef enum kdtree_path { KDTREE_PATH_GENERAL = 0, KDTREE_PATH_TENSOR_CORES = 1 } kdtree_path;

/* Which attention serves the exact form. Their bits differ; device, model and cache rows choose. */
typedef enum kdtree_attention_kernel {
  KDTREE_KERNEL_GENERAL = 0,
  KDTREE_KERNEL_MMA = 1, /* tensor cores of any device */
  KDTREE_KERNEL_WGMMA = 2
} kdtree_attention_kernel;

typedef struct kdtree_decoder_args {
  uint32_t struct_size;
  int32_t device;
  const kdtree_model* target;
  const kdtree_model* drafter; /* NULL: none */
  int32_t max_requests;        /* 1..65535 */
  int32_t capacity;            /* cache rows of a request */
  int32_t max_budget;          /* 0..1024 */
  int32_t block_size;   /* of the drafter; 0: the trained one. Without a drafter: the largest of the stand-ins, 0: 16 */
  int32_t prefill_rows; /* prompt rows of all requests in one pass; 0: 256 */
  int32_t cache_block_size; /* rows of a cache block; 0: contiguous caches */
  int32_t gemm;             /* kdtree_gemm */
  int32_t attention;        /* kdtree_attention */
  int32_t dtype;      /* kdtree_dtype of weights, activations and caches; logits are float32. A caller's struct may
                         end in front of it, as it once did: float32 */
  int32_t cache_rows; /* kdtree_cache_rows of the target; fp8 takes KDTREE_BF16 and rows of 512 + 64 values */
} kdtree_decoder_args;

typedef struct kdtree_decoder_info {
  uint32_t struct_size;
  int32_t vocab_size;
  int32_t hidden_size;
  int32_t layers;
  int32_t block_size;
  int32_t row_bytes; /* of a cache row */
  uint64_t model_bytes, cache_bytes, scratch_bytes;
  int32_t dtype;            /* kdtree_dtype; a caller's struct may end in front of it */
  int32_t products_path;    /* kdtree_path of the target's and the drafter's products, but those of cuBLAS */
  int32_t attention_path;   /* kdtree_path of the target's attention in the exact form */
  int32_t graphs;           /* 1: rounds of runs that are not eager are replayed as CUDA graphs, see kdtree_run_round */
  int32_t cache_rows;       /* kdtree_cache_rows; a caller's struct may end in front of it */
  int32_t attention_kernel; /* kdtree_attention_kernel */
} kdtree_decoder_info;

/* The models may be destroyed afterwards. */
KDTREE_API kdtree_status kdtree_decoder_create(const kdtree_decoder_args* args, kdtree_decoder** decoder);
KDTREE_API kdtree_status kdtree_decoder_query(const kdtree_decoder* decoder, kdtree_decoder_info* info);
KDTREE_API void kdtree_decoder_destroy(kdtree_decoder* decoder);

typedef enum kdtree_method { KDTREE_AR = 0, KDTREE_CHAIN = 1, KDTREE_DDTREE = 2 } kdtree_method;

/* Who proposes. The stand-ins are those of reference/drafter.py. */
typedef enum kdtree_drafter_kind {
  KDTREE_DRAFT_DFLASH = 0,
  KDTREE_DRAFT_ORACLE = 1,
  KDTREE_DRAFT_NOISY = 2,
  KDTREE_DRAFT_REPLAY = 3
} kdtree_drafter_kind;

/* One request; all arrays are host memory and are copied. */
typedef struct kdtree_request {
  uint32_t struct_size;
  int32_t prompt_length; /* P >= 1 */
  const int32_t* prompt; /* [P] */
  int32_t max_new_tokens;
  int32_t budget;    /* DDTree: non-root nodes of a round at most */
  int32_t capacity;  /* cache rows it may use; 0: prompt + new tokens + budget, but no more than there are */
  int32_t top_k;     /* 0: off */
  float temperature; /* 0: greedy */
  float top_p;       /* 1: off */
  uint64_t seed;
  const int32_t* stop_tokens; /* [stop_count] */
  int32_t stop_count;

  int32_t drafter;    /* kdtree_drafter_kind */
  int32_t block_size; /* of a stand-in */
  int32_t golden_count;
  const int32_t* golden; /* oracle, noisy oracle: the tokens that follow the prompt */
  int32_t right;         /* oracle: wrong from this index on; golden_count: never */
  int32_t max_rank;      /* noisy oracle */
  double miss;           /* noisy oracle: probability that the golden token is missing */
  uint64_t noise_seed;
  int32_t list_count, list_depths, list_width; /* replay: M lists of [L, K] */
  const int32_t* list_positions;               /* [M] absolute positions of the roots */
  const int32_t* list_ids;                     /* [M, L, K] */
  const float* list_lp;                        /* [M, L, K] */
} kdtree_request;

/* Who builds the trees. The heap's come from the host: in every round the lists are copied down, and the trees, the
 * same node for node, are copied up. So rounds with either can be held against each other. */
typedef enum kdtree_builder { KDTREE_BUILDER_GPU = 0, KDTREE_BUILDER_HEAP = 1 } kdtree_builder;

typedef struct kdtree_run_args {
  uint32_t struct_size;
  int32_t method;                /* kdtree_method */
  int32_t requests;              /* 1..max_requests */
  int32_t keep_traces;           /* 1: keep what every round saw, see kdtree_run_trace */
  int32_t keep_logits;           /* 1: keep the target's logits of every committed row, see kdtree_run_logits */
  int32_t full_cost;             /* 1: where a stand-in proposes, the drafter works too, and what it says is dropped */
  const kdtree_request* request; /* [requests] */
  void* stream;
  int32_t eager;            /* 1: launch every kernel of every round. A caller's struct may end in front of it: 0 */
  int32_t cost_count;       /* DDTree: a policy chooses the budgets of rounds, at most those of the requests; 0: none */
  const int32_t* cost_rows; /* [cost_count] ascending: rows of a verify pass, those of all requests */
  const double* cost_seconds; /* [cost_count] what a round with such a pass takes, as it was measured */
  int32_t timed;   /* 1: rounds tell the seconds of their stages. A caller's struct may end in front of it: 0 */
  int32_t builder; /* kdtree_builder; the heap is for DDTree alone */
} kdtree_run_args;

/* One run of an engine at a time. Makes the buffers; nothing is computed yet. */
KDTREE_API kdtree_status kdtree_run_create(kdtree_decoder* decoder, const kdtree_run_args* args, kdtree_run** run);
/* The prompts, and each request's first root token. */
KDTREE_API kdtree_status kdtree_run_prefill(kdtree_run* run);
/* One round of every request that is not finished; *active: how many are still not.
 *
 * Unless the run is eager, a round is captured as a CUDA graph and then replayed, with the same bits. The engine keeps
 * the arrays of its last runs with their graphs, up to 16 and 1 GiB in all; runs of equal shape share them: method,
 * batch, block, widest tree, kinds of drafters, greedy or sampled. Trees are counted in steps (0, 1, 2, 3, 4, 7, 8, 12,
 * 15, 16, 24, 32, 48, ... 1024; as many nodes as the chain has are one too), cache rows in 256s, stop tokens in powers
 * of two. The first round of each shape is made kernel by kernel, and so are all where capturing fails: see
 * kdtree_run_replayed. There are no graphs in the host library, with KDTREE_GEMM_CUBLAS (its workspace is cuBLAS's
 * own), and where KDTREE_LAUNCH_BLOCKING=1 is set. Replayed kernels have the default priority, whatever the stream's.
 *
 * The call returns when the round is committed and told. What the drafter takes of it may still be on the stream, which
 * must outlive the run; kdtree_run_destroy waits for it. A run of which a call failed goes on with none.
 */
KDTREE_API kdtree_status kdtree_run_round(kdtree_run* run, int32_t* active);
/* *rounds: how many of the run's were replayed as a whole. */
KDTREE_API kdtree_status kdtree_run_replayed(const kdtree_run* run, int32_t* rounds);

/* A round in steps, in this order; the last one ends it like kdtree_run_round. dump: path of a KDTR file that gets
 * every array of the step, by the names of the reference's traces; NULL: none. Steps without a dump are replayed as
 * graphs of their own. */
typedef enum kdtree_stage {
  KDTREE_STAGE_DRAFT = 0,
  KDTREE_STAGE_TREE_BUILD = 1,
  KDTREE_STAGE_VERIFY = 2,
  KDTREE_STAGE_COMMIT = 3
} kdtree_stage;
KDTREE_API kdtree_status kdtree_run_stage(kdtree_run* run, int32_t stage, const char* dump, int32_t* active);

/* Ends the run whatever its state; the engine is as before it. */
KDTREE_API void kdtree_run_destroy(kdtree_run* run);

typedef enum kdtree_finish {
  KDTREE_RUNNING = 0,
  KDTREE_FINISH_STOP = 1,
  KDTREE_FINISH_LENGTH = 2,
  KDTREE_FINISH_CAPACITY = 3,
  KDTREE_FINISH_ERROR = 4 /* see status */
} kdtree_finish;

typedef struct kdtree_request_state {
  uint32_t struct_size;
  int32_t finish; /* kdtree_finish */
  int32_t token_count;
  int32_t rounds;
  const int32_t* tokens; /* [token_count] output so far; valid until the next call on the run */
  int32_t cache_length;  /* committed rows */
  int32_t status[3];     /* kdtree_request_status; a prompt without a choice: place -1, detail its last position */
} kdtree_request_state;
KDTREE_API kdtree_status kdtree_run_state(const kdtree_run* run, int32_t request, kdtree_request_state* state);

typedef struct kdtree_round {
  int32_t prefix_length; /* committed rows before it */
  int32_t nodes;
  int32_t depth_limit;
  int32_t accepted; /* a: committed draft nodes */
  int32_t path[KDTREE_MAX_DEPTH + 1];
  int32_t ranks[KDTREE_MAX_DEPTH + 1]; /* of path[1..a] in 0..a-1 */
  double seconds[4]; /* of the stages, 0 unless the run is timed or the round was made in steps: device time between
                        two events, on the host by its clock. Those of a timed round are nodes of its graph. Kernels
                        overlap inside a stage, but an event is recorded when all in front of it has ended, and what is
                        behind it starts only then: the stages add up to the round, which takes a little longer than an
                        untimed one. What the drafter takes of the committed rows, behind the commit, is drafting. In
                        steps each stage holds the start of its own graph; where kernels are launched one by one, the
                        waits for the host between them */
  double wall_seconds;
} kdtree_round;
/* Rounds first..first+count-1 of a request. */
KDTREE_API kdtree_status kdtree_run_rounds(const kdtree_run* run, int32_t request, int32_t first, int32_t count,
                                           kdtree_round* rounds);

/* What the policy expected of a round of the run, or of the one to come: 1 + the sum of the probabilities that the
 * drafter gave to the nodes of so large a tree in the rounds before. Of the first round nothing is expected: 0. */
typedef struct kdtree_prediction {
  int32_t budget;
  int32_t reserved;
  double tokens;  /* of all requests */
  double seconds; /* by the costs given */
} kdtree_prediction;
KDTREE_API kdtree_status kdtree_run_prediction(const kdtree_run* run, int32_t round, kdtree_prediction* prediction);

/* What a round saw, if the run keeps traces. Host memory, valid until the run is destroyed. */
typedef struct kdtree_trace {
  uint32_t struct_size;
  int32_t depths, width; /* of the lists; 0: nothing was proposed */
  const int32_t* ids;    /* [depths, width] */
  const float* lp;       /* [depths, width] */
  const float* logz;     /* [depths] */
  int32_t nodes;         /* n */
  int32_t bonus;
  const int32_t* tokens; /* [1 + n], as the following */
  const int32_t* parents;
  const int32_t* node_depths;
  const int32_t* ranks;
  const double* scores;
  const int32_t* choices;
} kdtree_trace;
KDTREE_API kdtree_status kdtree_run_trace(const kdtree_run* run, int32_t request, int32_t round, kdtree_trace* trace);

/* The target's logits of the committed rows, in order, from the prompt's last row on: float32 [rows, vocab_size]. *rows
 * is how many there are, rows and data are only written where not NULL; `data` holds what `rows` of a call before said.
 */
KDTREE_API kdtree_status kdtree_run_logits(const kdtree_run* run, int32_t request, int32_t* rows, float* data);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KDTREE_DECODE_H_ */
