// The rows of a pass, for tests of layers.
#pragma once

#include <vector>

#include "kernels/layers.h"
#include "tests/check.h"

namespace check {

// Blocks of `width` rows with their node counts on the device.
struct Blocks {
  Array<int32_t> node_count, prefix_lengths, tokens;
  kdtree::Rows rows{};

  Blocks(int width, const std::vector<int32_t>& counts, const std::vector<int32_t>& prefixes,
         const std::vector<int32_t>& ids)
      : node_count(counts), prefix_lengths(prefixes), tokens(ids) {
    rows.requests = static_cast<int>(counts.size());
    rows.width = width;
    rows.node_count = node_count.get();
    rows.prefix_lengths = prefix_lengths.get();
    rows.tokens = tokens.get();
  }
};

}  // namespace check
