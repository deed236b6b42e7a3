// What the stages behind the tree share: whether a request is passed over, and its status.
#pragma once

#include "common/port.h"
#include "kdtree_engine.h"

namespace kdtree {

// Statuses are [R, 3] as in the C header. `before` may be NULL. It may also be the status that the stage writes: a
// status that changes under the eyes of a thread or block is one that it finds for itself.
__device__ inline bool failed_before(const int32_t* before, int request) {
  return before != nullptr && before[3 * request] != KDTREE_REQUEST_OK;
}

// What became of one request.
struct Outcome {
  int code = KDTREE_REQUEST_OK;
  int place = 0;
  int detail = 0;

  __device__ bool failed() const { return code != KDTREE_REQUEST_OK; }
};

__device__ inline Outcome carried_on(const int32_t* before, int request) {
  const int32_t* status = before + 3 * request;
  return {status[0], status[1], status[2]};
}

// What a request comes with.
__device__ inline Outcome outcome_before(const int32_t* before, int request) {
  return failed_before(before, request) ? carried_on(before, request) : Outcome{};
}

__device__ inline void write_status(int32_t* status, int request, const Outcome& outcome) {
  status[3 * request] = outcome.code;
  status[3 * request + 1] = outcome.place;
  status[3 * request + 2] = outcome.detail;
}

}  // namespace kdtree
