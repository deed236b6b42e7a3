/* The C ABI from C: every call is in the library, and refuses before it touches a device - so this needs none. */
#include <stdio.h>
#include <string.h>

#include "kdtree_engine.h"

static int failed = 0;

static void expect(const char* call, int got, int expected, const char* word) {
  if (got == expected && strstr(kdtree_last_error(), word) != NULL) {
    printf("ok %s, %s\n", call, word);
    return;
  }
  failed = 1;
  printf("FAILED %s: expected status %d and '%s', got %d: '%s'\n", call, expected, word, got, kdtree_last_error());
}

/* A struct of another version of the header, then one of zeros: R = 0 is no size. */
#define REFUSES(stage)                                                              \
  do {                                                                              \
    kdtree_##stage##_args args;                                                     \
    memset(&args, 0, sizeof(args));                                                 \
    args.struct_size = (uint32_t)sizeof(args) - 1;                                  \
    expect("kdtree_" #stage, kdtree_##stage(&args), KDTREE_VERSION, "struct_size"); \
    args.struct_size = (uint32_t)sizeof(args);                                      \
    expect("kdtree_" #stage, kdtree_##stage(&args), KDTREE_SIZE, "requests");       \
  } while (0)

int main(void) {
  kdtree_topk_logprob_args topk;
  kdtree_tree_build_args tree;
  kdtree_heap_tree_args heap;
  int32_t count = -1;

  if (kdtree_abi_version() != KDTREE_ABI_VERSION || strlen(kdtree_architectures()) == 0) failed = 1;
  printf("version %d, built for %s\n", (int)kdtree_abi_version(), kdtree_architectures());
  expect("kdtree_device_count", kdtree_device_count(NULL), KDTREE_POINTER, "count");
  expect("kdtree_device_count", kdtree_device_count(&count), KDTREE_OK, "");
  if (count < 0) failed = 1;
  expect("kdtree_device_query", kdtree_device_query(NULL), KDTREE_POINTER, "info");

  REFUSES(topk_logprob);
  REFUSES(tree_build);
  REFUSES(target_choice);
  REFUSES(tree_accept);
  REFUSES(kv_compact);
  REFUSES(mla_attention);
  memset(&topk, 0, sizeof(topk));
  memset(&tree, 0, sizeof(tree));
  expect("kdtree_logits_tree", kdtree_logits_tree(&topk, &tree), KDTREE_VERSION, "struct_size");

  memset(&heap, 0, sizeof(heap));
  if (kdtree_heap_tree(&heap) != KDTREE_HEAP_TREE_VERSION || kdtree_heap_tree_workspace(7, 64, 64) == 0) failed = 1;
  printf("workspaces: %zu %zu %zu bytes\n", kdtree_topk_logprob_workspace(2, 7, 163840, 64),
         kdtree_tree_build_workspace(2, 7, 64, 64), kdtree_target_choice_workspace(2, 65, 163840));
  return failed;
}
