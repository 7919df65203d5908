// A small matrix of float32 times panels sixteen wide, float32 or bfloat16, added to given numbers.
//
// Law: a sum is formed in the order of its index, one product after the other, whatever stands in other rows
// and columns and however many there are. So the bits of a row do not depend on its mates.
#pragma once

#include "vectors.h"

namespace {

constexpr int MOST_ROWS = 6;
constexpr int MOST_COLUMNS = 4;

// Columns of sixteen that are computed together, so that the sums fill the registers and none waits.
constexpr int columns_beside(int rows) {
    int columns = MOST_SUMS / (rows * PARTS);
    return columns < 1 ? 1 : columns > MOST_COLUMNS ? MOST_COLUMNS : columns;
}

// left [rows, depth] of a row stride. right: `segments` runs of sixteen wide rows, each but the last of
// `run` rows; panels[segment * MOST_COLUMNS + column] is where one begins. begin, out [rows, columns * 16]: what
// the sums begin with, of a row stride that may be 0, and where they go, which may be the same place.
template <typename T>
struct Product {
    const float* left;
    int64_t left_stride;
    const T* const* panels;
    int64_t depth;
    int64_t run;
    const float* begin;
    int64_t begin_stride;
    float* out;
    int64_t out_stride;
};

// What sums begin with where nothing is added to: of a row stride of 0.
alignas(64) constexpr float ZEROS[MOST_COLUMNS * SIXTEEN] = {};

// What a loop asks the memory for while it computes: nothing.
struct Nothing {
    template <int COLUMNS>
    void fetch(int64_t) const {}
};

// Or, for each column, what lies from `from` on: `step` bytes for each number of the depth.
struct Ahead {
    const char* from;
    int64_t column_bytes;
    int64_t step;

    template <int COLUMNS>
    void fetch(int64_t depth) const {
        for (int c = 0; c < COLUMNS; c++)
            __builtin_prefetch(from + c * column_bytes + depth * step, 0, 2);
    }
};

template <int ROWS, int COLUMNS>
using Sums = Floats[ROWS][COLUMNS][PARTS];

template <int ROWS, int COLUMNS, typename Next>
inline void add_run(Sums<ROWS, COLUMNS>& sums, const float* left, int64_t stride, const float* const* panels,
                    int64_t at, int64_t depth, const Next& next) {
    const float* columns[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) columns[c] = panels[c];
#pragma GCC unroll 2
    for (int64_t k = 0; k < depth; k++) {
        next.template fetch<COLUMNS>(at + k);
        Floats right[COLUMNS][PARTS];
        for (int c = 0; c < COLUMNS; c++)
            for (int p = 0; p < PARTS; p++) right[c][p] = load(columns[c] + k * SIXTEEN + p * LANES);
        for (int r = 0; r < ROWS; r++) {
            Floats one = splat(left[r * stride + k]);
            for (int c = 0; c < COLUMNS; c++)
                for (int p = 0; p < PARTS; p++) sums[r][c][p] += one * right[c][p];
        }
    }
}

template <int ROWS, int COLUMNS, typename Next>
inline void add_run(Sums<ROWS, COLUMNS>& sums, const float* left, int64_t stride,
                    const BFloat16* const* panels, int64_t at, int64_t depth, const Next& next) {
    const BFloat16* columns[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) columns[c] = panels[c];
    auto add = [&](int64_t k, bool second) __attribute__((always_inline)) {
        Floats right[COLUMNS][PARTS];
        for (int c = 0; c < COLUMNS; c++)
            for (int p = 0; p < PARTS; p++) {
                Words pair = load_words(columns[c] + (k * SIXTEEN + p * LANES * 2));
                right[c][p] = (Floats)(second ? pair & 0xffff0000u : pair << 16);
            }
        for (int r = 0; r < ROWS; r++) {
            Floats one = splat(left[r * stride + k + second]);
            for (int c = 0; c < COLUMNS; c++)
                for (int p = 0; p < PARTS; p++) sums[r][c][p] += one * right[c][p];
        }
    };
    int64_t k = 0;
    for (; k + 1 < depth; k += 2) {
        next.template fetch<COLUMNS>(at + k);
        add(k, false);
        add(k, true);
    }
    // The other half of the last word may be anything.
    if (k < depth) add(k, false);
}

template <typename T, int ROWS, int COLUMNS, typename Next>
void multiply(const Product<T>& product, const Next& next) {
    Sums<ROWS, COLUMNS> sums;
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++)
            for (int p = 0; p < PARTS; p++)
                sums[r][c][p] = load(product.begin + r * product.begin_stride + c * SIXTEEN + p * LANES);
    const T* const* panels = product.panels;
    for (int64_t at = 0; at < product.depth; at += product.run, panels += MOST_COLUMNS) {
        int64_t left = product.depth - at;
        add_run<ROWS, COLUMNS>(sums, product.left + at, product.left_stride, panels, at,
                               left < product.run ? left : product.run, next);
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++)
            for (int p = 0; p < PARTS; p++)
                store(product.out + r * product.out_stride + c * SIXTEEN + p * LANES, sums[r][c][p]);
}

template <typename T, int ROWS, typename Next>
void multiply_rows(const Product<T>& product, int columns, const Next& next) {
    if (columns == 1)
        multiply<T, ROWS, 1>(product, next);
    else
        multiply<T, ROWS, columns_beside(ROWS)>(product, next);
}

// `rows` at most MOST_ROWS; `columns` 1 or columns_beside(rows).
template <typename T, typename Next = Nothing>
void multiply(const Product<T>& product, int rows, int columns, const Next& next = Next()) {
    switch (rows) {
        case 1: return multiply_rows<T, 1>(product, columns, next);
        case 2: return multiply_rows<T, 2>(product, columns, next);
        case 3: return multiply_rows<T, 3>(product, columns, next);
        case 4: return multiply_rows<T, 4>(product, columns, next);
        case 5: return multiply_rows<T, 5>(product, columns, next);
        default: return multiply_rows<T, 6>(product, columns, next);
    }
}

}  // namespace
