/* C ABI of the DDTree engine: the stages of a round as batched calls on device memory.
 *
 * C99. Every call takes one argument struct whose first field is its own size, checks it on the host, and enqueues its
 * kernels on the stream given; it never waits, allocates device memory, throws or exits. What a call needs beside its
 * arrays is a workspace of as many bytes as the query of the same name says. Any stage may be captured in a graph.
 *
 * Requests are batched: array [R, ...] holds R blocks of one shape, and request r uses as much of its block as its own
 * size says. Arrays lie contiguously in device memory, aligned to their element type, unless a comment asks for more.
 *
 * What only the device can see - a NaN, a broken list, a tree that is none - goes to status [R, 3]: code
 * (kdtree_request_status), place, detail. `before` (may be NULL, may be the same array as `status`) is the status of
 * the stage before: a request that failed there is passed over, its outputs are those of an empty round, and its status
 * is carried on, so that a captured round can go to its end and the host raises afterwards.
 *
 * The contract that the outputs follow is that of the NumPy package reference/, array for array.
 */
#ifndef KDTREE_ENGINE_H_
#define KDTREE_ENGINE_H_

#include <stddef.h>
#include <stdint.h>

#include "kdtree_heap_tree.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  KDTREE_ABI_VERSION = 1,
  KDTREE_MAX_DEPTH = 31,    /* L */
  KDTREE_MAX_BUDGET = 1024, /* B, and the longest top-k list K */
  KDTREE_MAX_REQUESTS = 65535
};

/* Result of a call. Nothing was enqueued unless it is KDTREE_OK or KDTREE_CUDA. */
typedef enum kdtree_status {
  KDTREE_OK = 0,
  KDTREE_VERSION = 1,     /* struct_size is that of another version of this header */
  KDTREE_SIZE = 2,        /* a size is out of range */
  KDTREE_POINTER = 3,     /* a required array is NULL */
  KDTREE_ALIGNMENT = 4,   /* an array is not aligned as its comment asks */
  KDTREE_WORKSPACE = 5,   /* the workspace is smaller than its query says */
  KDTREE_UNSUPPORTED = 6, /* this device has too little shared memory, or none of the built architectures fits it */
  KDTREE_CUDA = 7         /* CUDA reported an error; the message has its name */
} kdtree_status;

/* Code of one request, written on the device. Codes 1 to 5 are those of kdtree_list_status. */
typedef enum kdtree_request_status {
  KDTREE_REQUEST_OK = 0,
  KDTREE_REQUEST_NAN = 1,        /* place: depth (1-based); detail: rank in a list, token id in logits */
  KDTREE_REQUEST_INFINITE = 2,   /* +inf; place and detail as above */
  KDTREE_REQUEST_VOCABULARY = 3, /* depth, rank */
  KDTREE_REQUEST_UNSORTED = 4,   /* depth, rank */
  KDTREE_REQUEST_REPEATED = 5,   /* depth, rank */
  KDTREE_REQUEST_NO_CHOICE = 6,  /* node on the accepted path whose target row gives no token */
  KDTREE_REQUEST_PARENT = 7,     /* node whose parent does not precede it; detail: the parent */
  KDTREE_REQUEST_TWIN = 8,       /* node with the token of an earlier sibling; detail: that sibling */
  KDTREE_REQUEST_OWN_SIZE = 9,   /* a size of this request does not fit its block, the depth of an accepted path among
                                    them; place: the size, detail: the most */
  KDTREE_REQUEST_PATH = 10, /* place: index in the path whose node does not lie behind the one before; detail: node */
  KDTREE_REQUEST_CAPACITY = 11 /* rows needed; detail: rows there are, or rows before a bad block */
} kdtree_request_status;

typedef enum kdtree_dtype { KDTREE_F32 = 0, KDTREE_BF16 = 1 } kdtree_dtype;

/* How a tree was built. All give the same tree. */
typedef enum kdtree_route {
  KDTREE_ROUTE_NONE = 0,     /* root alone: nothing to build, or refused */
  KDTREE_ROUTE_PARALLEL = 1, /* threshold, expand, sort */
  KDTREE_ROUTE_SERIAL = 2    /* one warp, node by node: calls of budgets up to 32; lp above 0, costs beyond 32 bits, one
                                huge tie */
} kdtree_route;

/* Why the last call of this thread failed, with the numbers; "" after one that did not. Valid until the next call. */
KDTREE_API const char* kdtree_last_error(void);

KDTREE_API int32_t kdtree_abi_version(void);

/* What the library was built for, e.g. "sm_80 sm_90a sm_100 sm_120 ptx_80", or "host". */
KDTREE_API const char* kdtree_architectures(void);

typedef struct kdtree_device_info {
  uint32_t struct_size;
  int32_t device;             /* in: its number */
  int32_t compute_capability; /* 10 * major + minor */
  int32_t multiprocessors;
  int32_t shared_memory_optin; /* bytes a block may ask for */
  int32_t driver;              /* CUDA version of the driver, 1000 * major + 10 * minor; 0: no driver */
  int32_t runtime;             /* CUDA version of the library */
  int32_t usable;              /* 1: the library holds code for this device */
  uint64_t total_memory;       /* bytes */
  char name[64];
} kdtree_device_info;

/* Number of devices in *count; 0 without a driver, which is no error. */
KDTREE_API kdtree_status kdtree_device_count(int32_t* count);
KDTREE_API kdtree_status kdtree_device_query(kdtree_device_info* info);

/* Stage draft -> lists. The K best of each row of logits by (logit descending, id ascending), with lp = logit - logZ.
 * reference/topk.py. Lists past a request's own depth limit are neither read nor written. */
typedef struct kdtree_topk_logprob_args {
  uint32_t struct_size;
  int32_t requests;    /* R, 1..65535 */
  int32_t depth_limit; /* L, 0..31 */
  int32_t vocab_size;  /* V >= 1: logical size; columns past it are never looked at */
  int32_t k;           /* K, 0..min(1024, V) */
  int32_t dtype;       /* kdtree_dtype of the logits */
  int64_t row_stride;  /* elements from row to row, >= V; request stride: L * row_stride */

  const void* logits;          /* [R, L, row_stride] */
  const int32_t* depth_limits; /* [R], each 0..L, NULL: L */
  const int32_t* before;       /* [R, 3] */

  int32_t* ids;    /* [R, L, K] */
  float* lp;       /* [R, L, K] */
  float* logz;     /* [R, L] */
  int32_t* status; /* [R, 3] */

  void* workspace; /* aligned to 256; may be NULL if the query says 0 */
  size_t workspace_size;
  void* stream; /* cudaStream_t */
} kdtree_topk_logprob_args;

KDTREE_API size_t kdtree_topk_logprob_workspace(int32_t requests, int32_t depth_limit, int32_t vocab_size, int32_t k);
KDTREE_API kdtree_status kdtree_topk_logprob(const kdtree_topk_logprob_args* args);

/* Stage lists -> tree: the best-first tree of at most B nodes, bit for bit that of reference/tree.py.
 * Past node n every array holds the filler: -1 in parents, first_child, next_sibling and paths, 0 elsewhere. */
typedef struct kdtree_tree_build_args {
  uint32_t struct_size;
  int32_t requests;            /* R, 1..65535 */
  int32_t depth_limit;         /* L, 0..31 */
  int32_t width;               /* K, 0..1024 */
  int32_t budget;              /* B, 0..1024 */
  int32_t vocab_size;          /* ids must lie below it; 0: not known */
  int32_t checked;             /* 1: the lists come from kdtree_topk_logprob and need no check */
  int32_t shared_memory_limit; /* bytes a block may use, static ones included; 0: what the device has */

  const float* lp;               /* [R, L, K] log-probabilities, best first; -inf ends a list */
  const int32_t* ids;            /* [R, L, K] */
  const int32_t* root_tokens;    /* [R], NULL: 0 */
  const int32_t* prefix_lengths; /* [R], NULL: 0 */
  const int32_t* depth_limits;   /* [R], each 0..L, NULL: L */
  const int32_t* budgets;        /* [R], each 0..B, NULL: B */
  const int32_t* before;         /* [R, 3] */

  int32_t* node_count;   /* [R] n, non-root nodes */
  int32_t* tokens;       /* [R, 1+B] */
  int32_t* parents;      /* [R, 1+B] */
  int32_t* depths;       /* [R, 1+B] */
  int32_t* ranks;        /* [R, 1+B] */
  double* scores;        /* [R, 1+B] */
  int32_t* positions;    /* [R, 1+B] prefix length + depth; this and the following may be NULL */
  uint32_t* visibility;  /* [R, 1+B, ceil((1+B)/32)] bit j of row i: node i sees node j */
  int32_t* paths;        /* [R, 1+B, L+1] nodes from the root to the node itself, then -1 */
  int32_t* first_child;  /* [R, 1+B] this and next_sibling both or neither */
  int32_t* next_sibling; /* [R, 1+B] */
  int32_t* route;        /* [R] kdtree_route */
  int32_t* status;       /* [R, 3] */

  void* workspace; /* aligned to 256; may be NULL if the query says 0 */
  size_t workspace_size;
  void* stream;
} kdtree_tree_build_args;

KDTREE_API size_t kdtree_tree_build_workspace(int32_t requests, int32_t depth_limit, int32_t width, int32_t budget);
KDTREE_API kdtree_status kdtree_tree_build(const kdtree_tree_build_args* args);

/* Both stages in one call: logits -> lists -> tree. `topk` and `tree` are complete; the lists that the first writes and
 * the second reads, depth_limits and stream must be the same, and the tree stage takes topk->status as its `before`. */
KDTREE_API kdtree_status kdtree_logits_tree(const kdtree_topk_logprob_args* topk, const kdtree_tree_build_args* tree);

/* The target's choice at each row of logits: argmax, ties to the lowest id, or one draw whose random number belongs to
 * (seed, position). -1 for a row with NaN, with +inf or without a finite logit, and where
 * the reference refuses the request's parameters. reference/sampling.py.
 * Rows past a request's own node count are neither read nor written. */
typedef struct kdtree_target_choice_args {
  uint32_t struct_size;
  int32_t requests;   /* R, 1..65535 */
  int32_t rows;       /* N = 1 + B, 1..1025: rows of a block */
  int32_t vocab_size; /* V >= 1: logical size */
  int32_t dtype;      /* kdtree_dtype of the logits */
  int64_t row_stride; /* elements from row to row, >= V */

  const void* logits;        /* [R, N, row_stride] */
  const int32_t* node_count; /* [R], each 0..N-1: rows used - 1; NULL: N - 1 */
  const int32_t* positions;  /* [R, N], of each row itself, >= 0; NULL only if every request is greedy */
  const float* temperatures; /* [R], 0: greedy; NULL: all greedy */
  const int32_t* top_k;      /* [R], 0: off; NULL: off */
  const float* top_p;        /* [R], in (0, 1], 1: off; NULL: off */
  const uint64_t* seeds;     /* [R]; NULL: 0 */
  const int32_t* before;     /* [R, 3]: rows of a request that failed are not read, choices not written */

  int32_t* choices; /* [R, N] */

  void* workspace; /* aligned to 256; may be NULL if the query says 0 */
  size_t workspace_size;
  void* stream;
} kdtree_target_choice_args;

KDTREE_API size_t kdtree_target_choice_workspace(int32_t requests, int32_t rows, int32_t vocab_size);
KDTREE_API kdtree_status kdtree_target_choice(const kdtree_target_choice_args* args);

/* Stage accept: the longest path of the tree that follows the target's choices. reference/accept.py. */
typedef struct kdtree_tree_accept_args {
  uint32_t struct_size;
  int32_t requests;    /* R, 1..65535 */
  int32_t budget;      /* B, 0..1024 */
  int32_t depth_limit; /* L, 0..31: deepest node */

  const int32_t* node_count; /* [R], each 0..B */
  const int32_t* tokens;     /* [R, 1+B] */
  const int32_t* parents;    /* [R, 1+B] */
  const int32_t* choices;    /* [R, 1+B] */
  const int32_t* before;     /* [R, 3] */

  int32_t* accepted; /* [R] accepted nodes a, the root not counted; -1 for a request that failed */
  int32_t* path;     /* [R, L+1] nodes, the root first, then -1 */
  int32_t* bonus;    /* [R] the next root token, -1 for a request that failed */
  int32_t* status;   /* [R, 3] */

  void* stream;
} kdtree_tree_accept_args;

KDTREE_API kdtree_status kdtree_tree_accept(const kdtree_tree_accept_args* args);

/* One view for every latent KV cache. Row i of request r in layer l begins at
 *   base + l * layer_stride + r * request_stride + i * row_stride                              without a block table,
 *   base + l * layer_stride + (table[r, i / block_size] * block_size + i % block_size) * row_stride       with one.
 * All strides in bytes. */
typedef struct kdtree_cache_view {
  void* base;
  int64_t layer_stride;
  int64_t request_stride;     /* not used with a block table */
  int64_t row_stride;         /* >= row_bytes */
  int32_t row_bytes;          /* bytes of a row that are moved, > 0 */
  int32_t layers;             /* >= 1 */
  int32_t capacity;           /* rows of a request */
  int32_t block_size;         /* rows of a block; 0: no block table */
  int32_t table_stride;       /* blocks from request to request in the table */
  int32_t reserved;           /* 0 */
  const int32_t* block_table; /* [R, table_stride] */
} kdtree_cache_view;

/* Stage commit: the rows of the accepted nodes move to directly behind the prefix, in every layer. Row `path[i]` of the
 * scratch behind the prefix becomes row i; the path increases strictly from its root 0. reference/cache.py `commit`.
 * Nothing of a request is moved if its path or its size is refused. Any alignment; multiples of 16 are fast. */
typedef struct kdtree_kv_compact_args {
  uint32_t struct_size;
  int32_t requests;    /* R, 1..65535 */
  int32_t depth_limit; /* L, 0..31 */
  int32_t reserved;    /* 0 */

  kdtree_cache_view cache;
  const int32_t* prefix_lengths; /* [R] */
  const int32_t* accepted;       /* [R] a, each 0..L, or -1: nothing to do */
  const int32_t* path;           /* [R, L+1] */
  const int32_t* before;         /* [R, 3] */

  int32_t* status; /* [R, 3] */
  int32_t* moved;  /* [R] rows that changed their place; may be NULL */

  void* stream;
} kdtree_kv_compact_args;

KDTREE_API kdtree_status kdtree_kv_compact(const kdtree_kv_compact_args* args);

/* How a latent cache keeps a row: in the dtype, or in the 656 bytes known as fp8_ds_mla: 512 latents as e4m3 codes, a
 * float32 scale for each 128 of them, 64 rope channels in bf16. The latter stands for a bf16 row of 512 + 64 values. */
typedef enum kdtree_cache_rows { KDTREE_CACHE_DTYPE = 0, KDTREE_CACHE_FP8 = 1 } kdtree_cache_rows;

/* Stage verify, its attention alone: MLA in the absorbed form, every row over the cache rows of its request's prefix
 * and of its own path, at their absolute positions, so that its bits are those of plain decoding. The rows of the pass
 * are in the cache already. reference/mla.py `latent_attention`. What is past a request's node count is not defined. */
typedef enum kdtree_attention_path {
  KDTREE_ATTENTION_BEST = 0,     /* what the engine takes on this device */
  KDTREE_ATTENTION_PORTABLE = 1, /* of bf16 mma.sync; of float32 there is no other */
  KDTREE_ATTENTION_WGMMA = 2     /* of bf16 rows on compute capability 9.0; its bits differ from the portable ones */
} kdtree_attention_path;

typedef struct kdtree_mla_attention_args {
  uint32_t struct_size;
  int32_t requests;    /* R, 1..65535 */
  int32_t rows;        /* N = 1 + B, 1..1025 */
  int32_t heads;       /* of bf16: 16, 32, 64 or 128 */
  int32_t rank;        /* values of a latent; of bf16: 512 */
  int32_t rope;        /* of its rope key; of bf16: 64 */
  int32_t dtype;       /* kdtree_dtype of q, cache and out */
  int32_t cache_rows;  /* kdtree_cache_rows */
  int32_t path;        /* kdtree_attention_path */
  int32_t layer;       /* of the cache */
  int32_t longest;     /* >= the keys of every row; the closer, the better the work is cut */
  int32_t path_stride; /* entries of a path; 0 without paths */
  float scale;         /* of a score */

  kdtree_cache_view cache; /* a row: latent, then rope key; of bf16 base and strides are multiples of 16 */
  const void* q;           /* [R, N, heads, rank + rope] */

  const int32_t* node_count;     /* [R], each 0..N-1: rows used - 1 */
  const int32_t* prefix_lengths; /* [R] */
  const int32_t* positions;      /* [R, N] prefix length + depth */
  const int32_t* paths; /* [R, N, path_stride] nodes from the root to the row itself; NULL: row i sees rows 0..i */

  void* out;  /* [R, N, heads, rank] */
  float* lse; /* [R, N, heads] natural logarithm of the sum of exp(score); may be NULL */

  void* workspace; /* aligned to 256 */
  size_t workspace_size;
  void* stream;
} kdtree_mla_attention_args;

KDTREE_API size_t kdtree_mla_attention_workspace(int32_t requests, int32_t rows, int32_t heads, int32_t rank,
                                                 int32_t longest, int32_t dtype);
KDTREE_API kdtree_status kdtree_mla_attention(const kdtree_mla_attention_args* args);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KDTREE_ENGINE_H_ */
