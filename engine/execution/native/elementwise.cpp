// What stands between the products of a layer: the norm of a row, and a gate's activation times its mate.
//
// Law: the bits of a row follow from that row alone. Numbers are rounded to the tensors' type where the modules
// of transformers round them, and nowhere else.
//
// The interface is plain C, as that of attention.cpp.

#include <cmath>

#include "elements.h"
#include "team.h"

extern "C" {

// y = x / sqrt(mean(x^2) + epsilon) * scale
struct TokenmillNorm {
    const float* scale;  // [size]
    int64_t size;
    RunTeam run_team;
    float epsilon;
    int32_t rounds_first;  // the normalised row is rounded before it is multiplied with `scale`
};

// y = activation(gate) * up
struct TokenmillGate {
    RunTeam run_team;
    int64_t activation;  // 0: silu, 1: gelu by tanh, 2: gelu by erf
};
}

namespace {

constexpr int SUMS = 4;

template <typename T>
float mean_of_squares(const T* row, int64_t size) {
    Floats sums[SUMS] = {};
    int64_t i = 0;
    for (; i + SUMS * LANES <= size; i += SUMS * LANES)
        for (int s = 0; s < SUMS; s++) {
            Floats x = load(row + i + s * LANES);
            sums[s] += x * x;
        }
    for (; i < size; i += LANES) {
        Floats x = i + LANES <= size ? load(row + i) : load_part(row + i, size - i);
        sums[0] += x * x;
    }
    return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3])) / float(size);
}

// Compiled once for all who call it, as a product and a sum become one operation by the compiler's choice.
template <typename T>
__attribute__((noinline)) void norm_row(const TokenmillNorm& norm, const T* row, T* out) {
    const float factor = 1.0f / std::sqrt(mean_of_squares(row, norm.size) + norm.epsilon);
    auto weigh = [&](Floats x, Floats scale) {
        x = x * factor;
        return (norm.rounds_first ? rounded<T>(x) : x) * scale;
    };
    int64_t i = 0, size = norm.size;
    for (; i + LANES <= size; i += LANES) store(out + i, weigh(load(row + i), load(norm.scale + i)));
    if (i < size)
        store_part(out + i, weigh(load_part(row + i, size - i), load_part(norm.scale + i, size - i)), size - i);
}

template <typename T>
void norm_rows(const TokenmillNorm& norm, const void* x, void* out, int64_t outer, int64_t inner,
               int64_t outer_stride, int64_t inner_stride, int64_t threads) {
    for_each_row(norm.run_team, threads, outer * inner, norm.size, [&](int64_t row) {
        norm_row(norm,
                 static_cast<const T*>(x) + row / inner * outer_stride + row % inner * inner_stride,
                 static_cast<T*>(out) + row * norm.size);
    });
}

template <typename T, Floats (*activation)(Floats)>
__attribute__((noinline)) void gate_row(const T* gate, const T* up, T* out, int64_t size) {
    auto pass = [](const T* gate, const T* up, T* out) {
        Floats gates[VECTORS<T>], ups[VECTORS<T>];
        load_all(gate, gates);
        load_all(up, ups);
        for (int v = 0; v < VECTORS<T>; v++) gates[v] = rounded<T>(activation(gates[v])) * ups[v];
        store_all(out, gates);
    };
    int64_t i = 0;
    for (; i + NUMBERS<T> <= size; i += NUMBERS<T>) pass(gate + i, up + i, out + i);
    if (i == size) return;
    const size_t rest = size_t(size - i) * sizeof(T);
    T gates[NUMBERS<T>] = {}, ups[NUMBERS<T>] = {}, outs[NUMBERS<T>];
    std::memcpy(gates, gate + i, rest);
    std::memcpy(ups, up + i, rest);
    pass(gates, ups, outs);
    std::memcpy(out + i, outs, rest);
}

template <typename T>
void gate_rows(const TokenmillGate& about, const void* gate, const void* up, void* out, int64_t rows,
               int64_t size, int64_t gate_stride, int64_t up_stride, int64_t threads) {
    auto one = about.activation == 0   ? gate_row<T, silu>
               : about.activation == 1 ? gate_row<T, gelu_by_tanh>
                                       : gate_row<T, gelu_by_erf>;
    for_each_row(about.run_team, threads, rows, size, [&](int64_t row) {
        one(static_cast<const T*>(gate) + row * gate_stride, static_cast<const T*>(up) + row * up_stride,
            static_cast<T*>(out) + row * size, size);
    });
}

}  // namespace

extern "C" {

// x [outer, inner, size] with strides that count numbers; out the same, contiguous.
void tokenmill_norm_float32(const TokenmillNorm* norm, const void* x, void* out, int64_t outer, int64_t inner,
                            int64_t outer_stride, int64_t inner_stride, int64_t threads) {
    norm_rows<float>(*norm, x, out, outer, inner, outer_stride, inner_stride, threads);
}
void tokenmill_norm_bfloat16(const TokenmillNorm* norm, const void* x, void* out, int64_t outer, int64_t inner,
                             int64_t outer_stride, int64_t inner_stride, int64_t threads) {
    norm_rows<BFloat16>(*norm, x, out, outer, inner, outer_stride, inner_stride, threads);
}

// gate and up [rows, size] with strides that count numbers; out [rows, size], contiguous.
void tokenmill_gate_float32(const TokenmillGate* about, const void* gate, const void* up, void* out,
                            int64_t rows, int64_t size, int64_t gate_stride, int64_t up_stride,
                            int64_t threads) {
    gate_rows<float>(*about, gate, up, out, rows, size, gate_stride, up_stride, threads);
}
void tokenmill_gate_bfloat16(const TokenmillGate* about, const void* gate, const void* up, void* out,
                             int64_t rows, int64_t size, int64_t gate_stride, int64_t up_stride,
                             int64_t threads) {
    gate_rows<BFloat16>(*about, gate, up, out, rows, size, gate_stride, up_stride, threads);
}
}
