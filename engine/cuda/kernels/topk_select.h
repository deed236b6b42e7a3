// The K best of a row by one block, from the maxima of its groups.
//
// The K-th greatest maximum is a bound that at least K logits reach, and hardly more than those: only groups whose
// maximum reaches it are read again. What reaches it is spread over bins by rank and sorted inside each bin. Where that
// does not fit - logits in ascending order, masked ones, ties of thousands - the row is streamed through the same room
// with a rising bound.
#pragma once

#include "common/block.h"
#include "kernels/topk_row.h"

namespace kdtree {

constexpr int kBins = 2048;
constexpr int kMostInBin = 128;  // each is compared with all others of its bin
constexpr int kGathered = 4;     // octets that a thread reads at once

// Shared memory of a block of kThreads that selects up to kMostK.
template <int kThreads_, int kMostK_>
struct Selection {
  static constexpr int kThreads = kThreads_, kMostK = kMostK_;
  static constexpr int kRoom = 16 * kThreads;  // at least kMostK and an octet of each thread
  static constexpr int kHits = 8 * kThreads;
  static_assert(kMostK + kOctet * kThreads <= kRoom);

  unsigned long long keys[kRoom];
  union {
    unsigned hits[kHits];
    unsigned long long ordered[kMostK + kMostInBin];
  };
  unsigned bins[kBins];
  unsigned hit_count, count;
  unsigned cut_bin;
};

// Logits of a row as numbers in the order of the list: greater is better, so a lower id is greater among equals.
template <typename T>
class Ranking {
 public:
  __device__ explicit Ranking(unsigned size) { id_bits_ = kWarp - __clz(static_cast<int>(size | 1)); }

  __device__ unsigned long long key(unsigned order, unsigned id) const {
    return static_cast<unsigned long long>(order >> kUnused) << id_bits_ | (last_id() - id);
  }
  __device__ unsigned id(unsigned long long key) const { return last_id() - (static_cast<unsigned>(key) & last_id()); }
  __device__ unsigned order(unsigned long long key) const {
    const unsigned kept = static_cast<unsigned>(key >> id_bits_) << kUnused;
    return kept >> 31 ? kept : kept | ((1u << kUnused) - 1);
  }

  __device__ unsigned last_id() const { return (1u << id_bits_) - 1; }

 private:
  // Low bits of an order that a bf16 leaves all 0, or all 1 if it is negative.
  static constexpr int kUnused = sizeof(T) == 2 ? 16 : 0;
  int id_bits_;
};

template <typename T, typename Shared>
class Selector {
 public:
  __device__ Selector(Shared& shared, BlockScan& scan, const T* row, unsigned size, unsigned k)
      : s_(shared), scan_(scan), row_(row), size_(size), k_(k), ranking_(size) {}

  // Calls emit(rank, order, id) once for each of the k best. maxima [groups] of 2^group_bits ids each; top: order of
  // the greatest logit. Starts and ends with whatever the block has in s_.keys, ordered, bins, counts in use.
  template <typename Emit>
  __device__ void operator()(const uint16_t* maxima, int64_t groups, int group_bits, unsigned top, Emit emit) {
    const auto emit_key = [&](unsigned rank, unsigned long long key) {
      emit(rank, ranking_.order(key), ranking_.id(key));
    };
    const unsigned bound = find_bound(maxima, groups, top >> 16);
    find_hits(maxima, groups, bound);
    __syncthreads();
    const unsigned hits = s_.hit_count;
    if (hits <= Shared::kHits) {
      gather(group_bits, hits, value_from(bound << 16));
      __syncthreads();
    }
    const unsigned found = s_.count;
    if (hits > Shared::kHits || found > Shared::kRoom) {
      stream(lowest(bound));
    } else {
      if (spread(found, lowest(bound), ranking_.key(top, 0), emit_key)) return;
      sort(found);
    }
    for (unsigned i = threadIdx.x; i < k_; i += Shared::kThreads) emit_key(i, s_.keys[i]);
  }

 private:
  static constexpr int kBinsOfThread = kBins / Shared::kThreads;
  static constexpr int kAtOnce = 16 / sizeof(uint16_t);  // maxima of a load

  // The least key of a logit whose order has this upper half.
  __device__ unsigned long long lowest(unsigned half) const { return ranking_.key(half << 16, ranking_.last_id()); }

  // The thread's bins, its highest first; thread 0 has the highest of all.
  __device__ int highest_bin() const { return kBins - 1 - static_cast<int>(threadIdx.x) * kBinsOfThread; }

  __device__ void clear_bins() {
    for (int i = threadIdx.x; i < kBins; i += Shared::kThreads) s_.bins[i] = 0;
    __syncthreads();
  }

  // Consecutive slots for `count` elements of each lane, by whole warps. The first may lie past the room.
  __device__ static unsigned claim(unsigned* counter, unsigned count) {
    if (!__any_sync(kAllLanes, count != 0)) return 0;
    const unsigned inclusive = warp_inclusive_sum(count);
    unsigned first = 0;
    if (lane_id() == kWarp - 1) first = atomicAdd(counter, inclusive);
    return __shfl_sync(kAllLanes, first, kWarp - 1) + inclusive - count;
  }

  // The maxima from `first` on as eight halves; those that are none come as 0, below all.
  __device__ static void load_maxima(const uint16_t* maxima, int64_t first, int64_t groups, unsigned (&half)[kAtOnce]) {
    const uint4 loaded = first < groups ? *reinterpret_cast<const uint4*>(maxima + first) : uint4{0, 0, 0, 0};
    const unsigned words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
    KDTREE_UNROLL
    for (int i = 0; i < kAtOnce; ++i)
      half[i] = first + i < groups ? (i % 2 == 0 ? words[i / 2] & 0xffffu : words[i / 2] >> 16) : 0;
  }

  // Counts the maxima from `low` on in bins of 2^shift; true if there are k, and s_.cut_bin holds the k-th greatest.
  __device__ bool find_cut(const uint16_t* maxima, int64_t groups, unsigned low, int shift) {
    clear_bins();
    for (int64_t first = threadIdx.x * kAtOnce; first < groups; first += Shared::kThreads * kAtOnce) {
      unsigned half[kAtOnce];
      load_maxima(maxima, first, groups, half);
      KDTREE_UNROLL
      for (int i = 0; i < kAtOnce; ++i)
        if (half[i] >= max(low, 1u)) atomicAdd(&s_.bins[min((half[i] - low) >> shift, kBins - 1u)], 1u);
    }
    __syncthreads();
    unsigned sum = 0;
    for (int i = 0; i < kBinsOfThread; ++i) sum += s_.bins[highest_bin() - i];
    const Scanned scanned = scan_(sum);
    if (scanned.before < k_ && scanned.before + sum >= k_) {
      int bin = highest_bin();
      for (unsigned above = scanned.before; above + s_.bins[bin] < k_; --bin) above += s_.bins[bin];
      s_.cut_bin = static_cast<unsigned>(bin);
    }
    __syncthreads();
    return scanned.total >= k_;
  }

  // The k-th greatest maximum: sought within 16 binades of the greatest, else among all halves in bins of 32, then in
  // that bin.
  __device__ unsigned find_bound(const uint16_t* maxima, int64_t groups, unsigned top) {
    unsigned low = top > kBins - 1u ? top - (kBins - 1) : 0;
    int shift = 0;
    KDTREE_UNROLL_BY(1)
    while (!find_cut(maxima, groups, low, shift) || shift != 0) {
      low = shift != 0 ? low + (s_.cut_bin << shift) : 0;
      shift = shift != 0 ? 0 : 5;
    }
    return low + s_.cut_bin;
  }

  // The groups whose maximum reaches the bound, in s_.hits; s_.hit_count of them, also if there is no room for all.
  __device__ void find_hits(const uint16_t* maxima, int64_t groups, unsigned bound) {
    if (threadIdx.x == 0) s_.hit_count = s_.count = 0;
    __syncthreads();
    for (int64_t base = 0; base < groups; base += Shared::kThreads * kAtOnce) {
      const int64_t first = base + threadIdx.x * kAtOnce;
      unsigned half[kAtOnce], reached = 0;
      load_maxima(maxima, first, groups, half);
      KDTREE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) reached |= half[i] >= bound ? 1u << i : 0u;
      unsigned slot = claim(&s_.hit_count, static_cast<unsigned>(__popc(reached)));
      for (; reached != 0 && slot < Shared::kHits; reached &= reached - 1, ++slot)
        s_.hits[slot] = static_cast<unsigned>(first) + static_cast<unsigned>(__ffs(static_cast<int>(reached)) - 1);
    }
  }

  // Bit i: logit i of the octet is there and at least `least`.
  __device__ unsigned reaching(const float (&x)[kOctet], unsigned first, float least) const {
    unsigned reached = 0;
    KDTREE_UNROLL
    for (int i = 0; i < kOctet; ++i) reached |= x[i] >= least ? 1u << i : 0u;
    const unsigned there = size_ - min(first, size_);
    return there < kOctet ? reached & ((1u << there) - 1) : reached;
  }

  __device__ float value_from(unsigned order) const { return value_of(max(order, kOrderOfMinusInfinity)); }

  __device__ void keep(const float (&x)[kOctet], unsigned first, unsigned reached, unsigned& slot) {
    KDTREE_UNROLL
    for (int i = 0; i < kOctet; ++i)
      if (reached >> i & 1) {
        if (slot < Shared::kRoom) s_.keys[slot] = ranking_.key(order_of(x[i]), first + i);
        ++slot;
      }
  }

  // The keys of the logits from `least` on of the groups in s_.hits, in s_.keys; s_.count of them, also if there is no
  // room for all.
  __device__ void gather(int group_bits, unsigned hits, float least) {
    if (group_bits == 0) {
      for (unsigned i = threadIdx.x; i < hits; i += Shared::kThreads)
        s_.keys[i] = ranking_.key(order_of(widen(row_[s_.hits[i]])), s_.hits[i]);
      if (threadIdx.x == 0) s_.count = hits;
      return;
    }
    const int octet_bits = group_bits - 3;
    const unsigned all = hits << octet_bits;
    for (unsigned base = 0; base < all; base += Shared::kThreads * kGathered) {
      float x[kGathered][kOctet];
      unsigned first[kGathered], reached[kGathered], count = 0;
      KDTREE_UNROLL
      for (int g = 0; g < kGathered; ++g) {
        const unsigned i = base + g * Shared::kThreads + threadIdx.x;
        first[g] = i < all ? octet_of_group(s_.hits[i >> octet_bits], i & ((1u << octet_bits) - 1), group_bits) : size_;
        load_octet(row_, first[g], size_, x[g]);
      }
      KDTREE_UNROLL
      for (int g = 0; g < kGathered; ++g) {
        reached[g] = reaching(x[g], first[g], least);
        count += static_cast<unsigned>(__popc(reached[g]));
      }
      unsigned slot = claim(&s_.count, count);
      KDTREE_UNROLL
      for (int g = 0; g < kGathered; ++g) keep(x[g], first[g], reached[g], slot);
    }
  }

  // Emits the k greatest of s_.keys [n], all within least..most: their bins are in order, so that each only has to be
  // compared inside its own. False, and nothing emitted, if a bin is too full for that.
  template <typename Emit>
  __device__ bool spread(unsigned n, unsigned long long least, unsigned long long most, Emit emit) {
    const int shift = max(0, 64 - __clzll(static_cast<long long>((most - least) | 1)) - 11);
    const auto bin_of = [&](unsigned long long key) { return static_cast<unsigned>((key - least) >> shift); };
    clear_bins();
    for (unsigned i = threadIdx.x; i < n; i += Shared::kThreads) atomicAdd(&s_.bins[bin_of(s_.keys[i])], 1u);
    __syncthreads();
    unsigned sum = 0;
    for (int i = 0; i < kBinsOfThread; ++i) sum += s_.bins[highest_bin() - i];
    unsigned above = scan_(sum).before;
    int crowded = 0;
    for (int i = 0; i < kBinsOfThread; ++i) {
      const unsigned count = s_.bins[highest_bin() - i];
      if (above < k_ && count > kMostInBin) crowded = 1;
      s_.bins[highest_bin() - i] = above;
      above += count;
    }
    if (__syncthreads_or(crowded)) return false;
    for (unsigned i = threadIdx.x; i < n; i += Shared::kThreads) {
      const unsigned place = atomicAdd(&s_.bins[bin_of(s_.keys[i])], 1u);
      if (place < Shared::kMostK + kMostInBin) s_.ordered[place] = s_.keys[i];
    }
    __syncthreads();  // a bin's number is now its end, which is the beginning of the bin below
    const unsigned placed = min(n, k_ + kMostInBin);
    for (unsigned i = threadIdx.x; i < placed; i += Shared::kThreads) {
      const unsigned long long key = s_.ordered[i];
      const unsigned bin = bin_of(key), begin = bin + 1 < kBins ? s_.bins[bin + 1] : 0, end = s_.bins[bin];
      if (begin >= k_) continue;
      unsigned rank = begin;
      KDTREE_UNROLL_BY(2)
      for (unsigned j = begin; j < end; ++j) rank += s_.ordered[j] > key ? 1 : 0;
      if (rank < k_) emit(rank, key);
    }
    return true;
  }

  // s_.keys [n] in descending order: a bitonic sort.
  __device__ void sort(unsigned n) {
    unsigned size = 2;
    while (size < n) size *= 2;
    for (unsigned i = n + threadIdx.x; i < size; i += Shared::kThreads) s_.keys[i] = 0;  // below all
    __syncthreads();
    KDTREE_UNROLL_BY(1)
    for (unsigned run = 2; run <= size; run *= 2)
      for (unsigned step = run / 2; step > 0; step /= 2) {
        KDTREE_UNROLL_BY(1)
        for (unsigned i = threadIdx.x; i < size / 2; i += Shared::kThreads) {
          const unsigned low = 2 * i - (i & (step - 1));
          const unsigned long long a = s_.keys[low], b = s_.keys[low + step];
          if ((a < b) == ((low & run) == 0)) {
            s_.keys[low] = b;
            s_.keys[low + step] = a;
          }
        }
        __syncthreads();
      }
  }

  // The k greatest keys of the row in s_.keys [k], sorted. Whenever the room is full, the k best stay and the least of
  // them is what the next ones must beat.
  __device__ void stream(unsigned long long least) {
    __syncthreads();
    if (threadIdx.x == 0) s_.count = 0;
    __syncthreads();
    constexpr unsigned kPass = Shared::kThreads * kOctet;
    float next[kOctet];
    load_octet(row_, threadIdx.x * kOctet, size_, next);
    for (unsigned base = 0; base < size_; base += kPass) {
      const unsigned first = base + threadIdx.x * kOctet;
      float x[kOctet];
      KDTREE_UNROLL
      for (int i = 0; i < kOctet; ++i) x[i] = next[i];
      load_octet(row_, first + kPass, size_, next);  // on its way while the block waits
      unsigned reached = reaching(x, first, value_from(ranking_.order(least)));
      KDTREE_UNROLL
      for (int i = 0; i < kOctet; ++i)
        if ((reached >> i & 1) && ranking_.key(order_of(x[i]), first + i) < least) reached &= ~(1u << i);
      unsigned slot = claim(&s_.count, static_cast<unsigned>(__popc(reached)));
      keep(x, first, reached, slot);
      __syncthreads();
      const unsigned kept = s_.count;
      __syncthreads();
      if (kept + kPass <= Shared::kRoom && base + kPass < size_) continue;
      sort(kept);
      if (kept < k_) continue;
      least = s_.keys[k_ - 1] + 1;
      if (threadIdx.x == 0) s_.count = k_;
      __syncthreads();
    }
  }

  Shared& s_;
  BlockScan& scan_;
  const T* row_;
  unsigned size_, k_;
  Ranking<T> ranking_;
};

}  // namespace kdtree
