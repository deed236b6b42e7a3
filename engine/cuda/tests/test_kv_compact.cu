// Compaction: the golden moves, tagged rows in every word size and layout, refusals that move nothing.
#include "tests/check.h"

namespace {

struct Place {
  int layer, request, row;
};

// A cache of tagged bytes and where its rows lie, and the same on the CPU.
class Tagged {
 public:
  int layers, requests, capacity, row_bytes, block_size;
  int64_t row_stride;
  size_t offset;  // bytes off an aligned address
  std::vector<int32_t> table;
  std::vector<unsigned char> bytes;

  Tagged(int layers, int requests, int capacity, int row_bytes, int64_t row_stride, int block_size = 0,
         size_t offset = 0)
      : layers(layers),
        requests(requests),
        capacity(capacity),
        row_bytes(row_bytes),
        block_size(block_size),
        row_stride(row_stride),
        offset(offset) {
    if (block_size > 0) {
      // Requests take turns, from the back.
      const int entries = table_stride() * requests;
      for (int i = 0; i < entries; ++i)
        table.push_back(entries - 1 - (i % table_stride()) * requests - i / table_stride());
    }
    bytes.resize(offset + static_cast<size_t>(layers * layer_stride()));
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>((i * 2654435761u) >> 13);
  }

  int table_stride() const { return (capacity + block_size - 1) / block_size; }
  int64_t request_stride() const { return capacity * row_stride; }
  int64_t layer_stride() const {
    return block_size > 0 ? table_stride() * block_size * requests * row_stride : requests * request_stride();
  }

  unsigned char* row(const Place& at) {
    const int64_t slot =
        block_size == 0 ? at.request * capacity + at.row
                        : table[at.request * table_stride() + at.row / block_size] * block_size + at.row % block_size;
    return bytes.data() + offset + at.layer * layer_stride() + slot * row_stride;
  }

  // What must become of one request: a copy of the rows first, then the rows.
  void move(int request, int prefix, const std::vector<int32_t>& path) {
    for (int layer = 0; layer < layers; ++layer) {
      std::vector<unsigned char> held;
      for (const int node : path) {
        const unsigned char* from = row({layer, request, prefix + node});
        held.insert(held.end(), from, from + row_bytes);
      }
      for (size_t i = 0; i < path.size(); ++i)
        std::memcpy(row({layer, request, prefix + static_cast<int>(i)}), held.data() + i * row_bytes, row_bytes);
    }
  }
};

struct Paths {
  int depth_limit;
  check::Array<int32_t> prefixes, accepted, path, status, moved;

  Paths(const std::vector<int32_t>& prefix_lengths, const std::vector<std::vector<int32_t>>& paths, int depth_limit)
      : depth_limit(depth_limit),
        prefixes(prefix_lengths),
        accepted(paths.size()),
        path(paths.size() * (depth_limit + 1)),
        status(3 * paths.size()),
        moved(paths.size()) {
    std::vector<int32_t> counts, nodes;
    for (const auto& one : paths) {
      counts.push_back(static_cast<int32_t>(one.size()) - 1);
      nodes.insert(nodes.end(), one.begin(), one.end());
      nodes.resize(nodes.size() + depth_limit + 1 - one.size(), -1);
    }
    accepted.write(counts.data(), counts.size());
    path.write(nodes.data(), nodes.size());
  }
};

kdtree_kv_compact_args args_of(const Tagged& cache, const check::Array<unsigned char>& device,
                               const check::Array<int32_t>& table, const Paths& paths) {
  kdtree_kv_compact_args a{};
  a.struct_size = sizeof(a);
  a.requests = cache.requests;
  a.depth_limit = paths.depth_limit;
  a.cache.base = device.get() + cache.offset;
  a.cache.layer_stride = cache.layer_stride();
  a.cache.request_stride = cache.request_stride();
  a.cache.row_stride = cache.row_stride;
  a.cache.row_bytes = cache.row_bytes;
  a.cache.layers = cache.layers;
  a.cache.capacity = cache.capacity;
  if (cache.block_size > 0) {
    a.cache.block_size = cache.block_size;
    a.cache.table_stride = cache.table_stride();
    a.cache.block_table = table.get();
  }
  a.prefix_lengths = paths.prefixes.get();
  a.accepted = paths.accepted.get();
  a.path = paths.path.get();
  a.status = paths.status.get();
  a.moved = paths.moved.get();
  return a;
}

// Names the byte, but only if one differs: there are millions.
void check_bytes(const check::Array<unsigned char>& device, const Tagged& expected) {
  const std::vector<unsigned char> bytes = device.read();
  if (bytes != expected.bytes) CHECK_EQUAL_ALL(bytes, expected.bytes, "cache");
}

const std::vector<std::vector<int32_t>> kPaths = {{0, 3, 4, 9}, {0, 1, 2}, {0}, {0, 32}, {0, 2, 3, 4, 5}};

void check_moves(Tagged cache) {
  const std::vector<int32_t> prefixes = {0, 1, 17, 5, 30};
  const Paths paths(prefixes, kPaths, 15);
  const check::Array<unsigned char> device(cache.bytes);
  const check::Array<int32_t> table(cache.table);
  const kdtree_kv_compact_args args = args_of(cache, device, table, paths);
  CHECK_OK(kdtree_kv_compact(&args));
  for (size_t r = 0; r < kPaths.size(); ++r) cache.move(static_cast<int>(r), prefixes[r], kPaths[r]);
  check_bytes(device, cache);
  CHECK_EQUAL_ALL(paths.status.read(), std::vector<int32_t>(15, 0), "status");
  CHECK_EQUAL_ALL(paths.moved.read(), (std::vector<int32_t>{3, 0, 0, 1, 4}), "moved");
}

}  // namespace

TEST(golden_moves) {
  const kdtr::File file = check::golden("compact.kdtr");
  int cases = 0;
  for (size_t i = 0; i < file.size(); ++i) {
    const std::string name = std::string(file[i].name);
    const size_t slash = name.rfind("/rows_after");
    if (slash == std::string::npos) continue;
    ++cases;
    const std::string at = name.substr(0, slash + 1);
    const auto rows = file.at(at + "rows").as<float, 3>();
    const auto nodes = file.at(at + "accepted").as<int32_t, 1>();
    const bool paged = file.contains(at + "block_table");
    std::vector<int32_t> blocks;
    if (paged) {
      const auto view = file.at(at + "block_table").as<int32_t, 1>();
      blocks.assign(view.data, view.data + view.size);
    }
    const check::Array<float> device(rows);
    const check::Array<int32_t> table(blocks);
    const Paths paths({file.at(at + "prefix_length").scalar<int32_t>()}, {{nodes.begin(), nodes.begin() + nodes.size}},
                      31);
    kdtree_kv_compact_args a{};
    a.struct_size = sizeof(a);
    a.requests = 1;
    a.depth_limit = 31;
    a.cache.base = device.get();
    a.cache.layers = static_cast<int32_t>(rows.shape[0]);
    a.cache.row_bytes = static_cast<int32_t>(rows.shape[2] * sizeof(float));
    a.cache.row_stride = a.cache.row_bytes;
    a.cache.layer_stride = static_cast<int64_t>(rows.shape[1]) * a.cache.row_stride;
    a.cache.capacity = static_cast<int32_t>(rows.shape[1]);
    if (paged) {
      a.cache.block_size = file.at(at + "block_size").scalar<int32_t>();
      a.cache.table_stride = static_cast<int32_t>(table.size());
      a.cache.capacity = a.cache.table_stride * a.cache.block_size;
      a.cache.block_table = table.get();
    }
    a.prefix_lengths = paths.prefixes.get();
    a.accepted = paths.accepted.get();
    a.path = paths.path.get();
    a.status = paths.status.get();
    CHECK_OK(kdtree_kv_compact(&a));
    CHECK_EQUAL_ALL(device.read(), file[i].as<float>(), at.c_str());
    CHECK_EQUAL_ALL(paths.status.read(), (std::vector<int32_t>{0, 0, 0}), at.c_str());
  }
  CHECK(cases >= 30);
}

TEST(every_word_size) {
  const int layers = check::tiny() ? 2 : 61;
  check_moves(Tagged(layers, 5, 70, 1152, 1152));
  check_moves(Tagged(3, 5, 70, 1152, 1168));
  check_moves(Tagged(3, 5, 70, 1152, 1156));  // 4
  check_moves(Tagged(3, 5, 70, 4100, 4100));  // 4, more than one block wide
  check_moves(Tagged(3, 5, 70, 1160, 1168));  // 4: whole words of 8 are no case of their own
  check_moves(Tagged(3, 5, 70, 34, 38));      // 2
  check_moves(Tagged(3, 5, 70, 33, 64));      // 1
}

TEST(every_address) {
  for (size_t offset = 1; offset < 16; ++offset) check_moves(Tagged(2, 5, 70, 96, 96, 0, offset));
}

TEST(pages) {
  for (const int block_size : {1, 7, 16, 64, 100}) check_moves(Tagged(2, 5, 70, 48, 48, block_size));
}

TEST(what_is_refused_moves_nothing) {
  Tagged cache(2, 4, 16, 32, 32);
  Paths paths({0, 9, -1, 2}, {{0, 2, 2}, {0, 7}, {0}, {0, 3}}, 3);
  const check::Array<unsigned char> device(cache.bytes);
  const check::Array<int32_t> table(0);
  kdtree_kv_compact_args args = args_of(cache, device, table, paths);
  CHECK_OK(kdtree_kv_compact(&args));
  cache.move(3, 2, {0, 3});
  check_bytes(device, cache);
  const std::vector<int32_t> status = {
      KDTREE_REQUEST_PATH,     2,  2,   // the path stays where it is
      KDTREE_REQUEST_CAPACITY, 17, 16,  // 9 + 7 + 1 rows
      KDTREE_REQUEST_OWN_SIZE, -1, 16,  // no prefix
      KDTREE_REQUEST_OK,       0,  0,
  };
  CHECK_EQUAL_ALL(paths.status.read(), status, "status");
  CHECK_EQUAL_ALL(paths.moved.read(), (std::vector<int32_t>{0, 0, 0, 1}), "moved");

  // Once more, with that as what was found before, in the same array: also the last request's rows stay.
  std::vector<int32_t> before = status;
  before[9] = KDTREE_REQUEST_NO_CHOICE;
  paths.status.write(before.data(), before.size());
  args.before = args.status;
  args.moved = nullptr;
  CHECK_OK(kdtree_kv_compact(&args));
  check_bytes(device, cache);
  CHECK_EQUAL_ALL(paths.status.read(), before, "status");
}

TEST(arguments_are_refused_with_their_numbers) {
  const Tagged cache(2, 2, 16, 32, 32, 4);
  const Paths paths({0, 0}, {{0, 2}, {0, 3}}, 3);
  const check::Array<unsigned char> device(cache.bytes);
  const check::Array<int32_t> table(cache.table);
  const auto refused = [&](kdtree_status status, const char* message, auto change) {
    kdtree_kv_compact_args args = args_of(cache, device, table, paths);
    change(args);
    CHECK_STATUS(kdtree_kv_compact(&args), status);
    CHECK(std::strstr(kdtree_last_error(), message) != nullptr);
  };
  CHECK_STATUS(kdtree_kv_compact(nullptr), KDTREE_POINTER);
  refused(KDTREE_VERSION, "struct_size is 0", [](auto& a) { a.struct_size = 0; });
  refused(KDTREE_SIZE, "requests is 65536", [](auto& a) { a.requests = 65536; });
  refused(KDTREE_SIZE, "depth_limit is 32", [](auto& a) { a.depth_limit = 32; });
  refused(KDTREE_SIZE, "reserved is 1", [](auto& a) { a.reserved = 1; });
  refused(KDTREE_SIZE, "cache.reserved is 1", [](auto& a) { a.cache.reserved = 1; });
  refused(KDTREE_SIZE, "cache.row_bytes is 0", [](auto& a) { a.cache.row_bytes = 0; });
  refused(KDTREE_SIZE, "cache.layers is 0", [](auto& a) { a.cache.layers = 0; });
  refused(KDTREE_SIZE, "cache.capacity is -1", [](auto& a) { a.cache.capacity = -1; });
  refused(KDTREE_SIZE, "cache.block_size is -4", [](auto& a) { a.cache.block_size = -4; });
  refused(KDTREE_SIZE, "cache.row_stride is 31, it must be in [32,", [](auto& a) { a.cache.row_stride = 31; });
  refused(KDTREE_SIZE, "cache.layer_stride is 0, it must be in [32,", [](auto& a) { a.cache.layer_stride = 0; });
  refused(KDTREE_SIZE, "cache.table_stride is 3, it must be in [4,", [](auto& a) { a.cache.table_stride = 3; });
  refused(KDTREE_SIZE, "cache.request_stride is 8, it must be in [32,", [](auto& a) {
    a.cache.block_size = 0;
    a.cache.request_stride = 8;
  });
  refused(KDTREE_POINTER, "cache.base is NULL", [](auto& a) { a.cache.base = nullptr; });
  refused(KDTREE_POINTER, "cache.block_table is NULL", [](auto& a) { a.cache.block_table = nullptr; });
  refused(KDTREE_POINTER, "prefix_lengths is NULL", [](auto& a) { a.prefix_lengths = nullptr; });
  refused(KDTREE_POINTER, "accepted is NULL", [](auto& a) { a.accepted = nullptr; });
  refused(KDTREE_POINTER, "path is NULL", [](auto& a) { a.path = nullptr; });
  refused(KDTREE_POINTER, "status is NULL", [](auto& a) { a.status = nullptr; });
  refused(KDTREE_ALIGNMENT, "not aligned to 4 bytes",
          [](auto& a) { a.moved = reinterpret_cast<int32_t*>(reinterpret_cast<char*>(a.moved) + 1); });
  check_bytes(device, cache);
}
