#include "loop/budget_policy.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "kdtree_engine.h"

namespace kdtree {
namespace {

constexpr int kBudgets[] = {0, 1, 2, 3, 4, 7, 8, 12, 15, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024};
static_assert(kBudgets[std::size(kBudgets) - 1] == KDTREE_MAX_BUDGET, "no step for the widest trees");

constexpr double kNewest = 0.25;  // weight of the last round in the mean

}  // namespace

int budget_step(int budget, int most_budget) {
  return std::min(*std::lower_bound(std::begin(kBudgets), std::end(kBudgets), budget), most_budget);
}

BudgetPolicy::BudgetPolicy(std::vector<int32_t> rows, std::vector<double> seconds, int most_budget, int requests)
    : requests_(requests), rows_(std::move(rows)), seconds_(std::move(seconds)) {
  for (const int budget : kBudgets)
    if (budget > 0 && budget < most_budget) budgets_.push_back(budget);
  budgets_.push_back(most_budget);
  sums_.assign(budgets_.size(), 0);
  mean_.assign(budgets_.size(), 0);
}

void BudgetPolicy::see(const double* scores, int nodes) {
  double sum = 0;
  size_t next = 0;
  for (int node = 1; node <= nodes; ++node) {
    sum += std::exp(scores[node]);
    for (; next < budgets_.size() && budgets_[next] == node; ++next) sums_[next] += sum;
  }
  // Of nodes that the tree has not, as if probabilities fell with their number as 1 / i.
  for (; next < budgets_.size(); ++next)
    sums_[next] += nodes == 0 ? 0 : sum + std::exp(scores[nodes]) * nodes * std::log(budgets_[next] * 1.0 / nodes);
  ++seen_;
}

BudgetPolicy::Choice BudgetPolicy::choose() {
  if (seen_ == 0) return {budgets_.back(), 0, 0};
  Choice best{0, 0, 1};
  for (size_t i = 0; i < budgets_.size(); ++i) {
    const double sum = sums_[i] / seen_;
    mean_[i] = known_ ? mean_[i] + kNewest * (sum - mean_[i]) : sum;
    const double tokens = seen_ * (1 + mean_[i]), seconds = seconds_of(requests_ * (1.0 + budgets_[i]));
    if (tokens * best.seconds > best.tokens * seconds) best = {budgets_[i], tokens, seconds};
  }
  known_ = true;
  seen_ = 0;
  std::fill(sums_.begin(), sums_.end(), 0.0);
  return best;
}

double BudgetPolicy::seconds_of(double rows) const {
  if (rows_.size() == 1) return seconds_[0];
  const size_t above = static_cast<size_t>(std::lower_bound(rows_.begin(), rows_.end(), rows) - rows_.begin());
  const size_t to = std::min(std::max<size_t>(above, 1), rows_.size() - 1), from = to - 1;
  const double share = (rows - rows_[from]) / (rows_[to] - rows_[from]);
  return std::max(seconds_[from] + share * (seconds_[to] - seconds_[from]), std::min(seconds_[from], seconds_[to]) / 2);
}

}  // namespace kdtree
