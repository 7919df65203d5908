// Vectors of float32 as wide as the registers, and elementary functions of them. NaN propagates.
//
// The code uses the vector types of GCC and Clang, which the compiler flags turn into AVX-512, AVX, SSE or NEON.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
// Accumulators that one loop keeps in registers; the other registers hold operands.
constexpr int MAX_SUMS = 24;
#elif defined(__AVX__)
constexpr int LANES = 8;
constexpr int MAX_SUMS = 12;
#elif defined(__aarch64__)
constexpr int LANES = 4;
constexpr int MAX_SUMS = 24;
#else
constexpr int LANES = 4;
constexpr int MAX_SUMS = 12;
#endif

// Elements of a panel row and tokens of a KV pool group, for every register width.
constexpr int PANEL = 16;
constexpr int PANEL_VECTORS = PANEL / LANES;

typedef float Floats __attribute__((vector_size(LANES * sizeof(float))));
typedef uint32_t Words __attribute__((vector_size(LANES * sizeof(uint32_t))));
typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(int32_t))));

struct BFloat16 {
    uint16_t bits;
};

// Subtracts because adding 0 would turn -0 into 0, so the compiler could not remove it.
inline Floats splat(float value) { return value - Floats{}; }

inline Floats load(const float* from) {
    Floats value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

inline Words load_words(const void* from) {
    Words value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

inline void from_float(float value, float& to) { to = value; }

// To nearest even.
inline void from_float(float value, BFloat16& to) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    to.bits = value == value ? uint16_t(rounded) : uint16_t(0x7fc0);
}

inline Floats larger(Floats left, Floats right) { return left > right ? left : right; }

inline float largest_of(Floats value) {
    float lanes[LANES];
    std::memcpy(lanes, &value, sizeof lanes);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] = lanes[i + width] > lanes[i] ? lanes[i + width] : lanes[i];
    return lanes[0];
}

inline float sum_of(Floats value) {
    float lanes[LANES];
    std::memcpy(lanes, &value, sizeof lanes);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

// exp(x) for x <= 0 to 2 ulp; 0 below -87, where float32 becomes subnormal.
// Cody and Waite's reduction by ln 2 in two parts, and the polynomial of Cephes' expf.
inline Floats exp_of_negative(Floats x) {
    // Adding 1.5 * 2^23 rounds to an integer, in the lowest bits.
    const Floats shifter = splat(12582912.0f);
    Floats shifted = x * 1.44269504088896341f + shifter;
    Words exponent = (Words)shifted << 23;
    Floats n = shifted - shifter;
    Floats r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    Floats y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + (r + 1.0f);
    Floats power = (Floats)(exponent + (127u << 23));
    return x < splat(-87.0f) ? Floats{} : y * power;
}

inline float exp_of_negative(float x) { return exp_of_negative(splat(x))[0]; }

// Near 0 by the polynomial of Cephes' tanhf, as 1 - exp cancels there.
inline Floats tanh_of(Floats x) {
    Floats size = x < Floats{} ? -x : x;
    Floats t = exp_of_negative(size * -2.0f);
    Floats far = (1.0f - t) / (1.0f + t);
    Floats z = x * x;
    Floats y = splat(-5.70498872745e-3f);
    y = y * z + 2.06390887954e-2f;
    y = y * z - 5.37397155531e-2f;
    y = y * z + 1.33314422036e-1f;
    y = y * z - 3.33332819422e-1f;
    Floats near = y * z * x + x;
    return size < splat(0.625f) ? near : x < Floats{} ? -far : far;
}

}  // namespace
