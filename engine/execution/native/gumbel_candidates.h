// Gumbel noise as a function of token and key, and the tokens that may have the largest sum of value and noise.
//
// The hash equals that of engine/execution/sampling/gumbel.py bit for bit. Noise and sums differ from float32, so
// all tokens close to the largest sum are candidates. If they are too many, -1 is returned.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

constexpr int64_t MAX_CANDIDATES = 16;  // of a row
constexpr uint32_t UNIFORM_BITS = 23;
// Exceeds the rounding errors of noise and sums of winners in float32, which are below 1e-5.
constexpr double SLACK = 1.0 / 1024;
// Above the noise of any hash, which is at most 16.6.
constexpr double MAX_NOISE = 17;

inline uint32_t uniform_bits(uint32_t token_id, uint32_t key_low, uint32_t key_high) {
    uint32_t mixed = token_id ^ key_low;
    mixed ^= mixed >> 16;
    mixed *= 0x85EBCA6Bu;
    mixed ^= key_high;
    mixed ^= mixed >> 13;
    mixed *= 0xC2B2AE35u;
    mixed ^= mixed >> 16;
    return mixed >> (32 - UNIFORM_BITS);
}

inline double noise_of(uint32_t bits) {
    return -std::log(-std::log((bits + 0.5) * (1.0 / (1 << UNIFORM_BITS))));
}

// The smallest bits that give at least `noise`; 2^23 if there are none.
inline uint32_t min_bits(double noise) {
    if (noise > MAX_NOISE) return 1u << UNIFORM_BITS;
    const double share = std::exp(-std::exp(-noise));
    return uint32_t(std::max(std::ceil(share * (1 << UNIFORM_BITS) - 0.5), 0.0));
}

// A token that may win; `value`: its logit, shifted and divided by temperature.
struct Candidate {
    double sum;
    float value;
    int64_t token_id;
};

// The tokens that may win among those added so far. `best`: a sum that one of them reaches.
class GumbelCandidates {
  public:
    explicit GumbelCandidates(double best) : best_(best) {}

    void add(float value, int64_t token_id, uint32_t bits) {
        const double sum = value + noise_of(bits);
        if (!(sum >= best_ - SLACK)) return;
        best_ = std::max(best_, sum);
        if (count_ == MAX_CANDIDATES) prune();
        if (count_ < MAX_CANDIDATES)
            candidates_[count_++] = {sum, value, token_id};
        else
            overflowed_ = true;
    }

    // The least noise with which a token of this value may win.
    double required_noise(float value) const { return best_ - SLACK - value; }

    // Returns the number of candidates, or -1 if there were too many.
    int64_t write(int64_t* token_ids, float* values) {
        prune();
        for (int64_t i = 0; i < count_; ++i) {
            token_ids[i] = candidates_[i].token_id;
            values[i] = candidates_[i].value;
        }
        return overflowed_ ? -1 : count_;
    }

  private:
    void prune() {
        const double minimum = best_ - SLACK;
        count_ = std::remove_if(candidates_, candidates_ + count_,
                                [&](const Candidate& one) { return one.sum < minimum; }) -
                 candidates_;
    }

    double best_;
    Candidate candidates_[MAX_CANDIDATES];
    int64_t count_ = 0;
    bool overflowed_ = false;
};

}  // namespace
