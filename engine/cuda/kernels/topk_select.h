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

// Outside of the templates, whose bodies a compiler for the host looks into.
__device__ inline int bit_length(unsigned long long value) { return 64 - __clzll(static_cast<long long>(value)); }

constexpr int kBins = 2048;
constexpr int kMostInBin = 128;  // each is compared with all others of its bin

// Shared memory of a block of kThreads that selects up to kMostK. Of a thread: kHeld loads of maxima stay in registers,
// kGathered octets are read at once.
template <int kThreads_, int kMostK_, int kHeld_, int kGathered_>
struct Selection {
  static constexpr int kThreads = kThreads_, kMostK = kMostK_, kHeld = kHeld_, kGathered = kGathered_;
  static constexpr int kKept = 8 * kThreads;  // keys that may be gathered
  static constexpr int kHits = 8 * kThreads;  // groups that may be read again
  static constexpr int kRoom =
      16 * kThreads;  // keys that are streamed and sorted: at least kMostK and an octet a thread
  static_assert(kMostK + kOctet * kThreads <= kRoom && kMostK <= kKept);

  union {
    struct {
      unsigned long long keys[kKept];
      union {
        unsigned hits[kHits];
        unsigned long long ordered[kMostK + kMostInBin];
      };
      unsigned bins[kBins];  // zero but between make_keys and spread
    };
    unsigned long long room[kRoom];
  };
  unsigned hit_count, count;
  unsigned cut_bin;

  // By the whole block, before the first barrier.
  __device__ void clear() {
    for (int i = threadIdx.x; i < kBins; i += kThreads) bins[i] = 0;
    if (threadIdx.x == 0) hit_count = count = 0;
  }
};

// The maxima of a row, eight a load. The first kHeld loads of a thread stay in its registers.
template <int kThreads, int kHeld>
class Maxima {
 public:
  static constexpr int kAtOnce = 16 / sizeof(uint16_t);
  static_assert(kHeld * kAtOnce <= 64, "a bit for each that is held");

  __device__ void load(const uint16_t* maxima, int64_t groups) {
    maxima_ = maxima;
    groups_ = groups;
    KDTREE_UNROLL
    for (int i = 0; i < kHeld; ++i) held_[i] = loaded(first(i));
  }

  // Calls f(number of the first, eight halves, i) of loads the thread's i-th; as often in each thread of a warp. Maxima
  // that are none come as 0, below all.
  template <typename F>
  __device__ void for_held(F f) const {
    KDTREE_UNROLL
    for (int i = 0; i < kHeld; ++i) call(f, first(i), held_[i], i);
  }
  template <typename F>
  __device__ void for_others(F f) const {
    KDTREE_UNROLL_BY(1)
    for (int i = kHeld; static_cast<int64_t>(i) * kThreads * kAtOnce < groups_; ++i)
      call(f, first(i), loaded(first(i)), i);
  }

 private:
  __device__ int64_t first(int i) const {
    return (static_cast<int64_t>(i) * kThreads + static_cast<int>(threadIdx.x)) * kAtOnce;
  }

  __device__ uint4 loaded(int64_t first) const {
    if (first >= groups_) return uint4{0, 0, 0, 0};
    if (first + kAtOnce / 2 >= groups_) {  // a chunk of the largest groups leaves half of a load
      const uint2 two = *reinterpret_cast<const uint2*>(maxima_ + first);
      return kept_of(uint4{two.x, two.y, 0, 0}, first);
    }
    return kept_of(*reinterpret_cast<const uint4*>(maxima_ + first), first);
  }

  // Without what lies behind the last, which may be anything.
  __device__ uint4 kept_of(uint4 four, int64_t first) const {
    if (first + kAtOnce > groups_) {
      const int there = static_cast<int>(groups_ - first);
      const auto kept = [&](unsigned word, int i) {
        return 2 * i + 1 < there ? word : 2 * i < there ? word & 0xffffu : 0u;
      };
      four = uint4{kept(four.x, 0), kept(four.y, 1), kept(four.z, 2), kept(four.w, 3)};
    }
    return four;
  }

  template <typename F>
  __device__ static void call(F f, int64_t first, const uint4& four, int i) {
    const unsigned words[4] = {four.x, four.y, four.z, four.w};
    unsigned half[kAtOnce];
    KDTREE_UNROLL
    for (int h = 0; h < kAtOnce; ++h) half[h] = h % 2 == 0 ? words[h / 2] & 0xffffu : words[h / 2] >> 16;
    f(first, half, i);
  }

  uint4 held_[kHeld];
  const uint16_t* maxima_;
  int64_t groups_;
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

  // Calls emit(rank, order, id) once for each of the k best. maxima: of 2^group_bits ids each; top: order of the
  // greatest logit. The block has passed a barrier since s_.clear().
  template <typename Groups, typename Emit>
  __device__ void operator()(const Groups& maxima, int group_bits, unsigned top, Emit emit) {
    const auto emit_key = [&](unsigned rank, unsigned long long key) {
      emit(rank, ranking_.order(key), ranking_.id(key));
    };
    const unsigned bound = find_bound(maxima, top >> 16);
    find_hits(maxima, bound);
    __syncthreads();
    const unsigned hits = s_.hit_count;
    if (hits <= Shared::kHits) gather(group_bits, hits, value_from(bound << 16));
    __syncthreads();
    const unsigned found = s_.count;
    if (hits > Shared::kHits || found > Shared::kKept) {
      stream(lowest(bound));
    } else {
      const KeyBins bins(lowest(bound), ranking_.key(top, 0));
      make_keys(found, bins);
      __syncthreads();
      if (spread(found, bins, emit_key)) return;
      sort(found);
    }
    for (unsigned i = threadIdx.x; i < k_; i += Shared::kThreads) emit_key(i, s_.room[i]);
  }

 private:
  static constexpr int kBinsOfThread = kBins / Shared::kThreads;

  // Bins of keys within least..most, in their order.
  class KeyBins {
   public:
    __device__ KeyBins(unsigned long long least, unsigned long long most)
        : least_(least), shift_(max(0, bit_length((most - least) | 1) - 11)) {}
    __device__ unsigned operator()(unsigned long long key) const {
      return static_cast<unsigned>((key - least_) >> shift_);
    }

   private:
    unsigned long long least_;
    int shift_;
  };
  static_assert(kBins == 1 << 11);

  // The least key of a logit whose order has this upper half.
  __device__ unsigned long long lowest(unsigned half) const { return ranking_.key(half << 16, ranking_.last_id()); }

  // The thread's bins, its highest first; thread 0 has the highest of all.
  __device__ static int highest_bin() { return kBins - 1 - static_cast<int>(threadIdx.x) * kBinsOfThread; }

  // Reads the thread's bins, and leaves zeros.
  __device__ void take_bins(unsigned (&bins)[kBinsOfThread]) {
    KDTREE_UNROLL
    for (int i = 0; i < kBinsOfThread; ++i) {
      bins[i] = s_.bins[highest_bin() - i];
      s_.bins[highest_bin() - i] = 0;
    }
  }

  // Consecutive slots for `count` elements of each lane, by whole warps. The first may lie past the room.
  __device__ static unsigned claim(unsigned* counter, unsigned count) {
    if (!__any_sync(kAllLanes, count != 0)) return 0;
    const unsigned inclusive = warp_inclusive_sum(count);
    unsigned first = 0;
    if (lane_id() == kWarp - 1) first = atomicAdd(counter, inclusive);
    return __shfl_sync(kAllLanes, first, kWarp - 1) + inclusive - count;
  }

  // Counts the maxima from `low` on in bins of 2^shift; true if there are k, and s_.cut_bin holds the k-th greatest.
  template <typename Groups>
  __device__ bool find_cut(const Groups& maxima, unsigned low, int shift) {
    const unsigned least = max(low, 1u);
    const auto count = [&](int64_t, const auto& half, int) {
      KDTREE_UNROLL
      for (int i = 0; i < Groups::kAtOnce; ++i)
        if (half[i] >= least) atomicAdd(&s_.bins[min((half[i] - low) >> shift, kBins - 1u)], 1u);
    };
    maxima.for_held(count);
    maxima.for_others(count);
    __syncthreads();
    unsigned bins[kBinsOfThread], sum = 0;
    take_bins(bins);
    KDTREE_UNROLL
    for (int i = 0; i < kBinsOfThread; ++i) sum += bins[i];
    const Scanned scanned = scan_(sum);
    unsigned above = scanned.before;
    KDTREE_UNROLL
    for (int i = 0; i < kBinsOfThread; ++i) {
      if (above < k_ && above + bins[i] >= k_) s_.cut_bin = static_cast<unsigned>(highest_bin() - i);
      above += bins[i];
    }
    __syncthreads();
    return scanned.total >= k_;
  }

  // The k-th greatest maximum: sought within 16 binades of the greatest, else among all halves in bins of 32, then in
  // that bin.
  template <typename Groups>
  __device__ unsigned find_bound(const Groups& maxima, unsigned top) {
    unsigned low = top > kBins - 1u ? top - (kBins - 1) : 0;
    int shift = 0;
    KDTREE_UNROLL_BY(1)
    while (!find_cut(maxima, low, shift) || shift != 0) {
      low = shift != 0 ? low + (s_.cut_bin << shift) : 0;
      shift = shift != 0 ? 0 : 5;
    }
    return low + s_.cut_bin;
  }

  // The groups whose maximum reaches the bound, in s_.hits; s_.hit_count of them, also if there is no room for all.
  template <typename Groups>
  __device__ void find_hits(const Groups& maxima, unsigned bound) {
    const auto reaching = [&](const auto& half) {
      unsigned reached = 0;
      KDTREE_UNROLL
      for (int i = 0; i < Groups::kAtOnce; ++i) reached |= half[i] >= bound ? 1u << i : 0u;
      return reached;
    };
    const auto keep_hits = [&](unsigned long long reached, auto number_of) {
      unsigned slot = claim(&s_.hit_count, static_cast<unsigned>(__popcll(reached)));
      for (; reached != 0 && slot < Shared::kHits; reached &= reached - 1, ++slot)
        s_.hits[slot] = number_of(static_cast<unsigned>(__ffsll(static_cast<long long>(reached)) - 1));
    };
    unsigned long long reached = 0;
    maxima.for_held([&](int64_t, const auto& half, int i) {
      reached |= static_cast<unsigned long long>(reaching(half)) << (i * Groups::kAtOnce);
    });
    keep_hits(reached, [](unsigned bit) {
      return (bit / Groups::kAtOnce * Shared::kThreads + threadIdx.x) * Groups::kAtOnce + bit % Groups::kAtOnce;
    });
    maxima.for_others([&](int64_t first, const auto& half, int) {
      keep_hits(reaching(half), [&](unsigned bit) { return static_cast<unsigned>(first) + bit; });
    });
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

  __device__ unsigned long long key_of(unsigned id) const {
    return ranking_.key(order_of(widen(__ldg(row_ + id))), id);
  }

  // The first id of an octet of the groups in s_.hits, which have `all` octets; past them the row's end.
  __device__ unsigned octet_of_hits(unsigned octet, unsigned all, int group_bits) const {
    const int octet_bits = group_bits - 3;
    return octet < all ? octet_of_group(s_.hits[octet >> octet_bits], octet & ((1u << octet_bits) - 1), group_bits)
                       : size_;
  }

  // x[i], which stays in registers: memory would be far while other blocks stream through the caches.
  __device__ static float element(const float (&x)[kOctet], unsigned i) {
    float half[4], quarter[2];
    KDTREE_UNROLL
    for (int j = 0; j < 4; ++j) half[j] = i & 4 ? x[j + 4] : x[j];
    KDTREE_UNROLL
    for (int j = 0; j < 2; ++j) quarter[j] = i & 2 ? half[j + 2] : half[j];
    return i & 1 ? quarter[1] : quarter[0];
  }

  // The logits from `least` on of the groups in s_.hits, as s_.keys of bits and id; s_.count of them, also if there is
  // no room for all.
  __device__ void gather(int group_bits, unsigned hits, float least) {
    const auto keep = [&](unsigned slot, float x, unsigned id) {
      if (slot < Shared::kKept) s_.keys[slot] = static_cast<unsigned long long>(__float_as_uint(x)) << 32 | id;
    };
    if (group_bits == 0) {
      for (unsigned i = threadIdx.x; i < hits; i += Shared::kThreads)
        keep(i, widen(__ldg(row_ + s_.hits[i])), s_.hits[i]);
      if (threadIdx.x == 0) s_.count = hits;
      return;
    }
    const unsigned all = hits << (group_bits - 3);
    KDTREE_UNROLL_BY(1)
    for (unsigned base = threadIdx.x; base - threadIdx.x < all; base += Shared::kThreads * Shared::kGathered) {
      unsigned long long reached = 0;  // bit 8 g + i: logit i of the thread's octet g
      float x[Shared::kGathered][kOctet];
      const auto first = [&](int g) { return octet_of_hits(base + g * Shared::kThreads, all, group_bits); };
      KDTREE_UNROLL
      for (int g = 0; g < Shared::kGathered; ++g) load_octet(row_, first(g), size_, x[g]);
      KDTREE_UNROLL
      for (int g = 0; g < Shared::kGathered; ++g)
        reached |= static_cast<unsigned long long>(reaching(x[g], first(g), least)) << (8 * g);
      unsigned slot = claim(&s_.count, static_cast<unsigned>(__popcll(reached)));
      KDTREE_UNROLL
      for (int g = 0; g < Shared::kGathered; ++g) {
        KDTREE_UNROLL_BY(1)
        for (unsigned some = static_cast<unsigned>(reached >> (8 * g)) & 0xffu; some != 0; some &= some - 1, ++slot) {
          const unsigned i = static_cast<unsigned>(__ffs(static_cast<int>(some)) - 1);
          keep(slot, element(x[g], i), first(g) + i);
        }
      }
    }
  }
  static_assert(8 * Shared::kGathered <= 64 && kOctet == 8);

  // Makes s_.keys [n] of what was gathered, and counts them in their bins.
  __device__ void make_keys(unsigned n, const KeyBins& bins) {
    for (unsigned i = threadIdx.x; i < n; i += Shared::kThreads) {
      const unsigned long long found = s_.keys[i];
      const unsigned order = order_of(__uint_as_float(static_cast<unsigned>(found >> 32)));
      const unsigned long long key = ranking_.key(order, static_cast<unsigned>(found));
      s_.keys[i] = key;
      atomicAdd(&s_.bins[bins(key)], 1u);
    }
  }

  // Emits the k greatest of s_.keys [n], counted in their bins: the bins are in order, so that each key only has to be
  // compared inside its own. False, and nothing emitted, if a bin is too full for that.
  template <typename Emit>
  __device__ bool spread(unsigned n, const KeyBins& bin_of, Emit emit) {
    unsigned bins[kBinsOfThread], sum = 0;
    take_bins(bins);
    KDTREE_UNROLL
    for (int i = 0; i < kBinsOfThread; ++i) sum += bins[i];
    unsigned above = scan_(sum).before;
    int crowded = 0;
    KDTREE_UNROLL
    for (int i = 0; i < kBinsOfThread; ++i) {
      if (above < k_ && bins[i] > kMostInBin) crowded = 1;
      s_.bins[highest_bin() - i] = above;
      above += bins[i];
    }
    if (__syncthreads_or(crowded)) return false;
    for (unsigned i = threadIdx.x; i < n; i += Shared::kThreads) {
      const unsigned long long key = s_.keys[i];
      const unsigned place = atomicAdd(&s_.bins[bin_of(key)], 1u);
      if (place < Shared::kMostK + kMostInBin) s_.ordered[place] = key;
    }
    __syncthreads();  // a bin's number is now its end, which is the beginning of the bin below
    const unsigned placed = min(n, k_ + kMostInBin);
    for (unsigned i = threadIdx.x; i < placed; i += Shared::kThreads) {
      const unsigned long long key = s_.ordered[i];
      const unsigned bin = bin_of(key), begin = bin + 1 < kBins ? s_.bins[bin + 1] : 0, end = s_.bins[bin];
      if (begin >= k_) continue;
      unsigned rank = begin;
      KDTREE_UNROLL_BY(4)
      for (unsigned j = begin; j < end; ++j) rank += s_.ordered[j] > key ? 1 : 0;
      if (rank < k_) emit(rank, key);
    }
    return true;
  }

  // s_.room [n] in descending order: a bitonic sort.
  __device__ void sort(unsigned n) {
    unsigned size = 2;
    while (size < n) size *= 2;
    for (unsigned i = n + threadIdx.x; i < size; i += Shared::kThreads) s_.room[i] = 0;  // below all
    __syncthreads();
    KDTREE_UNROLL_BY(1)
    for (unsigned run = 2; run <= size; run *= 2)
      for (unsigned step = run / 2; step > 0; step /= 2) {
        KDTREE_UNROLL_BY(1)
        for (unsigned i = threadIdx.x; i < size / 2; i += Shared::kThreads) {
          const unsigned low = 2 * i - (i & (step - 1));
          const unsigned long long a = s_.room[low], b = s_.room[low + step];
          if ((a < b) == ((low & run) == 0)) {
            s_.room[low] = b;
            s_.room[low + step] = a;
          }
        }
        __syncthreads();
      }
  }

  // The k greatest keys of the row in s_.room [k], sorted. Whenever the room is full, the k best stay and the least of
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
      KDTREE_UNROLL_BY(1)
      for (; reached != 0 && slot < Shared::kRoom; reached &= reached - 1, ++slot)
        s_.room[slot] = key_of(first + static_cast<unsigned>(__ffs(static_cast<int>(reached)) - 1));
      __syncthreads();
      const unsigned kept = s_.count;
      __syncthreads();
      if (kept + kPass <= Shared::kRoom && base + kPass < size_) continue;
      sort(kept);
      if (kept < k_) continue;
      least = s_.room[k_ - 1] + 1;
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
