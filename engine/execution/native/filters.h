// Top-k and top-p over the values of one row, the largest of which is 0.
//
// Law: as engine/execution/sampling/filters.py has it, values that are equal share one fate, and the most likely one
// stays. Where top-p hangs on how a mass is added up, that is told.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>

#include "vectors.h"

namespace {

// More than what two ways of adding up a row's mass differ by: 2 units in the last place of each exponential
// here and 1 there, and four additions in float32; as a share of the mass about 2^-20.
constexpr double MARGIN = 1.0 / (1 << 19);

// A value and its place as one integer: larger values first, of equal ones the first.
inline uint64_t ranked(float value, int64_t place) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return uint64_t(bits) << 32 | uint32_t(~place);
}

inline int64_t place_of(uint64_t rank) { return int64_t(uint32_t(~uint32_t(rank))); }

inline float value_of(uint64_t rank) {
    uint32_t bits = uint32_t(rank >> 32);
    bits = bits >> 31 ? bits & 0x7fffffffu : ~bits;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

constexpr int SHELVES = 256;

// Sorts values from `lowest` to 0 coarsely: a larger one is on the same shelf or on an earlier one.
class Shelves {
  public:
    // All values may be next to 0; what is below -87 weighs nothing.
    explicit Shelves(float lowest) : per_unit_(LAST / std::min(std::max(-lowest, 1e-6f), 87.0f)) {}

    int of(float value) const { return int(std::min(-value * per_unit_, LAST)); }

  private:
    static constexpr float LAST = SHELVES - 1;
    float per_unit_;
};

// Brings those that are at least as large as the `top_k`-th to the front; returns how many.
inline int64_t keep_k(uint64_t* ranks, int64_t count, int64_t top_k) {
    if (count <= top_k) return count;
    std::nth_element(ranks, ranks + top_k - 1, ranks + count, std::greater<uint64_t>());
    const float least = value_of(ranks[top_k - 1]);
    return std::partition(ranks + top_k, ranks + count, [&](uint64_t rank) { return value_of(rank) == least; }) -
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

// Brings those that top-p keeps of the first `count` to the front; returns how many, or -1 if that hangs
// on a rounding. `mass` is that of all from which it keeps some.
inline int64_t keep_p(uint64_t* ranks, int64_t count, double top_p, double mass) {
    const double limit = top_p * mass, margin = MARGIN * mass;
    const Shelves shelves(lowest_of(ranks, count));
    double masses[SHELVES] = {};
    for (int64_t i = 0; i < count; ++i) {
        const float value = value_of(ranks[i]);
        masses[shelves.of(value)] += double(exp_of_negative(value));
    }
    double before = 0;
    int shelf = 0;
    while (shelf < SHELVES - 1 && before + masses[shelf] < limit) before += masses[shelf++];
    if (before > 0 && limit - before <= margin) return -1;
    uint64_t* const end = ranks + count;
    uint64_t* const here =
        std::partition(ranks, end, [&](uint64_t rank) { return shelves.of(value_of(rank)) < shelf; });
    uint64_t* const beyond =
        std::partition(here, end, [&](uint64_t rank) { return shelves.of(value_of(rank)) == shelf; });
    std::sort(here, beyond, std::greater<uint64_t>());
    for (uint64_t* at = here; at < beyond; ++at) {
        const float value = value_of(*at);
        // Those of one value share one fate.
        if (before > 0 && (at == here || value < value_of(at[-1]))) {
            if (std::fabs(before - limit) <= margin) return -1;
            if (before > limit) return at - ranks;
        }
        before += double(exp_of_negative(value));
    }
    // The next one is on another shelf, if there is one.
    return beyond < end && std::fabs(before - limit) <= margin ? -1 : beyond - ranks;
}

}  // namespace
