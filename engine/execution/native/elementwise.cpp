// Norms, gated activations and rotary position embeddings of rows.
//
// The bits of a row depend on that row alone. Values are rounded to the tensors' type where transformers' modules
// round them, and nowhere else; rotations equal torch's bit for bit. All strides count elements.

#include <cmath>

#include "team.h"
#include "vectors.h"

extern "C" {

// y = x / sqrt(mean(x^2) + epsilon) * scale
struct TokenmillNorm {
    const float* scale;  // [size]
    int64_t size;
    RunTeam run_team;
    float epsilon;
    int32_t rounds_first;  // the normalised row is rounded before it is multiplied by `scale`
};

// y = activation(gate) * up
struct TokenmillGate {
    RunTeam run_team;
    int64_t activation;  // 0: silu, 1: gelu by tanh, 2: gelu by erf
};

// x * cosine + cat(-x2, x1) * sine, where x1 and x2 are the halves of x. The elements of a head are adjacent.
struct TokenmillRotary {
    const void* query;   // [rows, heads, size]
    const void* key;     // [rows, kv heads, size]
    const void* cosine;  // [rows, size]
    const void* sine;    // [rows, size]
    void* out;           // [rows, heads + kv heads, size], contiguous
    int64_t query_strides[2];
    int64_t key_strides[2];
    int64_t angle_strides[2];  // of the rows of cosine and of sine
    int64_t num_rows;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t size;  // even
    int64_t threads;
    RunTeam run_team;
};
}

namespace {

typedef uint16_t Halves __attribute__((vector_size(LANES * sizeof(uint16_t))));

inline Floats load(const BFloat16* from) {
    Halves bits;
    std::memcpy(&bits, from, sizeof bits);
    return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

// Rounds to bfloat16, to nearest even; the caller drops the lower halves. NaN is kept: the lower half of one that
// came from bfloat16 or from arithmetic is 0, so nothing carries.
inline Words rounded_bits(Floats value) {
    Words bits = (Words)value;
    return bits + 0x7fffu + ((bits >> 16) & 1u);
}

inline void store(BFloat16* to, Floats value) {
    Halves halves = __builtin_convertvector(rounded_bits(value) >> 16, Halves);
    std::memcpy(to, &halves, sizeof halves);
}

// The value after a store as T and a load.
template <typename T>
inline Floats rounded(Floats value) {
    return (Floats)(rounded_bits(value) & 0xffff0000u);
}

template <>
inline Floats rounded<float>(Floats value) {
    return value;
}

// A register of T as vectors of float32: one, or for bfloat16 two, of the even and the odd elements, which a shift
// and a mask extract without a permutation.
template <typename T>
constexpr int VECTORS = int(sizeof(float) / sizeof(T));
template <typename T>
constexpr int ELEMENTS = VECTORS<T> * LANES;

inline void load_all(const float* from, Floats* to) { to[0] = load(from); }

inline void load_all(const BFloat16* from, Floats* to) {
    Words pairs = load_words(from);
    to[0] = (Floats)(pairs << 16);
    to[1] = (Floats)(pairs & 0xffff0000u);
}

inline void store_all(float* to, const Floats* from) { store(to, from[0]); }

inline void store_all(BFloat16* to, const Floats* from) {
    Words pairs = (rounded_bits(from[0]) >> 16) | (rounded_bits(from[1]) & 0xffff0000u);
    std::memcpy(to, &pairs, sizeof pairs);
}

// The last elements of a row, padded with zeros.
template <typename T>
inline Floats load_part(const T* from, int64_t count) {
    T values[LANES] = {};
    std::memcpy(values, from, size_t(count) * sizeof(T));
    return load(values);
}

template <typename T>
inline void store_part(T* to, Floats value, int64_t count) {
    T values[LANES];
    store(values, value);
    std::memcpy(to, values, size_t(count) * sizeof(T));
}

inline Floats absolute(Floats x) { return x < Floats{} ? -x : x; }

// x / (1 + exp(-x)) without overflow; 0 below -87.
inline Floats silu(Floats x) {
    Floats e = exp_of_negative(-absolute(x));
    return (x < Floats{} ? x * e : x) / (1.0f + e);
}

inline Floats gelu_tanh(Floats x) {
    Floats inner = (x + x * x * x * 0.044715f) * 0.79788456080286535588f;
    return x * 0.5f * (1.0f + tanh_of(inner));
}

// erf to 1.5e-7: formula 7.1.26 of Abramowitz and Stegun, Handbook of Mathematical Functions.
inline Floats erf_of(Floats x) {
    Floats size = absolute(x);
    Floats t = 1.0f / (1.0f + size * 0.3275911f);
    Floats y = splat(1.061405429f);
    y = y * t - 1.453152027f;
    y = y * t + 1.421413741f;
    y = y * t - 0.284496736f;
    y = y * t + 0.254829592f;
    Floats result = 1.0f - y * t * exp_of_negative(-size * size);
    return x < Floats{} ? -result : result;
}

inline Floats gelu_erf(Floats x) { return x * 0.5f * (1.0f + erf_of(x * 0.70710678118654752440f)); }

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

// Not inlined: the compiler may contract products and sums differently in each copy.
template <typename T>
__attribute__((noinline)) void norm_row(const TokenmillNorm& norm, const T* row, T* out) {
    const float factor = 1.0f / std::sqrt(mean_of_squares(row, norm.size) + norm.epsilon);
    auto scaled = [&](Floats x, Floats scale) {
        x = x * factor;
        return (norm.rounds_first ? rounded<T>(x) : x) * scale;
    };
    int64_t i = 0, size = norm.size;
    for (; i + LANES <= size; i += LANES) store(out + i, scaled(load(row + i), load(norm.scale + i)));
    if (i < size)
        store_part(out + i, scaled(load_part(row + i, size - i), load_part(norm.scale + i, size - i)), size - i);
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
    for (; i + ELEMENTS<T> <= size; i += ELEMENTS<T>) pass(gate + i, up + i, out + i);
    if (i == size) return;
    const size_t rest = size_t(size - i) * sizeof(T);
    T gates[ELEMENTS<T>] = {}, ups[ELEMENTS<T>] = {}, outs[ELEMENTS<T>];
    std::memcpy(gates, gate + i, rest);
    std::memcpy(ups, up + i, rest);
    pass(gates, ups, outs);
    std::memcpy(out + i, outs, rest);
}

template <typename T>
void gate_rows(const TokenmillGate& config, const void* gate, const void* up, void* out, int64_t rows,
               int64_t size, int64_t gate_stride, int64_t up_stride, int64_t threads) {
    auto one = config.activation == 0   ? gate_row<T, silu>
               : config.activation == 1 ? gate_row<T, gelu_tanh>
                                        : gate_row<T, gelu_erf>;
    for_each_row(config.run_team, threads, rows, size, [&](int64_t row) {
        one(static_cast<const T*>(gate) + row * gate_stride, static_cast<const T*>(up) + row * up_stride,
            static_cast<T*>(out) + row * size, size);
    });
}

// A rounded product. The compiler must not contract it with the sum that it is part of.
template <typename T>
inline Floats product(Floats left, Floats right) {
    return rounded<T>(left * right);
}

template <>
inline Floats product<float>(Floats left, Floats right) {
    Floats value = left * right;
#if defined(__x86_64__)
    asm("" : "+x"(value));
#elif defined(__aarch64__)
    asm("" : "+w"(value));
#else
    asm("" : "+m"(value));
#endif
    return value;
}

template <typename T>
void rotate_head(const T* x, const T* cosine, const T* sine, T* out, int64_t half) {
    auto rotate = [&](auto&& read, auto&& write, int64_t i) {
        Floats first = read(x + i), second = read(x + half + i);
        write(out + i, product<T>(first, read(cosine + i)) - product<T>(second, read(sine + i)));
        write(out + half + i,
              product<T>(second, read(cosine + half + i)) + product<T>(first, read(sine + half + i)));
    };
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES)
        rotate([](const T* from) { return load(from); }, [](T* to, Floats value) { store(to, value); }, i);
    if (i == half) return;
    const int64_t rest = half - i;
    rotate([&](const T* from) { return load_part(from, rest); },
           [&](T* to, Floats value) { store_part(to, value, rest); }, i);
}

template <typename T>
void rotate_rows(const TokenmillRotary& call) {
    const int64_t heads = call.num_heads + call.num_kv_heads, row_numel = heads * call.size;
    if (call.num_rows * row_numel == 0) return;
    for_each_row(call.run_team, call.threads, call.num_rows, row_numel, [&](int64_t row) {
        const T* cosine = static_cast<const T*>(call.cosine) + row * call.angle_strides[0];
        const T* sine = static_cast<const T*>(call.sine) + row * call.angle_strides[1];
        const T* query = static_cast<const T*>(call.query) + row * call.query_strides[0];
        const T* key = static_cast<const T*>(call.key) + row * call.key_strides[0];
        T* out = static_cast<T*>(call.out) + row * row_numel;
        for (int64_t head = 0; head < call.num_heads; head++, out += call.size)
            rotate_head(query + head * call.query_strides[1], cosine, sine, out, call.size / 2);
        for (int64_t head = 0; head < call.num_kv_heads; head++, out += call.size)
            rotate_head(key + head * call.key_strides[1], cosine, sine, out, call.size / 2);
    });
}

}  // namespace

// The functions for one type. Norm: x [outer, inner, size]; gate and up [rows, size]; out is contiguous.
#define TOKENMILL_ELEMENTWISE(NAME, T)                                                                          \
    void tokenmill_norm_##NAME(const TokenmillNorm* norm, const void* x, void* out, int64_t outer,              \
                               int64_t inner, int64_t outer_stride, int64_t inner_stride, int64_t threads) {    \
        norm_rows<T>(*norm, x, out, outer, inner, outer_stride, inner_stride, threads);                         \
    }                                                                                                           \
    void tokenmill_gate_##NAME(const TokenmillGate* config, const void* gate, const void* up, void* out,        \
                               int64_t rows, int64_t size, int64_t gate_stride, int64_t up_stride,              \
                               int64_t threads) {                                                               \
        gate_rows<T>(*config, gate, up, out, rows, size, gate_stride, up_stride, threads);                      \
    }                                                                                                           \
    void tokenmill_rotate_##NAME(const TokenmillRotary* call) { rotate_rows<T>(*call); }

extern "C" {
TOKENMILL_ELEMENTWISE(float32, float)
TOKENMILL_ELEMENTWISE(bfloat16, BFloat16)
}
