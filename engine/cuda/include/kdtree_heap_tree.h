/* DDTree's best-first tree on the CPU: node for node the tree of reference/tree.py, scores and ties included.
 *
 * C99. No call allocates, throws, prints or keeps state: one call per thread at a time with a workspace of its own.
 * Times and results of this builder are what a GPU builder is compared with.
 */
#ifndef KDTREE_HEAP_TREE_H_
#define KDTREE_HEAP_TREE_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define KDTREE_API __attribute__((visibility("default")))
#else
#define KDTREE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum { KDTREE_HEAP_TREE_MAX_DEPTH = 31, KDTREE_HEAP_TREE_MAX_BUDGET = 1024, KDTREE_HEAP_TREE_MAX_WIDTH = 1 << 20 };

/* Result of a call. */
typedef enum kdtree_heap_tree_result {
  KDTREE_HEAP_TREE_OK = 0,
  KDTREE_HEAP_TREE_REFUSED = 1,    /* some requests have a status other than LIST_OK; all others are built */
  KDTREE_HEAP_TREE_BAD_SIZE = 2,   /* a size is negative or too large, or `checked`; nothing was written */
  KDTREE_HEAP_TREE_NO_POINTER = 3, /* a required array is NULL; nothing was written */
  KDTREE_HEAP_TREE_WORKSPACE = 4,  /* the workspace is too small or not 8-aligned; nothing was written */
  KDTREE_HEAP_TREE_VERSION = 5     /* struct_size is that of another version of this header */
} kdtree_heap_tree_result;

/* Why the lists of one request were refused: the first fault in order of depth, then rank, then this order. */
typedef enum kdtree_list_status {
  KDTREE_LIST_OK = 0,
  KDTREE_LIST_NAN = 1,        /* the log-probability is NaN */
  KDTREE_LIST_INFINITE = 2,   /* the log-probability is +inf */
  KDTREE_LIST_VOCABULARY = 3, /* the token id is negative, or not below vocab_size */
  KDTREE_LIST_UNSORTED = 4,   /* the log-probability is above that of the rank before */
  KDTREE_LIST_REPEATED = 5    /* the token id stands twice among the finite entries of this list */
} kdtree_list_status;

/* R requests, one after the other. Every output array holds R blocks of the shape given.
 * What lies past node n of a block gets the filler: -1 in parents, first_child, next_sibling and paths, 0 elsewhere.
 * A refused request gets a tree of its root alone. */
typedef struct kdtree_heap_tree_args {
  uint32_t struct_size; /* sizeof(kdtree_heap_tree_args) */
  int32_t requests;     /* R */
  int32_t depth_limit;  /* L, 0..31: rows of every list */
  int32_t width;        /* K: columns of every list */
  int32_t budget;       /* B, 0..1024: non-root nodes at most; also the size of the output blocks */
  int32_t vocab_size;   /* ids must lie below it; 0: not known */
  int32_t checked;      /* 1: the lists are known to be sound and need no check */

  const float* lp;               /* [R, L, K] log-probabilities, best first; -inf ends a row */
  const int32_t* ids;            /* [R, L, K] token ids */
  const int32_t* root_tokens;    /* [R], NULL: 0 */
  const int32_t* prefix_lengths; /* [R], NULL: 0 */
  const int32_t* depth_limits;   /* [R], each 0..L, NULL: L */
  const int32_t* budgets;        /* [R], each 0..B, NULL: B */

  int32_t* node_count; /* [] n, non-root nodes */
  int32_t* tokens;     /* [1+B] */
  int32_t* parents;    /* [1+B] */
  int32_t* depths;     /* [1+B] */
  int32_t* ranks;      /* [1+B] */
  double* scores;      /* [1+B] */

  int32_t* positions;    /* [1+B] prefix length + depth; this and the following may be NULL,
                          first_child and next_sibling both or neither */
  int32_t* first_child;  /* [1+B] */
  int32_t* next_sibling; /* [1+B] */
  uint32_t* visibility;  /* [1+B, ceil((1+B)/32)] bit j of row i: node i sees node j */
  int32_t* paths;        /* [1+B, L+1] nodes from the root to the node itself, then -1 */

  int32_t* status; /* [3] kdtree_list_status, depth (1-based) and rank of the fault; required */

  void* workspace; /* kdtree_heap_tree_workspace bytes, aligned to 8 */
  size_t workspace_size;
} kdtree_heap_tree_args;

/* Bytes that kdtree_heap_tree needs, for any number of requests; 0 if a size is out of range. */
KDTREE_API size_t kdtree_heap_tree_workspace(int32_t depth_limit, int32_t width, int32_t budget);

KDTREE_API kdtree_heap_tree_result kdtree_heap_tree(const kdtree_heap_tree_args* args);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* KDTREE_HEAP_TREE_H_ */
