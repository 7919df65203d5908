// Noise as a function of a token and a key, and the tokens that may have the largest sum with it.
//
// Law: the hash is that of engine/execution/sampling/gumbel.py, bit for bit. Noise and sums are not those in float32, so
// whoever comes near the largest sum is kept; if these are too many, that is told.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

constexpr int64_t ROOM = 16;  // tokens that are named for a row
constexpr uint32_t UNIFORM_BITS = 23;
// More than the roundings of noise and of sums in float32 where a winner can be, which are below 1e-5.
constexpr double SLACK = 1.0 / 1024;
// Above the noise of any hash, which is 16.6 at most.
constexpr double HIGHEST_NOISE = 17;

inline uint32_t uniform_bits(uint32_t token_id, uint32_t low, uint32_t high) {
    uint32_t mixed = token_id ^ low;
    mixed ^= mixed >> 16;
    mixed *= 0x85EBCA6Bu;
    mixed ^= high;
    mixed ^= mixed >> 13;
    mixed *= 0xC2B2AE35u;
    mixed ^= mixed >> 16;
    return mixed >> (32 - UNIFORM_BITS);
}

inline double noise_of(uint32_t bits) {
    return -std::log(-std::log((bits + 0.5) * (1.0 / (1 << UNIFORM_BITS))));
}

// The least bits of which noise of at least `noise` is made; 2^23 if there are none.
inline uint32_t least_bits(double noise) {
    if (noise > HIGHEST_NOISE) return 1u << UNIFORM_BITS;
    const double share = std::exp(-std::exp(-noise));
    return uint32_t(std::max(std::ceil(share * (1 << UNIFORM_BITS) - 0.5), 0.0));
}

// A token that may win; `value` is its logit, shifted and divided.
struct Found {
    double sum;
    float value;
    int64_t place;
};

// The tokens that may win, as far as they have been looked at.
class Contenders {
  public:
    explicit Contenders(double reached) : reached_(reached) {}

    void add(float value, int64_t place, uint32_t bits) {
        const double sum = value + noise_of(bits);
        if (!(sum >= reached_ - SLACK)) return;
        reached_ = std::max(reached_, sum);
        if (count_ == ROOM) drop_the_passed();
        if (count_ < ROOM)
            found_[count_++] = {sum, value, place};
        else
            are_too_many_ = true;
    }

    // What noise a token of this value must have at least.
    double missing(float value) const { return reached_ - SLACK - value; }

    // Returns how many there are, or -1 if there were too many.
    int64_t write(int64_t* places, float* values) {
        drop_the_passed();
        for (int64_t i = 0; i < count_; ++i) {
            places[i] = found_[i].place;
            values[i] = found_[i].value;
        }
        return are_too_many_ ? -1 : count_;
    }

  private:
    void drop_the_passed() {
        const double least = reached_ - SLACK;
        count_ = std::remove_if(found_, found_ + count_, [&](const Found& one) { return one.sum < least; }) -
                 found_;
    }

    double reached_;
    Found found_[ROOM];
    int64_t count_ = 0;
    bool are_too_many_ = false;
};

}  // namespace
