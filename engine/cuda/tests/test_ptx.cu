// The functions of common/ptx.h: where each element of a matrix goes, and a product of tiles that streams its operands
// through asynchronous copies, against a reference in double. On a GPU the same checks hold the instructions.
#include <random>

#include "common/ptx.h"
#include "tests/check.h"

namespace {

using namespace kdtree;
using std::vector;

uint16_t narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

float value_of(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// Fragments of four 8 x 8 matrices stored as one [16, 16] array: [4 kinds of load, 32 lanes, 4 registers].
__global__ void fragments_kernel(const uint16_t* matrix, uint32_t* out) {
  __shared__ __align__(16) uint16_t rows[16][16];
  const int lane = threadIdx.x;
  for (int i = lane; i < 256; i += kWarp) rows[i / 16][i % 16] = matrix[i];
  __syncwarp();
  // Matrices 0 and 1 lie above each other, 2 and 3 right of them.
  const uint16_t* row = &rows[lane % 16][lane / 16 * 8];
  uint32_t four[4], two[2], four_t[4], two_t[2];
  load_matrix(four, row);
  load_matrix(two, row);
  load_matrix_transposed(four_t, row);
  load_matrix_transposed(two_t, row);
  for (int r = 0; r < 4; ++r) {
    out[(0 * 32 + lane) * 4 + r] = four[r];
    out[(1 * 32 + lane) * 4 + r] = r < 2 ? two[r] : 0;
    out[(2 * 32 + lane) * 4 + r] = four_t[r];
    out[(3 * 32 + lane) * 4 + r] = r < 2 ? two_t[r] : 0;
  }
}

constexpr int kStep = 32, kRow = kStep + 8;  // 8 elements of padding keep rows off each other's banks

// d [16, 8 warps] = a [16, k] b^T or b, with b [8 warps, k], or [k, 8 warps] where kTransposed. k: a multiple of 8.
template <bool kTransposed>
__global__ void product_kernel(const uint16_t* a, const uint16_t* b, float* d, int k) {
  constexpr int kWarps = 2, kColumns = 8 * kWarps, kStages = 2;
  __shared__ __align__(16) uint16_t tile_a[kStages][16][kRow];
  __shared__ __align__(16) uint16_t tile_b[kStages][kColumns * kRow];
  const int thread = threadIdx.x, warp = thread / kWarp, lane = thread % kWarp;
  const auto load = [&](int step) {
    const int stage = step % kStages, first = step * kStep;
    for (int i = thread; i < 16 * kStep / 8; i += blockDim.x) {
      const int row = i / (kStep / 8), column = i % (kStep / 8) * 8;
      copy_async_16(&tile_a[stage][row][column], a + row * k + first + column, first + column < k);
    }
    for (int i = thread; i < kColumns * kStep / 8; i += blockDim.x) {
      if (kTransposed) {
        const int row = i / (kColumns / 8), column = i % (kColumns / 8) * 8;
        copy_async_16(&tile_b[stage][row * kColumns + column], b + (first + row) * kColumns + column, first + row < k);
      } else {
        const int row = i / (kStep / 8), column = i % (kStep / 8) * 8;
        copy_async_16(&tile_b[stage][row * kRow + column], b + row * k + first + column, first + column < k);
      }
    }
    commit_copies();
  };
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  const int steps = (k + kStep - 1) / kStep;
  load(0);
  for (int step = 0; step < steps; ++step) {
    const int stage = step % kStages;
    if (step + 1 < steps)
      load(step + 1);
    else
      commit_copies();
    wait_copies<1>();
    __syncthreads();
    for (int inner = 0; inner < kStep; inner += 16) {
      uint32_t of_a[4], of_b[2];
      load_matrix(of_a, &tile_a[stage][lane % 16][inner + lane / 16 * 8]);
      if (kTransposed)
        load_matrix_transposed(of_b, &tile_b[stage][(inner + lane % 16) * kColumns + warp * 8]);
      else
        load_matrix(of_b, &tile_b[stage][(warp * 8 + lane % 8) * kRow + inner + lane / 8 % 2 * 8]);
      mma_bf16(sums, of_a, of_b);
    }
    __syncthreads();
  }
  for (int i = 0; i < 4; ++i) d[(lane / 4 + i / 2 * 8) * kColumns + warp * 8 + lane % 4 * 2 + i % 2] = sums[i];
}

template <bool kTransposed>
void check_product(int k) {
  const int columns = 16;
  std::mt19937 random(k);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  vector<uint16_t> a(static_cast<size_t>(16) * k), b(static_cast<size_t>(columns) * k);
  for (uint16_t& bits : a) bits = narrow(uniform(random));
  for (uint16_t& bits : b) bits = narrow(uniform(random));
  check::Array<uint16_t> on_a(a), on_b(b);
  check::Array<float> out(16 * columns);
  KDTREE_LAUNCH(product_kernel<kTransposed>, 1, 64, 0, nullptr, on_a.get(), on_b.get(), out.get(), k);
  CHECK_CUDA(cudaGetLastError());
  const vector<float> got = out.read();
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < columns; ++j) {
      double expected = 0.0;
      for (int c = 0; c < k; ++c)
        expected +=
            static_cast<double>(value_of(a[i * k + c])) * value_of(b[kTransposed ? c * columns + j : j * k + c]);
      CHECK_NEAR(got[i * columns + j], expected, 1e-6 * k);
    }
}

}  // namespace

TEST(fragments_hold_the_elements_that_the_comment_says) {
  vector<uint16_t> matrix(256);
  for (int i = 0; i < 256; ++i) matrix[i] = static_cast<uint16_t>(257 * i);
  check::Array<uint16_t> in(matrix);
  check::Array<uint32_t> out(4 * 32 * 4);
  KDTREE_LAUNCH(fragments_kernel, 1, 32, 0, nullptr, in.get(), out.get());
  CHECK_CUDA(cudaGetLastError());
  const vector<uint32_t> got = out.read();
  const auto pair = [&](int m, int row, int column, int row_next, int column_next) {
    const int top = m % 2 * 8, left = m / 2 * 8;
    return matrix[(top + row) * 16 + left + column] |
           static_cast<uint32_t>(matrix[(top + row_next) * 16 + left + column_next]) << 16;
  };
  for (int lane = 0; lane < 32; ++lane)
    for (int m = 0; m < 4; ++m) {
      const int major = lane / 4, minor = lane % 4 * 2;
      const uint32_t plain = pair(m, major, minor, major, minor + 1);
      const uint32_t transposed = pair(m, minor, major, minor + 1, major);
      CHECK_EQUAL(got[(0 * 32 + lane) * 4 + m], plain);
      CHECK_EQUAL(got[(1 * 32 + lane) * 4 + m], m < 2 ? plain : 0u);
      CHECK_EQUAL(got[(2 * 32 + lane) * 4 + m], transposed);
      CHECK_EQUAL(got[(3 * 32 + lane) * 4 + m], m < 2 ? transposed : 0u);
    }
}

TEST(product_of_rows) {
  for (const int k : {8, 32, 200}) check_product<false>(k);
}

TEST(product_with_a_transposed_operand) {
  for (const int k : {8, 32, 200}) check_product<true>(k);
}
