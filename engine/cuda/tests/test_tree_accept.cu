// Accept: the golden walks as one batch, faults, outputs of refused and passed-over requests, refused arguments.
#include "tests/check.h"

namespace {

constexpr int kDepthLimit = 31;

struct Tree {
  std::string name;
  std::vector<int32_t> tokens, parents, choices;  // 1 + n each
  std::vector<int32_t> path;
  int32_t bonus = -1;
};

std::vector<Tree> golden_trees() {
  const kdtr::File file = check::golden("accept.kdtr");
  std::vector<Tree> trees;
  for (size_t i = 0; i < file.size(); ++i) {
    const std::string name = std::string(file[i].name);
    const size_t slash = name.rfind("/choices");
    if (slash == std::string::npos) continue;
    Tree tree;
    tree.name = name.substr(0, slash);
    const int n = file.at(tree.name + "/node_count").scalar<int32_t>();
    const auto rows = [&](const char* array) {
      const auto view = file.at(tree.name + "/" + array).as<int32_t, 1>();
      return std::vector<int32_t>(view.data, view.data + n + 1);
    };
    tree.tokens = rows("tokens");
    tree.parents = rows("parents");
    tree.choices = rows("choices");
    const auto path = file.at(tree.name + "/accepted").as<int32_t, 1>();
    tree.path.assign(path.data, path.data + path.size);
    tree.bonus = file.at(tree.name + "/bonus").scalar<int32_t>();
    trees.push_back(tree);
  }
  return trees;
}

// A batch on the device, its slots behind the trees filled with garbage.
struct Batch {
  int requests, budget, depth_limit;
  check::Array<int32_t> node_count, tokens, parents, choices, accepted, path, bonus, status;

  Batch(const std::vector<Tree>& trees, int budget, int depth_limit, int32_t garbage = -7)
      : requests(static_cast<int>(trees.size())),
        budget(budget),
        depth_limit(depth_limit),
        node_count(trees.size()),
        tokens(trees.size() * (budget + 1)),
        parents(tokens.size()),
        choices(tokens.size()),
        accepted(trees.size()),
        path(trees.size() * (depth_limit + 1)),
        bonus(trees.size()),
        status(3 * trees.size()) {
    std::vector<int32_t> all[3], counts;
    for (const Tree& tree : trees) {
      const std::vector<int32_t>* own[3] = {&tree.tokens, &tree.parents, &tree.choices};
      for (int k = 0; k < 3; ++k) {
        all[k].insert(all[k].end(), own[k]->begin(), own[k]->end());
        all[k].resize(all[k].size() + budget + 1 - own[k]->size(), garbage);
      }
      counts.push_back(static_cast<int32_t>(tree.tokens.size()) - 1);
    }
    tokens.write(all[0].data(), all[0].size());
    parents.write(all[1].data(), all[1].size());
    choices.write(all[2].data(), all[2].size());
    node_count.write(counts.data(), counts.size());
  }

  kdtree_tree_accept_args args() {
    kdtree_tree_accept_args a{};
    a.struct_size = sizeof(a);
    a.requests = requests;
    a.budget = budget;
    a.depth_limit = depth_limit;
    a.node_count = node_count.get();
    a.tokens = tokens.get();
    a.parents = parents.get();
    a.choices = choices.get();
    a.accepted = accepted.get();
    a.path = path.get();
    a.bonus = bonus.get();
    a.status = status.get();
    return a;
  }
};

}  // namespace

TEST(golden_walks_as_one_batch) {
  const std::vector<Tree> trees = golden_trees();
  CHECK(trees.size() > 40);
  for (const int32_t garbage : {-7, 2000000000}) {
    Batch batch(trees, 1024, kDepthLimit, garbage);
    const kdtree_tree_accept_args args = batch.args();
    CHECK_OK(kdtree_tree_accept(&args));
    const auto accepted = batch.accepted.read(), path = batch.path.read(), bonus = batch.bonus.read();
    CHECK_EQUAL_ALL(batch.status.read(), std::vector<int32_t>(3 * trees.size(), 0), "status");
    for (size_t r = 0; r < trees.size(); ++r) {
      std::vector<int32_t> expected = trees[r].path;
      CHECK_EQUAL(accepted[r] + 1, expected.size());
      CHECK_EQUAL(bonus[r], trees[r].bonus);
      expected.resize(kDepthLimit + 1, -1);
      const auto row = path.begin() + static_cast<long>(r * (kDepthLimit + 1));
      CHECK_EQUAL_ALL(std::vector<int32_t>(row, row + kDepthLimit + 1), expected, trees[r].name.c_str());
    }
  }
}

TEST(faults_in_node_order_and_an_empty_round_for_who_failed) {
  const std::vector<Tree> trees = {
      {"chain", {0, 1, 2}, {-1, 0, 1}, {1, 2, 9}, {}, 0},
      {"twin", {0, 4, 4, 4}, {-1, 0, 0, 0}, {4, 4, 4, 4}, {}, 0},
      {"parent", {0, 4, 4}, {-1, 1, 1}, {4, 4, 4}, {}, 0},
      {"no choice", {0, 4, 4}, {-1, 0, 1}, {4, -1, 4}, {}, 0},
      {"off the path", {0, 4, 5}, {-1, 0, 0}, {4, 6, -1}, {}, 0},
      {"too deep", {0, 1, 2, 3}, {-1, 0, 1, 2}, {1, 2, 3, 4}, {}, 0},
      {"passed over", {0, 1}, {-1, 7}, {1, 1}, {}, 0},
  };
  Batch batch(trees, 5, 2);
  std::vector<int32_t> before(21, 0);
  before[18] = KDTREE_REQUEST_NAN;
  before[19] = 3;
  before[20] = 12;
  batch.status.write(before.data(), before.size());
  kdtree_tree_accept_args args = batch.args();
  args.before = args.status;
  CHECK_OK(kdtree_tree_accept(&args));
  const std::vector<int32_t> status = {
      KDTREE_REQUEST_OK,        0, 0,   // chain
      KDTREE_REQUEST_TWIN,      2, 1,   // twin
      KDTREE_REQUEST_PARENT,    1, 1,   // parent
      KDTREE_REQUEST_NO_CHOICE, 1, 0,   // no choice
      KDTREE_REQUEST_OK,        0, 0,   // off the path
      KDTREE_REQUEST_OWN_SIZE,  3, 2,   // too deep
      KDTREE_REQUEST_NAN,       3, 12,  // passed over
  };
  CHECK_EQUAL_ALL(batch.status.read(), status, "status");
  CHECK_EQUAL_ALL(batch.accepted.read(), (std::vector<int32_t>{2, -1, -1, -1, 1, -1, -1}), "accepted");
  CHECK_EQUAL_ALL(batch.bonus.read(), (std::vector<int32_t>{9, -1, -1, -1, 6, -1, -1}), "bonus");
  const std::vector<int32_t> path = {0, 1, 2, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 1, -1, -1, -1, -1, -1, -1, -1};
  CHECK_EQUAL_ALL(batch.path.read(), path, "path");
}

TEST(a_node_count_outside_its_block) {
  const Tree chain{"chain", {0, 1}, {-1, 0}, {1, 2}, {}, 0};
  Batch batch({chain, chain, chain}, 4, 3);
  const int32_t counts[] = {-1, 1, 5};
  batch.node_count.write(counts, 3);
  const kdtree_tree_accept_args args = batch.args();
  CHECK_OK(kdtree_tree_accept(&args));
  CHECK_EQUAL_ALL(batch.status.read(), (std::vector<int32_t>{9, -1, 4, 0, 0, 0, 9, 5, 4}), "status");
  CHECK_EQUAL_ALL(batch.accepted.read(), (std::vector<int32_t>{-1, 1, -1}), "accepted");
}

TEST(arguments_are_refused_with_their_numbers) {
  Batch batch({{"root", {0}, {-1}, {1}, {}, 0}}, 2, 3);
  const auto refused = [&](kdtree_status status, const char* message, auto change) {
    kdtree_tree_accept_args args = batch.args();
    change(args);
    CHECK_STATUS(kdtree_tree_accept(&args), status);
    CHECK(std::strstr(kdtree_last_error(), message) != nullptr);
  };
  CHECK_STATUS(kdtree_tree_accept(nullptr), KDTREE_POINTER);
  refused(KDTREE_VERSION, "struct_size is 8", [](auto& a) { a.struct_size = 8; });
  refused(KDTREE_SIZE, "requests is 0, it must be in [1, 65535]", [](auto& a) { a.requests = 0; });
  refused(KDTREE_SIZE, "budget is 1025, it must be in [0, 1024]", [](auto& a) { a.budget = 1025; });
  refused(KDTREE_SIZE, "depth_limit is -1, it must be in [0, 31]", [](auto& a) { a.depth_limit = -1; });
  refused(KDTREE_POINTER, "node_count is NULL", [](auto& a) { a.node_count = nullptr; });
  refused(KDTREE_POINTER, "tokens is NULL", [](auto& a) { a.tokens = nullptr; });
  refused(KDTREE_POINTER, "parents is NULL", [](auto& a) { a.parents = nullptr; });
  refused(KDTREE_POINTER, "choices is NULL", [](auto& a) { a.choices = nullptr; });
  refused(KDTREE_POINTER, "accepted is NULL", [](auto& a) { a.accepted = nullptr; });
  refused(KDTREE_POINTER, "path is NULL", [](auto& a) { a.path = nullptr; });
  refused(KDTREE_POINTER, "bonus is NULL", [](auto& a) { a.bonus = nullptr; });
  refused(KDTREE_POINTER, "status is NULL", [](auto& a) { a.status = nullptr; });
  refused(KDTREE_ALIGNMENT, "not aligned to 4 bytes",
          [](auto& a) { a.path = reinterpret_cast<int32_t*>(reinterpret_cast<char*>(a.path) + 2); });
  CHECK_EQUAL(batch.accepted.read()[0], static_cast<int32_t>(0xa5a5a5a5u));
}
