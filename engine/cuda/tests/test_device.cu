// The engine's first calls - versions, devices, refusals - and the test layer itself.
#include "tests/check.h"

namespace {

template <class Body>
std::string message_of(Body body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

bool holds(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

__global__ void fill_kernel(int32_t* out, int n, int first) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x + first;
  if (i < n) out[i] = 10 * i;
}

}  // namespace

TEST(versions) {
  CHECK_EQUAL(kdtree_abi_version(), KDTREE_ABI_VERSION);
  CHECK(std::strlen(kdtree_architectures()) > 0);
}

TEST(device_answers) {
  int32_t count = 0;
  CHECK_OK(kdtree_device_count(&count));
  CHECK(count >= 1);
  kdtree_device_info info{};
  info.struct_size = sizeof(info);
  CHECK_OK(kdtree_device_query(&info));
  CHECK_EQUAL(info.usable, 1);
  CHECK(info.shared_memory_optin >= 48 * 1024);
  CHECK(std::strlen(info.name) > 0);
  CHECK_EQUAL(std::string(kdtree_last_error()), std::string(""));
}

TEST(refusals_name_the_numbers) {
  kdtree_device_info info{};
  info.struct_size = 12;
  CHECK_STATUS(kdtree_device_query(&info), KDTREE_VERSION);
  CHECK(holds(kdtree_last_error(), "struct_size is 12"));
  int32_t count = 0;
  CHECK_OK(kdtree_device_count(&count));
  info.struct_size = sizeof(info);
  info.device = count;
  CHECK_STATUS(kdtree_device_query(&info), KDTREE_SIZE);
  CHECK(holds(kdtree_last_error(), ("device is " + std::to_string(count)).c_str()));
  CHECK_STATUS(kdtree_device_query(nullptr), KDTREE_POINTER);
}

TEST(a_kernel_writes_an_array) {
  const int n = 1000;
  check::Array<int32_t> out(n);
  CHECK_EQUAL(out.read()[n - 1], static_cast<int32_t>(0xa5a5a5a5u));
  KDTREE_LAUNCH(fill_kernel, 8, 128, 0, nullptr, out.get(), n, 0);
  CHECK_CUDA(cudaGetLastError());
  const std::vector<int32_t> got = out.read();
  for (int i = 0; i < n; ++i) CHECK_EQUAL(got[i], 10 * i);
}

TEST(guards_see_what_is_written_outside) {
  check::Array<int32_t> behind(4), before(4);
  KDTREE_LAUNCH(fill_kernel, 1, 8, 0, nullptr, behind.get(), 5, 0);
  KDTREE_LAUNCH(fill_kernel, 1, 8, 0, nullptr, before.get(), 4, -1);
  CHECK(holds(message_of([&] { behind.read(); }), "0 bytes behind"));
  CHECK(holds(message_of([&] { before.read(); }), "4 bytes before"));
}

TEST(checks_fail_and_say_why) {
  CHECK(holds(message_of([] { CHECK_EQUAL(2 + 2, 5); }), "2 + 2: expected 5, got 4"));
  CHECK(holds(message_of([] { CHECK_EQUAL(-1, 0xffffffffu); }), "expected 4294967295, got -1"));
  CHECK(holds(message_of([] { CHECK_NEAR(std::nan(""), 0.0, 1e300); }), "got nan"));
  CHECK(holds(message_of([] { CHECK(1 > 2); }), "1 > 2 is false"));
  CHECK(holds(message_of([] { CHECK_EQUAL_ALL((std::vector<int>{1, 2}), (std::vector<int>{1, 3}), "x"); }), "x[1]"));
  CHECK(holds(message_of([] { CHECK_EQUAL_ALL((std::vector<int>{1}), (std::vector<int>{1, 3}), "x"); }), "x, size"));
  CHECK(holds(message_of([] { CHECK_OK(kdtree_device_query(nullptr)); }), "info is NULL"));
}

TEST(golden_files_are_found) {
  const kdtr::File file = check::golden("tree_ties.kdtr");
  CHECK(file.size() > 0);
}
