// How many nodes the trees of the next round are to have, so that it gives the most tokens for its time.
//
// A node is accepted with about the probability that the drafter gives its path, exp(score), so a tree of its m best
// nodes gives 1 + their sum. What a round of so many rows takes was measured and is given.
#pragma once

#include <cstdint>
#include <vector>

namespace kdtree {

// Up to how many non-root nodes the trees of a graph have: the steps in which they are counted.
int budget_step(int budget, int most_budget);

class BudgetPolicy {
 public:
  struct Choice {
    int budget;
    double tokens;   // expected of all requests; 0: nothing is known yet
    double seconds;  // expected of the round
  };

  // rows: ascending. requests: of the run, each of which has a block of rows in every round. seconds: of rounds whose
  // verify pass has so many rows; between them the way is straight, and so it goes on at both ends.
  BudgetPolicy(std::vector<int32_t> rows, std::vector<double> seconds, int most_budget, int requests);

  // One request's tree: scores [1 + nodes] of the root and of nodes from the best on.
  void see(const double* scores, int nodes);
  // For the trees seen since the last choice, or, if there are none, for the widest ones.
  Choice choose();

 private:
  double seconds_of(double rows) const;

  int requests_;
  std::vector<int32_t> rows_;
  std::vector<double> seconds_;
  std::vector<int> budgets_;  // to choose from
  std::vector<double> sums_;  // of probabilities, for each: of the trees seen since the last choice
  std::vector<double> mean_;  // of a request, over the last rounds
  int seen_ = 0;
  bool known_ = false;
};

}  // namespace kdtree
