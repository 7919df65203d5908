// The maximum of a row and its first index, found by blocks.
//
// NaN counts as the largest, as in torch. The last block is padded with -inf.
#pragma once

#include <algorithm>
#include <limits>

#include "vectors.h"

namespace {

constexpr int64_t BLOCK = 64;
constexpr int VECTORS = int(BLOCK / LANES);
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

inline bool any(Integers mask) {
    uint64_t parts[sizeof mask / sizeof(uint64_t)], all = 0;
    std::memcpy(parts, &mask, sizeof mask);
    for (uint64_t part : parts) all |= part;
    return all != 0;
}

// `BLOCK` logits from `start` on; beyond the row's end they are copied into `padded`.
inline const float* block_of(const float* row, int64_t width, int64_t start, float* padded) {
    if (start + BLOCK <= width) return row + start;
    std::fill(padded, padded + BLOCK, MINUS_INFINITY);
    std::copy(row + start, row + width, padded);
    return padded;
}

inline Floats lane_maxima(const float* block) {
    Floats maxima = load(block);
    for (int i = 1; i < VECTORS; ++i) maxima = larger(load(block + i * LANES), maxima);
    return maxima;
}

void row_max(const float* row, int64_t width, float* value, int64_t* index) {
    float padded[BLOCK], best = MINUS_INFINITY;
    int64_t block = 0;
    Integers is_nan{};
    for (int64_t start = 0; start < width; start += BLOCK) {
        const float* from = block_of(row, width, start, padded);
        // `larger` skips a NaN that is not its first argument.
        for (int i = 0; i < VECTORS; ++i) is_nan |= load(from + i * LANES) != load(from + i * LANES);
        Floats maxima = lane_maxima(from);
        if (!any(maxima > splat(best))) continue;
        best = std::max(best, largest_of(maxima));
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
