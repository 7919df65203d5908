// Searches of whole vocabularies: the largest logits of a row, and the tokens whose noise may win a draw.
//
// Law: what is found is exact, and comparisons and integers are all there is, so that it is the same as
// torch's search would find; a row's answer does not depend on the others or on the threads. The hash is that
// of engine/execution/gumbel.py, bit for bit.

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <new>

#include "team.h"

namespace {

constexpr int64_t TILE = 256;  // as in engine/execution/largest.py
constexpr int64_t BLOCK = 64;  // values that are looked at one by one only if one of them is wanted
constexpr int64_t HEIGHT = 16;
constexpr uint32_t UNIFORM_BITS = 23;

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

// A value and its place as one integer: larger values first, of equal ones the first.
inline uint64_t ranked(float value, int64_t place) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return uint64_t(bits) << 32 | uint32_t(~place);
}

inline int64_t place_of(uint64_t rank) { return int64_t(uint32_t(~uint32_t(rank))); }

// A value that at least `number` of the row reach, from the largest of values that stand apart.
float reached_by(const float* row, int64_t width, int64_t number, float* maxima) {
    const int64_t tiles = width / HEIGHT;
    if (tiles < number) return -std::numeric_limits<float>::infinity();
    std::copy(row, row + tiles, maxima);
    for (int64_t above = 1; above < HEIGHT; ++above)
        for (int64_t i = 0; i < tiles; ++i)
            // NaN is not larger, and what is NaN already is replaced: nothing could be put in order with it.
            maxima[i] = row[above * tiles + i] > maxima[i] || maxima[i] != maxima[i] ? row[above * tiles + i]
                                                                                      : maxima[i];
    for (int64_t i = 0; i < tiles; ++i)
        if (maxima[i] != maxima[i]) maxima[i] = -std::numeric_limits<float>::infinity();
    std::nth_element(maxima, maxima + number - 1, maxima + tiles, std::greater<float>());
    return maxima[number - 1];
}

// The ranks of all that are at least `bound`; returns how many.
int64_t rank_those_above(const float* row, int64_t width, float bound, uint64_t* ranks) {
    int64_t found = 0;
    for (int64_t start = 0; start < width; start += BLOCK) {
        const int64_t end = std::min(start + BLOCK, width);
        int reaches = 0;
        for (int64_t i = start; i < end; ++i) reaches |= row[i] >= bound;
        if (!reaches) continue;
        for (int64_t i = start; i < end; ++i)
            if (row[i] >= bound) ranks[found++] = ranked(row[i], i);
    }
    return found;
}

void find_largest(const float* row, int64_t width, int64_t number, float* values, int64_t* places,
                  float* maxima, uint64_t* ranks) {
    const float bound = reached_by(row, width, number, maxima);
    int64_t found = rank_those_above(row, width, bound, ranks);
    const std::greater<uint64_t> first{};
    if (found > number) std::nth_element(ranks, ranks + number, ranks + found, first);
    found = std::min(found, number);
    std::sort(ranks, ranks + found, first);
    for (int64_t i = 0; i < number; ++i) {
        // In a row with NaN there may be too few.
        places[i] = i < found ? place_of(ranks[i]) : 0;
        values[i] = i < found ? row[places[i]] : -std::numeric_limits<float>::infinity();
    }
}

}  // namespace

extern "C" {

// Of `rows` [num_rows][width] the `number` largest of each row in descending order, of equal ones the first;
// `number` is at most `width`. NaN is passed over. Returns 1 if there is no memory.
int tokenmill_largest(const float* rows, int64_t num_rows, int64_t width, int64_t number, float* values,
                      int64_t* places, int64_t threads, RunTeam run_team) {
    std::atomic<int> failed{0};
    for_each(Team{run_team, threads}, num_rows, [&](int64_t row) {
        std::unique_ptr<float[]> maxima(new (std::nothrow) float[size_t(width / HEIGHT + 1)]);
        std::unique_ptr<uint64_t[]> ranks(new (std::nothrow) uint64_t[size_t(width)]);
        if (maxima && ranks)
            find_largest(rows + row * width, width, number, values + row * number, places + row * number,
                         maxima.get(), ranks.get());
        else
            failed = 1;
    });
    return failed;
}

// `keys` [num_rows][2], `least` [num_rows][tiles]: what the hash of a token of that tile must reach; 2^23 is
// out of reach. Writes the places of those that do, [num_rows * tiles * TILE] taken as one row, in order, as
// far as `places` has room. Returns how many there are.
int64_t tokenmill_pass_by_hash(const uint32_t* keys, const uint32_t* least, int64_t num_rows, int64_t tiles,
                               int64_t* places, int64_t room) {
    int64_t found = 0;
    for (int64_t tile = 0; tile < num_rows * tiles; ++tile) {
        const uint32_t bound = least[tile];
        if (bound >> UNIFORM_BITS) continue;
        const uint32_t* key = keys + tile / tiles * 2;
        for (int64_t start = 0; start < TILE; start += BLOCK) {
            const uint32_t first = uint32_t(tile % tiles * TILE + start);
            uint32_t bits[BLOCK];
            uint32_t greatest = 0;
            for (int64_t i = 0; i < BLOCK; ++i) {
                bits[i] = uniform_bits(first + uint32_t(i), key[0], key[1]);
                greatest = std::max(greatest, bits[i]);
            }
            if (greatest < bound) continue;
            for (int64_t i = 0; i < BLOCK; ++i) {
                if (bits[i] < bound) continue;
                if (found < room) places[found] = tile * TILE + start + i;
                ++found;
            }
        }
    }
    return found;
}
}
