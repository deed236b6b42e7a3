// The requests of a run are checked before anything is allocated.
#pragma once

#include <string>

#include "loop/decoder.h"

namespace kdtree {

// Throws EngineFailure KDTREE_SIZE: "request <request>: <what>".
[[noreturn]] void refuse(int request, const std::string& what);

// Throws EngineFailure unless the engine can decode request `q`, number r of its run. method: kdtree_method.
void check_request(int r, const kdtree_request& q, int method, Decoder* decoder);

}  // namespace kdtree
