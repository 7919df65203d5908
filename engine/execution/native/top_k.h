// The largest value of a row, searched by blocks. Of equal values the first; NaN is larger than all, as in torch.
#pragma once

#include <algorithm>
#include <limits>

#include "vectors.h"

namespace {

constexpr int64_t BLOCK = 64;
constexpr int VECTORS = int(BLOCK / LANES);
constexpr float NEGATIVE_INFINITY = -std::numeric_limits<float>::infinity();

inline bool any(Integers mask) {
    uint64_t parts[sizeof mask / sizeof(uint64_t)], all = 0;
    std::memcpy(parts, &mask, sizeof mask);
    for (uint64_t part : parts) all |= part;
    return all != 0;
}

// `BLOCK` logits from `start` on. A block beyond the row's end is copied to `padded` and filled with -inf.
inline const float* block_of(const float* row, int64_t width, int64_t start, float* padded) {
    if (start + BLOCK <= width) return row + start;
    std::fill(padded, padded + BLOCK, NEGATIVE_INFINITY);
    std::copy(row + start, row + width, padded);
    return padded;
}

inline Floats largest_of_each_lane(const float* block) {
    Floats largest = load(block);
    for (int i = 1; i < VECTORS; ++i) largest = larger(load(block + i * LANES), largest);
    return largest;
}

void first_largest(const float* row, int64_t width, float* value, int64_t* index) {
    float padded[BLOCK], best = NEGATIVE_INFINITY;
    int64_t block = 0;
    Integers is_nan{};
    for (int64_t start = 0; start < width; start += BLOCK) {
        const float* from = block_of(row, width, start, padded);
        // `larger` may drop NaN.
        for (int i = 0; i < VECTORS; ++i) is_nan |= load(from + i * LANES) != load(from + i * LANES);
        Floats lanes = largest_of_each_lane(from);
        if (!any(lanes > splat(best))) continue;
        best = std::max(best, largest_of(lanes));
        block = start;
    }
    int64_t at = block;
    if (any(is_nan))
        for (at = 0; row[at] == row[at];) ++at;
    else
        while (row[at] != best) ++at;
    *value = row[at];
    *index = at;
}

}  // namespace
