// Loads and stores rows of float32 or bfloat16 as vectors of float32, and the activations of gates. NaN propagates.
#pragma once

#include "vectors.h"

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

}  // namespace
