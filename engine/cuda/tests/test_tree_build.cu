// Trees: the golden files one by one and as one batch, random lists against the heap builder, refusals.
#include "tests/check.h"

namespace {

constexpr size_t kRoutes = 3;

// Arrays of one tree, as golden files name them; scores as their bits.
struct Tree {
  std::string name;
  int depths = 0, width = 0, budget = 0;
  std::vector<float> lp;
  std::vector<int32_t> ids;
  int32_t root_token = 0, prefix_length = 0, node_count = 0;
  std::vector<int32_t> tokens, parents, node_depths, ranks, positions, first_child, next_sibling, paths;
  std::vector<uint64_t> scores;
  std::vector<uint32_t> visibility;
};

template <typename T>
std::vector<T> copy(const kdtr::View<T>& view) {
  return std::vector<T>(view.begin(), view.end());
}

std::vector<uint64_t> bits(const std::vector<double>& values) {
  std::vector<uint64_t> out(values.size());
  if (!out.empty()) std::memcpy(out.data(), values.data(), out.size() * sizeof(double));
  return out;
}

// The cases of a golden file up to a budget.
std::vector<Tree> golden_trees(const std::string& name, int largest_budget) {
  const kdtr::File file = check::golden(name + ".kdtr");
  std::vector<Tree> trees;
  for (size_t i = 0; i < file.size(); ++i) {
    const std::string array(file[i].name);
    if (array.size() < 3 || array.compare(array.size() - 3, 3, "/lp") != 0) continue;
    const std::string at = array.substr(0, array.size() - 2);
    const auto ints = [&](const char* of) { return copy(file.at(at + of).as<int32_t>()); };
    Tree tree;
    tree.name = name + "/" + at;
    const auto lp = file.at(array).as<float, 2>();
    tree.depths = static_cast<int>(lp.shape[0]);
    tree.width = static_cast<int>(lp.shape[1]);
    tree.budget = file.at(at + "budget").scalar<int32_t>();
    if (tree.budget > largest_budget) continue;
    tree.lp = copy(lp);
    tree.ids = ints("ids");
    tree.root_token = file.at(at + "root_token").scalar<int32_t>();
    tree.prefix_length = file.at(at + "prefix_length").scalar<int32_t>();
    tree.node_count = file.at(at + "node_count").scalar<int32_t>();
    tree.tokens = ints("tokens");
    tree.parents = ints("parents");
    tree.node_depths = ints("depths");
    tree.ranks = ints("ranks");
    tree.positions = ints("positions");
    tree.first_child = ints("first_child");
    tree.next_sibling = ints("next_sibling");
    tree.paths = ints("paths");
    tree.scores = bits(copy(file.at(at + "scores").as<double, 1>()));
    tree.visibility = copy(file.at(at + "visibility").as<uint32_t, 2>());
    trees.push_back(tree);
  }
  CHECK(!trees.empty());
  return trees;
}

// A call with all its arrays. Lists are padded to one shape: -inf behind a row, the depth limit behind the rows.
struct Call {
  int requests, depth_limit, width, budget;
  check::Array<float> lp;
  check::Array<int32_t> ids, root_tokens, prefix_lengths, depth_limits, budgets;
  check::Array<int32_t> node_count, tokens, parents, depths, ranks, positions, first_child, next_sibling, paths, route,
      status;
  check::Array<double> scores;
  check::Array<uint32_t> visibility;
  kdtree_tree_build_args args{};

  Call(int requests, int depth_limit, int width, int budget)
      : requests(requests),
        depth_limit(depth_limit),
        width(width),
        budget(budget),
        lp(lists()),
        ids(lists()),
        root_tokens(each()),
        prefix_lengths(each()),
        depth_limits(each()),
        budgets(each()),
        node_count(each()),
        tokens(nodes()),
        parents(nodes()),
        depths(nodes()),
        ranks(nodes()),
        positions(nodes()),
        first_child(nodes()),
        next_sibling(nodes()),
        paths(nodes() * (depth_limit + 1)),
        route(each()),
        status(3 * each()),
        scores(nodes()),
        visibility(nodes() * words()) {
    args.struct_size = sizeof(args);
    args.requests = requests;
    args.depth_limit = depth_limit;
    args.width = width;
    args.budget = budget;
    args.lp = lp.get();
    args.ids = ids.get();
    args.node_count = node_count.get();
    args.tokens = tokens.get();
    args.parents = parents.get();
    args.depths = depths.get();
    args.ranks = ranks.get();
    args.scores = scores.get();
    args.positions = positions.get();
    args.visibility = visibility.get();
    args.paths = paths.get();
    args.first_child = first_child.get();
    args.next_sibling = next_sibling.get();
    args.route = route.get();
    args.status = status.get();
  }

  explicit Call(const std::vector<Tree>& trees)
      : Call(static_cast<int>(trees.size()), most(trees, &Tree::depths), most(trees, &Tree::width),
             most(trees, &Tree::budget)) {
    std::vector<float> all_lp(lists(), -HUGE_VALF);
    std::vector<int32_t> all_ids(lists(), 0);
    for (size_t t = 0; t < trees.size(); ++t) {
      const Tree& tree = trees[t];
      const size_t from = t * static_cast<size_t>(depth_limit) * width;
      for (int d = 0; d < tree.depths; ++d)
        for (int r = 0; r < tree.width; ++r) {
          all_lp[from + d * width + r] = tree.lp[d * tree.width + r];
          all_ids[from + d * width + r] = tree.ids[d * tree.width + r];
        }
    }
    lp.write(all_lp.data(), all_lp.size());
    ids.write(all_ids.data(), all_ids.size());
    write_each(trees, &Tree::depths, &depth_limits);
    write_each(trees, &Tree::budget, &budgets);
    write_each(trees, &Tree::root_token, &root_tokens);
    write_each(trees, &Tree::prefix_length, &prefix_lengths);
    args.depth_limits = depth_limits.get();
    args.budgets = budgets.get();
    args.root_tokens = root_tokens.get();
    args.prefix_lengths = prefix_lengths.get();
  }

  size_t each() const { return static_cast<size_t>(requests); }
  size_t lists() const { return each() * depth_limit * width; }
  size_t nodes() const { return each() * (budget + 1); }
  size_t words() const { return (static_cast<size_t>(budget) + 32) / 32; }

 private:
  static int most(const std::vector<Tree>& trees, int Tree::* size) {
    int found = 0;
    for (const Tree& tree : trees) found = tree.*size > found ? tree.*size : found;
    return found;
  }
  template <typename T>
  static void write_each(const std::vector<Tree>& trees, T Tree::* member, check::Array<int32_t>* out) {
    std::vector<int32_t> values;
    for (const Tree& tree : trees) values.push_back(tree.*member);
    out->write(values.data(), values.size());
  }
};

// Rows 0..rows-1 of request r, of which only the first `wanted` columns are compared: the others must hold `filler`.
template <typename T>
void check_block(const std::vector<T>& all, size_t r, size_t rows, size_t columns, const std::vector<T>& expected,
                 size_t expected_columns, T filler, const std::string& what) {
  const size_t expected_rows = expected_columns > 0 ? expected.size() / expected_columns : 0;
  for (size_t i = 0; i < rows; ++i)
    for (size_t j = 0; j < columns; ++j) {
      const bool there = i < expected_rows && j < expected_columns;
      check::equal(all[(r * rows + i) * columns + j], there ? expected[i * expected_columns + j] : filler,
                   (what + "[" + std::to_string(i) + ", " + std::to_string(j) + "]").c_str(), __FILE__, __LINE__);
    }
}

// Every array of every tree, its filler included; counts the routes.
void check_trees(const Call& call, const std::vector<Tree>& trees, size_t (*routes)[kRoutes]) {
  const auto count = call.node_count.read(), route = call.route.read(), status = call.status.read();
  const std::vector<uint64_t> scores = bits(call.scores.read());
  const auto visibility = call.visibility.read();
  const auto tokens = call.tokens.read(), parents = call.parents.read(), depths = call.depths.read(),
             ranks = call.ranks.read(), positions = call.positions.read(), paths = call.paths.read(),
             first_child = call.first_child.read(), next_sibling = call.next_sibling.read();
  const size_t rows = static_cast<size_t>(call.budget) + 1;
  for (size_t r = 0; r < trees.size(); ++r) {
    const Tree& tree = trees[r];
    const auto ints = [&](const std::vector<int32_t>& all, const std::vector<int32_t>& expected, int32_t filler,
                          const char* what) { check_block(all, r, rows, 1, expected, 1, filler, tree.name + what); };
    check::equal(status[3 * r], KDTREE_REQUEST_OK, (tree.name + "status").c_str(), __FILE__, __LINE__);
    check::equal(count[r], tree.node_count, (tree.name + "node_count").c_str(), __FILE__, __LINE__);
    ints(tokens, tree.tokens, 0, "tokens");
    ints(parents, tree.parents, -1, "parents");
    ints(depths, tree.node_depths, 0, "depths");
    ints(ranks, tree.ranks, 0, "ranks");
    ints(positions, tree.positions, 0, "positions");
    ints(first_child, tree.first_child, -1, "first_child");
    ints(next_sibling, tree.next_sibling, -1, "next_sibling");
    check_block(scores, r, rows, 1, tree.scores, 1, uint64_t{0}, tree.name + "scores");
    check_block(visibility, r, rows, call.words(), tree.visibility, (static_cast<size_t>(tree.budget) + 32) / 32, 0u,
                tree.name + "visibility");
    check_block(paths, r, rows, static_cast<size_t>(call.depth_limit) + 1, tree.paths,
                static_cast<size_t>(tree.depths) + 1, -1, tree.name + "paths");
    CHECK(route[r] >= KDTREE_ROUTE_NONE && route[r] <= KDTREE_ROUTE_SERIAL);
    CHECK_EQUAL(route[r] == KDTREE_ROUTE_NONE, tree.node_count == 0);
    ++(*routes)[route[r]];
  }
}

// Random numbers of the tests: a multiplicative generator, the high bits.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(2 * seed + 1) {}
  int below(int n) {
    state_ *= 0xd1342543de82ef95u;
    return static_cast<int>((state_ >> 33) % static_cast<uint64_t>(n));
  }

 private:
  uint64_t state_;
};

// Sorted lists of one kind: 0 multiples of 2^-20, 1 quarters with many ties, 2 zeros of both signs, 3 sums that round,
// 4 a single value, 5 positive ones; and at times a row that ends early.
void fill_lists(Random* random, int kind, int depths, int width, float* lp, int32_t* ids) {
  for (int d = 0; d < depths; ++d) {
    const int finite = random->below(5) == 0 ? random->below(width + 1) : width, first = random->below(1000);
    float value = kind == 5 ? 2.0f : 0.0f;
    for (int r = 0; r < width; ++r) {
      switch (kind) {
        case 0:
          value -= static_cast<float>(random->below(1 << 20)) / (1 << 20);
          break;
        case 1:
          value -= static_cast<float>(random->below(3)) / 4;
          break;
        case 2:
          value = random->below(2) != 0 ? 0.0f : -0.0f;
          break;
        case 3:
          value -= std::ldexp(static_cast<float>(1 + random->below(1 << 20)), -20 - random->below(60));
          break;
        case 4:
          value = -1.5f;
          break;
        default:
          value -= static_cast<float>(random->below(1 << 10)) / (1 << 10);
      }
      lp[d * width + r] = r < finite ? value : -HUGE_VALF;
      ids[d * width + r] = first + 3 * r;
    }
  }
}

// What kdtree_heap_tree makes of the lists of a call.
std::vector<Tree> heap_trees(const Call& call) {
  const std::vector<float> lp = call.lp.read();
  const std::vector<int32_t> ids = call.ids.read();
  const size_t rows = static_cast<size_t>(call.budget) + 1;
  std::vector<int32_t> node_count(call.each()), tokens(call.nodes()), parents(call.nodes()), depths(call.nodes()),
      ranks(call.nodes()), positions(call.nodes()), first_child(call.nodes()), next_sibling(call.nodes()),
      paths(call.nodes() * (call.depth_limit + 1)), status(3 * call.each());
  std::vector<double> scores(call.nodes());
  std::vector<uint32_t> visibility(call.nodes() * call.words());
  std::vector<uint64_t> workspace(kdtree_heap_tree_workspace(call.depth_limit, call.width, call.budget) / 8 + 1);
  kdtree_heap_tree_args a{};
  a.struct_size = sizeof(a);
  a.requests = call.requests;
  a.depth_limit = call.depth_limit;
  a.width = call.width;
  a.budget = call.budget;
  a.lp = lp.data();
  a.ids = ids.data();
  a.node_count = node_count.data();
  a.tokens = tokens.data();
  a.parents = parents.data();
  a.depths = depths.data();
  a.ranks = ranks.data();
  a.scores = scores.data();
  a.positions = positions.data();
  a.first_child = first_child.data();
  a.next_sibling = next_sibling.data();
  a.visibility = visibility.data();
  a.paths = paths.data();
  a.status = status.data();
  a.workspace = workspace.data();
  a.workspace_size = workspace.size() * 8;
  CHECK_EQUAL(kdtree_heap_tree(&a), KDTREE_HEAP_TREE_OK);

  std::vector<Tree> trees(call.each());
  for (size_t r = 0; r < trees.size(); ++r) {
    const auto part = [&](const auto& all, size_t columns) {
      const auto from = all.begin() + static_cast<long>(r * rows * columns);
      return std::vector<typename std::decay_t<decltype(all)>::value_type>(from,
                                                                           from + static_cast<long>(rows * columns));
    };
    Tree& tree = trees[r];
    tree.name = "request " + std::to_string(r) + "/";
    tree.depths = call.depth_limit;
    tree.width = call.width;
    tree.budget = call.budget;
    tree.node_count = node_count[r];
    tree.tokens = part(tokens, 1);
    tree.parents = part(parents, 1);
    tree.node_depths = part(depths, 1);
    tree.ranks = part(ranks, 1);
    tree.positions = part(positions, 1);
    tree.first_child = part(first_child, 1);
    tree.next_sibling = part(next_sibling, 1);
    tree.scores = bits(part(scores, 1));
    tree.visibility = part(visibility, call.words());
    tree.paths = part(paths, static_cast<size_t>(call.depth_limit) + 1);
  }
  return trees;
}

bool holds(const char* text, const std::string& part) { return std::string(text).find(part) != std::string::npos; }

}  // namespace

TEST(golden_trees_one_by_one) {
  size_t routes[kRoutes] = {};
  for (const char* file : {"tree_degenerate", "tree_random", "tree_ties"})
    for (const Tree& tree : golden_trees(file, check::tiny() ? 64 : KDTREE_MAX_BUDGET)) {
      const Call call({tree});
      CHECK_OK(kdtree_tree_build(&call.args));
      check_trees(call, {tree}, &routes);
    }
  for (const size_t count : routes) CHECK(count > 0);
}

// Every tree in a block that is too large for it, beside all others.
TEST(golden_trees_as_one_batch) {
  std::vector<Tree> trees;
  for (const char* file : {"tree_degenerate", "tree_random", "tree_ties"})
    for (const Tree& tree : golden_trees(file, check::tiny() ? 40 : 257)) trees.push_back(tree);
  size_t routes[kRoutes] = {};
  const Call call(trees);
  for (int run = 0; run < (check::tiny() ? 1 : 2); ++run) {
    CHECK_OK(kdtree_tree_build(&call.args));
    check_trees(call, trees, &routes);
  }
  for (const size_t count : routes) CHECK(count > 0);
}

// 17 nodes of one step and 289 of two: a depth has more nodes than the block has threads.
TEST(a_depth_wider_than_the_block) {
  Call call(1, 3, 17, 128);
  std::vector<int32_t> ids;
  for (int i = 0; i < 3 * 17; ++i) ids.push_back(i % 17);
  const std::vector<float> lp(ids.size(), -0.5f);
  call.lp.write(lp.data(), lp.size());
  call.ids.write(ids.data(), ids.size());
  CHECK_OK(kdtree_tree_build(&call.args));
  size_t routes[kRoutes] = {};
  check_trees(call, heap_trees(call), &routes);
  CHECK_EQUAL(routes[KDTREE_ROUTE_PARALLEL], 1);
}

TEST(random_lists_against_the_heap) {
  struct Size {
    int depth_limit, width, budget;
  };
  std::vector<Size> sizes = {{3, 5, 20}, {7, 32, 32}, {2, 40, 66}, {15, 4, 30}};
  if (!check::tiny())
    sizes.insert(sizes.end(), {{7, 64, 64}, {15, 100, 129}, {31, 33, 256}, {7, 300, 300}, {4, 500, 1000}});
  Random random(7);
  size_t routes[kRoutes] = {};
  for (const Size& size : sizes) {
    Call call(6, size.depth_limit, size.width, size.budget);
    std::vector<float> lp(call.lists());
    std::vector<int32_t> ids(call.lists());
    const int each = size.depth_limit * size.width;
    for (int r = 0; r < call.requests; ++r)
      fill_lists(&random, r, size.depth_limit, size.width, lp.data() + r * each, ids.data() + r * each);
    call.lp.write(lp.data(), lp.size());
    call.ids.write(ids.data(), ids.size());
    CHECK_OK(kdtree_tree_build(&call.args));
    check_trees(call, heap_trees(call), &routes);
  }
  CHECK(routes[KDTREE_ROUTE_PARALLEL] > 0);
  CHECK(routes[KDTREE_ROUTE_SERIAL] > 0);
}

// The first fault by depth and rank, in lists that nothing else is wrong with.
TEST(faults_are_named_by_depth_and_rank) {
  struct Fault {
    int code, depth, rank;
    float value;
    int32_t id;
  };
  const float nan = std::nanf("");
  const std::vector<Fault> faults = {
      {KDTREE_REQUEST_NAN, 2, 3, nan, 50},          {KDTREE_REQUEST_INFINITE, 1, 0, HUGE_VALF, 50},
      {KDTREE_REQUEST_VOCABULARY, 3, 4, -5.0f, -1}, {KDTREE_REQUEST_VOCABULARY, 3, 0, -1.0f, 99},
      {KDTREE_REQUEST_UNSORTED, 2, 1, 0.0f, 50},    {KDTREE_REQUEST_REPEATED, 3, 4, -5.0f, 12},
      {KDTREE_REQUEST_OK, 3, 4, -HUGE_VALF, 12}};
  const int depths = 3, width = 5;
  Call call(static_cast<int>(faults.size()), depths, width, 9);
  std::vector<float> lp;
  std::vector<int32_t> ids, expected;
  for (const Fault& fault : faults) {
    for (int d = 1; d <= depths; ++d)
      for (int r = 0; r < width; ++r) {
        const bool here = d == fault.depth && r == fault.rank;
        lp.push_back(here ? fault.value : -1.0f - static_cast<float>(r));
        ids.push_back(here ? fault.id : 10 + r);
      }
    const bool fine = fault.code == KDTREE_REQUEST_OK;
    for (const int word : {fault.code, fine ? 0 : fault.depth, fine ? 0 : fault.rank}) expected.push_back(word);
  }
  call.lp.write(lp.data(), lp.size());
  call.ids.write(ids.data(), ids.size());
  call.args.vocab_size = 99;
  CHECK_OK(kdtree_tree_build(&call.args));
  CHECK_EQUAL_ALL(call.status.read(), expected, "status");
  const auto count = call.node_count.read();
  for (size_t r = 0; r < faults.size(); ++r) CHECK_EQUAL(count[r], faults[r].code == KDTREE_REQUEST_OK ? 9 : 0);
}

TEST(refused_calls_name_the_numbers) {
  Call call(1, 2, 3, 4);
  kdtree_tree_build_args a = call.args;
  a.budget = 1025;
  CHECK_STATUS(kdtree_tree_build(&a), KDTREE_SIZE);
  CHECK(holds(kdtree_last_error(), "budget is 1025"));
  a = call.args;
  a.scores = nullptr;
  CHECK_STATUS(kdtree_tree_build(&a), KDTREE_POINTER);
  CHECK(holds(kdtree_last_error(), "scores is NULL"));
  a = call.args;
  a.scores = reinterpret_cast<double*>(reinterpret_cast<char*>(a.scores) + 4);
  CHECK_STATUS(kdtree_tree_build(&a), KDTREE_ALIGNMENT);
  CHECK(holds(kdtree_last_error(), "aligned to 8"));
  a = call.args;
  a.shared_memory_limit = 100;
  CHECK_STATUS(kdtree_tree_build(&a), KDTREE_UNSUPPORTED);
  CHECK(holds(kdtree_last_error(), "which may have 100"));
  CHECK_STATUS(kdtree_tree_build(nullptr), KDTREE_POINTER);
  for (const int32_t count : call.node_count.read())
    CHECK_EQUAL(static_cast<uint32_t>(count), 0xa5a5a5a5u);  // untouched
  CHECK_EQUAL(kdtree_tree_build_workspace(1, 2, 3, 4), 0);
}

TEST(both_stages_in_one_call) {
  const int requests = 2, depths = 3, vocab = 40, k = 8, budget = 20;
  Random random(3);
  std::vector<float> values(static_cast<size_t>(requests) * depths * vocab);
  for (float& value : values) value = static_cast<float>(random.below(1 << 12)) / (1 << 9);
  const check::Array<float> logits(values);
  check::Array<float> logz(static_cast<size_t>(requests) * depths);
  check::Array<int32_t> status(3 * static_cast<size_t>(requests));
  Call call(requests, depths, k, budget);
  kdtree_topk_logprob_args topk{};
  topk.struct_size = sizeof(topk);
  topk.requests = requests;
  topk.depth_limit = depths;
  topk.vocab_size = vocab;
  topk.k = k;
  topk.dtype = KDTREE_F32;
  topk.row_stride = vocab;
  topk.logits = logits.get();
  topk.ids = call.ids.get();
  topk.lp = call.lp.get();
  topk.logz = logz.get();
  topk.status = status.get();
  topk.workspace_size = kdtree_topk_logprob_workspace(requests, depths, vocab, k);
  check::Array<unsigned char> workspace(topk.workspace_size + 1);
  topk.workspace = workspace.get();
  CHECK_OK(kdtree_logits_tree(&topk, &call.args));
  size_t routes[kRoutes] = {};
  check_trees(call, heap_trees(call), &routes);
  CHECK_EQUAL(routes[KDTREE_ROUTE_NONE], 0);
  CHECK_EQUAL_ALL(status.read(), std::vector<int32_t>(status.size(), 0), "status of the lists");

  call.args.depth_limits = call.depth_limits.get();
  CHECK_STATUS(kdtree_logits_tree(&topk, &call.args), KDTREE_POINTER);
  CHECK(holds(kdtree_last_error(), "must be those of topk"));
  CHECK_STATUS(kdtree_logits_tree(nullptr, &call.args), KDTREE_POINTER);
}
