// Top-k and top-p over the values of one row, the largest of which is 0.
//
// As in engine/execution/sampling/filters.py, equal values are all kept or all dropped, and the most likely one is
// kept. Top-p returns -1 if the result depends on the rounding of a sum.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>

#include "vectors.h"

namespace {

// Relative bound on the difference of a row's mass between this file and torch, which is about 2^-20: 2 ulp and
// 1 ulp of each exponential, and four additions in float32.
constexpr double MARGIN = 1.0 / (1 << 19);

// A value and its index as one integer that sorts by value, then by descending index.
inline uint64_t ranked(float value, int64_t index) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return uint64_t(bits) << 32 | uint32_t(~index);
}

inline int64_t index_of(uint64_t rank) { return int64_t(uint32_t(~uint32_t(rank))); }

inline float value_of(uint64_t rank) {
    uint32_t bits = uint32_t(rank >> 32);
    bits = bits >> 31 ? bits & 0x7fffffffu : ~bits;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

constexpr int NUM_BUCKETS = 256;

// Coarse buckets of the values from `lowest` to 0: a larger value is in the same bucket or an earlier one.
class Buckets {
  public:
    // Clamped: all values may be close to 0, and values below -87 weigh nothing.
    explicit Buckets(float lowest) : per_unit_(LAST / std::min(std::max(-lowest, 1e-6f), 87.0f)) {}

    int of(float value) const { return int(std::min(-value * per_unit_, LAST)); }

  private:
    static constexpr float LAST = NUM_BUCKETS - 1;
    float per_unit_;
};

// Moves the values that reach the `top_k`-th largest to the front; returns their number.
inline int64_t keep_k(uint64_t* ranks, int64_t count, int64_t top_k) {
    if (count <= top_k) return count;
    std::nth_element(ranks, ranks + top_k - 1, ranks + count, std::greater<uint64_t>());
    const float threshold = value_of(ranks[top_k - 1]);
    return std::partition(ranks + top_k, ranks + count, [&](uint64_t rank) { return value_of(rank) == threshold; }) -
           ranks;
}

inline float lowest_of(const uint64_t* ranks, int64_t count) {
    return value_of(*std::min_element(ranks, ranks + count));
}

inline double mass_of(const uint64_t* ranks, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += double(exp_of_negative(value_of(ranks[i])));
    return sum;
}

// Moves the values of the first `count` that top-p keeps to the front; returns their number, or -1 if it depends on
// a rounding. `mass`: that of all values that top-p is applied to.
inline int64_t keep_p(uint64_t* ranks, int64_t count, double top_p, double mass) {
    const double limit = top_p * mass, margin = MARGIN * mass;
    const Buckets buckets(lowest_of(ranks, count));
    double masses[NUM_BUCKETS] = {};
    for (int64_t i = 0; i < count; ++i) {
        const float value = value_of(ranks[i]);
        masses[buckets.of(value)] += double(exp_of_negative(value));
    }
    double before = 0;
    int bucket = 0;
    while (bucket < NUM_BUCKETS - 1 && before + masses[bucket] < limit) before += masses[bucket++];
    if (before > 0 && limit - before <= margin) return -1;
    uint64_t* const end = ranks + count;
    uint64_t* const here =
        std::partition(ranks, end, [&](uint64_t rank) { return buckets.of(value_of(rank)) < bucket; });
    uint64_t* const beyond =
        std::partition(here, end, [&](uint64_t rank) { return buckets.of(value_of(rank)) == bucket; });
    std::sort(here, beyond, std::greater<uint64_t>());
    for (uint64_t* at = here; at < beyond; ++at) {
        const float value = value_of(*at);
        // Equal values are kept or dropped together.
        if (before > 0 && (at == here || value < value_of(at[-1]))) {
            if (std::fabs(before - limit) <= margin) return -1;
            if (before > limit) return at - ranks;
        }
        before += double(exp_of_negative(value));
    }
    // The next value, if any, is in another bucket.
    return beyond < end && std::fabs(before - limit) <= margin ? -1 : beyond - ranks;
}

}  // namespace
