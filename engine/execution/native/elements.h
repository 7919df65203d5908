// Rows of float32 or bfloat16 as vectors of float32, and the functions that gates pass through.
//
// Law: what becomes of a number follows from its own row and its column, never from how many rows there are.
// A NaN that goes in comes out. Written for no instruction set, as vectors.h is.
#pragma once

#include "vectors.h"

namespace {

typedef uint16_t Halves __attribute__((vector_size(LANES * sizeof(uint16_t))));

inline Floats load(const BFloat16* from) {
    Halves bits;
    std::memcpy(&bits, from, sizeof bits);
    return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

// To bfloat16, to the nearest and the even one of two; the lower halves hold what is to be cut off. A NaN stays
// one: its lower half is 0, be it from bfloat16 or made by arithmetic, so nothing is carried over.
inline Words rounded_bits(Floats value) {
    Words bits = (Words)value;
    return bits + 0x7fffu + ((bits >> 16) & 1u);
}

inline void store(BFloat16* to, Floats value) {
    Halves halves = __builtin_convertvector(rounded_bits(value) >> 16, Halves);
    std::memcpy(to, &halves, sizeof halves);
}

// What is left of a number that is stored as T and read again.
template <typename T>
inline Floats rounded(Floats value) {
    return (Floats)(rounded_bits(value) & 0xffff0000u);
}

template <>
inline Floats rounded<float>(Floats value) {
    return value;
}

// A register full of T as vectors of float32: one, or of bfloat16 two, the even numbers and the odd ones. So a
// shift and a mask take it apart, and nothing has to cross the register.
template <typename T>
constexpr int VECTORS = int(sizeof(float) / sizeof(T));
template <typename T>
constexpr int NUMBERS = VECTORS<T> * LANES;

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

// The last numbers of a row, with zeros behind them: what lies behind a row is another's.
template <typename T>
inline Floats load_part(const T* from, int64_t count) {
    T numbers[LANES] = {};
    std::memcpy(numbers, from, size_t(count) * sizeof(T));
    return load(numbers);
}

template <typename T>
inline void store_part(T* to, Floats value, int64_t count) {
    T numbers[LANES];
    store(numbers, value);
    std::memcpy(to, numbers, size_t(count) * sizeof(T));
}

inline Floats size_of(Floats x) { return x < Floats{} ? -x : x; }

// x / (1 + exp(-x)), by the exponential that does not overflow; 0 below -87.
inline Floats silu(Floats x) {
    Floats e = exp_of_negative(-size_of(x));
    return (x < Floats{} ? x * e : x) / (1.0f + e);
}

inline Floats gelu_by_tanh(Floats x) {
    Floats inner = (x + x * x * x * 0.044715f) * 0.79788456080286535588f;
    return x * 0.5f * (1.0f + tanh_of(inner));
}

// erf to 1.5e-7 by formula 7.1.26 of Abramowitz and Stegun's Handbook of Mathematical Functions.
inline Floats erf_of(Floats x) {
    Floats size = size_of(x);
    Floats t = 1.0f / (1.0f + size * 0.3275911f);
    Floats y = splat(1.061405429f);
    y = y * t - 1.453152027f;
    y = y * t + 1.421413741f;
    y = y * t - 0.284496736f;
    y = y * t + 0.254829592f;
    Floats result = 1.0f - y * t * exp_of_negative(-size * size);
    return x < Floats{} ? -result : result;
}

inline Floats gelu_by_erf(Floats x) { return x * 0.5f * (1.0f + erf_of(x * 0.70710678118654752440f)); }

}  // namespace
