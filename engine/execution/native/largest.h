// The largest of a row, looked for by blocks: one by one only where one of a block is wanted.
//
// Law: of equal ones it is the first, and NaN is the largest of all, as torch has it. Behind a row's end stands
// -inf, so that no block is short.
#pragma once

#include <algorithm>
#include <limits>

#include "vectors.h"

namespace {

constexpr int64_t BLOCK = 64;
constexpr int VECTORS = int(BLOCK / LANES);
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

inline bool any(Integers mask) {
    uint64_t parts[sizeof mask / sizeof(uint64_t)], all = 0;
    std::memcpy(parts, &mask, sizeof mask);
    for (uint64_t part : parts) all |= part;
    return all != 0;
}

// `BLOCK` logits from `start` on; behind the row's end stands -inf, in `padded`.
inline const float* block_of(const float* row, int64_t width, int64_t start, float* padded) {
    if (start + BLOCK <= width) return row + start;
    std::fill(padded, padded + BLOCK, NOTHING);
    std::copy(row + start, row + width, padded);
    return padded;
}

inline Floats largest_of_each_lane(const float* block) {
    Floats most = load(block);
    for (int i = 1; i < VECTORS; ++i) most = larger(load(block + i * LANES), most);
    return most;
}

void first_largest(const float* row, int64_t width, float* value, int64_t* place) {
    float padded[BLOCK], best = NOTHING;
    int64_t block = 0;
    Integers is_nan{};
    for (int64_t start = 0; start < width; start += BLOCK) {
        const float* from = block_of(row, width, start, padded);
        // One that is NaN is passed over by `larger`, if it is not the first.
        for (int i = 0; i < VECTORS; ++i) is_nan |= load(from + i * LANES) != load(from + i * LANES);
        Floats most = largest_of_each_lane(from);
        if (!any(most > splat(best))) continue;
        best = std::max(best, largest_of(most));
        block = start;
    }
    int64_t at = block;
    if (any(is_nan))
        for (at = 0; row[at] == row[at];) ++at;
    else
        while (row[at] != best) ++at;
    *value = row[at];
    *place = at;
}

}  // namespace
