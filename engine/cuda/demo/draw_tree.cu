// Builds one tree through the C ABI and draws it: draw_tree [budget], 0..1024, default 12.
//
// Each position offers tokens of its own (10.., 20.., 30..) with the probabilities 1/2, 1/4, ...; the tree holds the
// most probable sequences. On a machine without a device it says so and ends with 77.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "common/port.h"
#include "kdtree_engine.h"

namespace {

constexpr int kDepth = 3, kWidth = 8;

[[noreturn]] void stop(int status, const char* why) {
  std::printf("%s%s\n", status == 77 ? "SKIP: " : "", why);
  std::exit(status);
}

void need(cudaError_t error) {
  if (error != cudaSuccess) stop(1, cudaGetErrorString(error));
}

template <class T>
T* device_array(size_t n, const T* values = nullptr) {
  void* p = nullptr;
  need(cudaMalloc(&p, n * sizeof(T)));
  if (values != nullptr) need(cudaMemcpy(p, values, n * sizeof(T), cudaMemcpyHostToDevice));
  return static_cast<T*>(p);
}

template <class T>
std::vector<T> host_array(const T* values, size_t n) {
  std::vector<T> copy(n);
  need(cudaMemcpy(copy.data(), values, n * sizeof(T), cudaMemcpyDeviceToHost));
  return copy;
}

void draw(const std::vector<int32_t>& tokens, const std::vector<int32_t>& parents, const std::vector<double>& scores,
          int n, int node, int indent) {
  std::printf("%*s%d  p=%.4f\n", 2 * indent, "", tokens[node], std::exp(scores[node]));
  for (int child = node + 1; child <= n; ++child)
    if (parents[child] == node) draw(tokens, parents, scores, n, child, indent + 1);
}

}  // namespace

int main(int argc, char** argv) {
  const int budget = argc > 1 ? std::atoi(argv[1]) : 12;
  int32_t devices = 0;
  if (kdtree_device_count(&devices) != KDTREE_OK) stop(1, kdtree_last_error());
  if (devices == 0) stop(77, "no CUDA device");

  std::vector<float> lp(kDepth * kWidth);
  std::vector<int32_t> ids(kDepth * kWidth);
  for (int d = 0; d < kDepth; ++d)
    for (int k = 0; k < kWidth; ++k) {
      lp[d * kWidth + k] = static_cast<float>(-(k + 1) * std::log(2.0));
      ids[d * kWidth + k] = 10 * (d + 1) + k;
    }

  const size_t rows = 1 + (budget > 0 ? budget : 0);
  kdtree_tree_build_args args;
  std::memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  args.requests = 1;
  args.depth_limit = kDepth;
  args.width = kWidth;
  args.budget = budget;
  args.lp = device_array(lp.size(), lp.data());
  args.ids = device_array(ids.size(), ids.data());
  args.node_count = device_array<int32_t>(1);
  args.tokens = device_array<int32_t>(rows);
  args.parents = device_array<int32_t>(rows);
  args.depths = device_array<int32_t>(rows);
  args.ranks = device_array<int32_t>(rows);
  args.scores = device_array<double>(rows);
  args.route = device_array<int32_t>(1);
  args.status = device_array<int32_t>(3);
  args.workspace_size = kdtree_tree_build_workspace(1, kDepth, kWidth, budget);
  args.workspace = device_array<unsigned char>(args.workspace_size + 1);
  if (kdtree_tree_build(&args) != KDTREE_OK) stop(1, kdtree_last_error());
  need(cudaDeviceSynchronize());

  const int n = host_array(args.node_count, 1)[0];
  std::printf("%d nodes, %s\n", n, host_array(args.route, 1)[0] == KDTREE_ROUTE_PARALLEL ? "parallel" : "serial");
  draw(host_array(args.tokens, rows), host_array(args.parents, rows), host_array(args.scores, rows), n, 0, 0);
  return host_array(args.status, 3)[0] == KDTREE_REQUEST_OK ? 0 : 1;
}
