// A small float32 matrix times panels of PANEL columns of float32 or bfloat16, added to initial values.
//
// Each sum adds its products in order of index, so the bits of a row do not depend on the other rows and columns.
#pragma once

#include "vectors.h"

namespace {

constexpr int MAX_ROWS = 6;
constexpr int MAX_COLUMNS = 4;

// Panels that are multiplied together, so that the accumulators fill the registers.
constexpr int columns_beside(int rows) {
    int columns = MAX_SUMS / (rows * PANEL_VECTORS);
    return columns < 1 ? 1 : columns > MAX_COLUMNS ? MAX_COLUMNS : columns;
}

// left [rows, depth]. The right matrix consists of segments of `run` panel rows, the last one shorter;
// panels[segment * MAX_COLUMNS + column] points to one. begin, out [rows, columns * PANEL]: initial values, whose
// stride may be 0, and results; they may be the same memory.
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

// Initial values of sums that start at zero, with a stride of 0.
alignas(64) constexpr float ZEROS[MAX_COLUMNS * PANEL] = {};

// A prefetch policy that fetches nothing.
struct NoPrefetch {
    template <int COLUMNS>
    void fetch(int64_t) const {}
};

// Fetches, for each column, the memory from `from` on: `step` bytes for each row of the depth.
struct Prefetch {
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
using Sums = Floats[ROWS][COLUMNS][PANEL_VECTORS];

// A word of a panel holds one element of float32, or of bfloat16 those of two consecutive depths.
inline Floats element(Words word, const float*, bool) { return (Floats)word; }
inline Floats element(Words pair, const BFloat16*, bool second) {
    return (Floats)(second ? pair & 0xffff0000u : pair << 16);
}

template <typename T, int ROWS, int COLUMNS, typename Next>
inline void add_run(Sums<ROWS, COLUMNS>& sums, const float* left, int64_t stride, const T* const* panels,
                    int64_t at, int64_t depth, const Next& next) {
    constexpr int PER_WORD = int(sizeof(float) / sizeof(T));
    const T* columns[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) columns[c] = panels[c];
    auto add = [&](int64_t k, bool second) __attribute__((always_inline)) {
        Floats right[COLUMNS][PANEL_VECTORS];
        for (int c = 0; c < COLUMNS; c++)
            for (int p = 0; p < PANEL_VECTORS; p++)
                right[c][p] =
                    element(load_words(columns[c] + (k * PANEL + p * LANES * PER_WORD)), columns[c], second);
        for (int r = 0; r < ROWS; r++) {
            Floats one = splat(left[r * stride + k + second]);
            for (int c = 0; c < COLUMNS; c++)
                for (int p = 0; p < PANEL_VECTORS; p++) sums[r][c][p] += one * right[c][p];
        }
    };
    int64_t k = 0;
    for (; k + 1 < depth; k += 2) {
        next.template fetch<COLUMNS>(at + k);
        add(k, false);
        if (PER_WORD == 1) next.template fetch<COLUMNS>(at + k + 1);
        PER_WORD == 1 ? add(k + 1, false) : add(k, true);
    }
    // The other half of the last word is undefined.
    if (k < depth) add(k, false);
}

template <typename T, int ROWS, int COLUMNS, typename Next>
void multiply(const Product<T>& product, const Next& next) {
    Sums<ROWS, COLUMNS> sums;
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++)
            for (int p = 0; p < PANEL_VECTORS; p++)
                sums[r][c][p] = load(product.begin + r * product.begin_stride + c * PANEL + p * LANES);
    const T* const* panels = product.panels;
    for (int64_t at = 0; at < product.depth; at += product.run, panels += MAX_COLUMNS) {
        int64_t left = product.depth - at;
        add_run<T, ROWS, COLUMNS>(sums, product.left + at, product.left_stride, panels, at,
                               left < product.run ? left : product.run, next);
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++)
            for (int p = 0; p < PANEL_VECTORS; p++)
                store(product.out + r * product.out_stride + c * PANEL + p * LANES, sums[r][c][p]);
}

template <typename T, int ROWS, typename Next>
void multiply_rows(const Product<T>& product, int columns, const Next& next) {
    if (columns == 1)
        multiply<T, ROWS, 1>(product, next);
    else
        multiply<T, ROWS, columns_beside(ROWS)>(product, next);
}

// `rows` at most MAX_ROWS; `columns` 1 or columns_beside(rows).
template <typename T, typename Next = NoPrefetch>
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
