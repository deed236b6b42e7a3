// Weights that are functions of a seed: of the sizes that a config asks for, made where they go, and kept nowhere else.
#pragma once

#include "model/tensors.h"

namespace kdtree {

// The tensors that `tensors` names by its config, of a "model" or a "drafter", beside its entries. Norms lie around 1,
// a router's bias around 0; embeddings have variance 1, matrices 2.25 / inputs: activations stay of order one. Throws
// ModelError for a config that is refused, and where there is a weight already.
TensorMap random_weights(TensorMap tensors, const std::string& kind, uint64_t seed);

// The elements as T, float or bf16 bits, on the host; and in device memory, there when the call returns. Both give the
// same bits.
template <typename T>
std::vector<T> random_values(const RandomValues& random, size_t elements);
template <typename T>
void fill_random(T* to, const RandomValues& random, size_t elements);

}  // namespace kdtree
