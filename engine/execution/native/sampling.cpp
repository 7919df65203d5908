// Draws from whole vocabularies: each row's largest logit, and the few tokens that may win its draw.
//
// Law: the winner by engine/execution/sampling/draw.py, and whoever equals it, is among the tokens that are named; where
// that hangs on a rounding, none is named, and the caller asks that file. A row's answer depends on that row
// alone, not on the others or on the threads. Differences and quotients are those of torch, bit for bit. Sums
// of exponentials and logarithms are not, and nothing is decided by them but with a margin.

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <new>

#include "contenders.h"
#include "filters.h"
#include "largest.h"
#include "team.h"
#include "vectors.h"

namespace {

constexpr int64_t TILE = 256;  // whose least hash is computed at once
constexpr int64_t FEW = 512;   // kept tokens whose noise is made rather than looked for

// What is asked of a row's draw. As the dtype of engine/execution/sampling/native_draw.py has it.
struct Asked {
    const float* logits;
    int64_t likeliest;  // the place of the largest
    int64_t top_k;      // the width: off
    double top_p;       // 1: off
    float largest, temperature;
    float lowest;  // what lies below, shifted and divided, takes no part
    uint32_t low, high;
};

// A row that is drawn from.
class Row {
  public:
    // `most` has room for a vector and a number for each block, `ranks` for a number for each token.
    Row(const Asked& asked, int64_t width, float* most, uint64_t* ranks)
        : asked_(asked), width_(width), blocks_((width + BLOCK - 1) / BLOCK), most_(most), ranks_(ranks) {}

    // Writes the tokens that may win and their values; returns how many, or -1 if it cannot tell.
    int64_t draw(int64_t* places, float* values) {
        const bool has_k = asked_.top_k < width_, has_p = asked_.top_p < 1;
        const double total = look(has_p && !has_k);
        Contenders contenders(noise_of(bits_of(asked_.likeliest)));
        if (!has_k && !has_p) {
            search(asked_.lowest, contenders);
            return contenders.write(places, values);
        }
        int64_t count = has_k ? collect(reached_by_k(), nullptr) : collect_by_p(total);
        if (has_k) count = keep_k(ranks_, count, asked_.top_k);
        if (has_p && count >= 0)
            count = keep_p(ranks_, count, asked_.top_p, has_k ? mass_of(ranks_, count) : total);
        if (count < 0) return -1;
        const float threshold = std::max(lowest_of(ranks_, count), asked_.lowest);
        if (count > FEW)
            search(threshold, contenders);
        else
            for (int64_t i = 0; i < count; ++i)
                if (value_of(ranks_[i]) >= threshold)
                    contenders.add(value_of(ranks_[i]), index_of(ranks_[i]), bits_of(index_of(ranks_[i])));
        return contenders.write(places, values);
    }

  private:
    // The same in every way of computing: one rounding each.
    Floats scaled(Floats logits) const {
        return (logits - splat(asked_.largest)) / splat(asked_.temperature);
    }
    float scaled(float logit) const { return (logit - asked_.largest) / asked_.temperature; }

    uint32_t bits_of(int64_t place) const { return uniform_bits(uint32_t(place), asked_.low, asked_.high); }

    // Goes through the row once: the largest of each lane of each block, and, if wanted, the row's mass.
    double look(bool is_mass_wanted) {
        float padded[BLOCK];
        double sums[LANES] = {};
        for (int64_t block = 0; block < blocks_; ++block) {
            const float* from = block_of(asked_.logits, width_, block * BLOCK, padded);
            store(most_ + block * LANES, largest_of_each_lane(from));
            if (!is_mass_wanted) continue;
            Floats weights[VECTORS];
            for (int i = 0; i < VECTORS; ++i)
                weights[i] = exp_of_negative(scaled(load(from + i * LANES)));
            for (int half = VECTORS / 2; half > 0; half /= 2)
                for (int i = 0; i < half; ++i) weights[i] = weights[i] + weights[i + half];
            for (int i = 0; i < LANES; ++i) sums[i] += double(weights[0][i]);
        }
        double sum = 0;
        for (double one : sums) sum += one;
        return sum;
    }

    // Ranks at least all that top-p keeps of the whole row; returns how many, or -1 if it cannot tell.
    int64_t collect_by_p(double total) {
        const double left_out = total * (1 - asked_.top_p), enough = total * (asked_.top_p + MARGIN);
        // What is below this is at most half of what is left out, if there are `most` of them; mostly there are
        // far fewer.
        for (double most : {0.01, 0.1, 1.0}) {
            double mass = 0;
            const int64_t count = collect(float(std::log(left_out / (2 * most * double(width_)))), &mass);
            if (mass > enough) return count;
        }
        return -1;
    }

    // A value that at least `top_k` of the row reach, from the largest of its blocks.
    float reached_by_k() {
        if (asked_.top_k > blocks_) return NEGATIVE_INFINITY;
        float* maxima = most_ + blocks_ * LANES;
        for (int64_t block = 0; block < blocks_; ++block) maxima[block] = largest_of(load(most_ + block * LANES));
        std::nth_element(maxima, maxima + asked_.top_k - 1, maxima + blocks_, std::greater<float>());
        return scaled(maxima[asked_.top_k - 1]);
    }

    // Ranks all that are at least `bound` and not -inf; returns how many. `mass`, if wanted, is theirs.
    int64_t collect(float bound, double* mass) {
        bound = std::max(bound, std::numeric_limits<float>::lowest());
        float padded[BLOCK];
        int64_t count = 0;
        for (int64_t block = 0; block < blocks_; ++block) {
            if (!any(scaled(load(most_ + block * LANES)) >= splat(bound))) continue;
            const int64_t start = block * BLOCK;
            const float* from = block_of(asked_.logits, width_, start, padded);
            for (int64_t i = 0; i < BLOCK; i += LANES) {
                const Floats values = scaled(load(from + i));
                const Integers reaches = values >= splat(bound);
                if (!any(reaches)) continue;
                if (mass) *mass += double(sum_of(reaches ? exp_of_negative(values) : Floats{}));
                const int64_t last = std::min<int64_t>(LANES, width_ - start - i);
                // Without a branch that nothing could foretell: what is not wanted is written over.
                for (int64_t lane = 0; lane < last && count < width_; ++lane) {
                    ranks_[count] = ranked(values[lane], start + i + lane);
                    count += values[lane] >= bound;
                }
            }
        }
        return count;
    }

    // Adds those that may win of all that are at least `lowest`: noise rises with the integer that it is made
    // of, so it is made for those alone whose integer suffices.
    void search(float lowest, Contenders& contenders) const {
        const int64_t best = asked_.likeliest / TILE;
        // First where much is reached.
        search_tile(best, lowest, contenders);
        for (int64_t tile = 0; tile * TILE < width_; ++tile)
            if (tile != best) search_tile(tile, lowest, contenders);
    }

    void search_tile(int64_t tile, float lowest, Contenders& contenders) const {
        const int64_t first = tile * (TILE / BLOCK), last = std::min(first + TILE / BLOCK, blocks_);
        Floats most = load(most_ + first * LANES);
        for (int64_t block = first + 1; block < last; ++block) most = larger(load(most_ + block * LANES), most);
        const float largest = scaled(largest_of(most));
        if (largest < lowest) return;
        const uint32_t least = least_bits(contenders.missing(largest));
        if (least >> UNIFORM_BITS) return;
        for (int64_t block = first; block < last; ++block) search_block(block, lowest, least, contenders);
    }

    void search_block(int64_t block, float lowest, uint32_t least, Contenders& contenders) const {
        const int64_t start = block * BLOCK;
        uint32_t bits[BLOCK], greatest = 0;
        for (int64_t i = 0; i < BLOCK; ++i) {
            bits[i] = bits_of(start + i);
            greatest = std::max(greatest, bits[i]);
        }
        if (greatest < least) return;
        for (int64_t i = 0; i < std::min(BLOCK, width_ - start); ++i) {
            if (bits[i] < least) continue;
            const float value = scaled(asked_.logits[start + i]);
            if (value >= lowest) contenders.add(value, start + i, bits[i]);
        }
    }

    const Asked& asked_;
    const int64_t width_, blocks_;
    float* most_;
    uint64_t* ranks_;
};

int64_t draw_row(const Asked& asked, int64_t width, int64_t* places, float* values) {
    // Of a row that has no largest, any will do: the caller knows it.
    if (!std::isfinite(asked.largest)) {
        places[0] = asked.likeliest;
        return 1;
    }
    const int64_t blocks = (width + BLOCK - 1) / BLOCK;
    std::unique_ptr<float[]> most(new (std::nothrow) float[size_t(blocks * (LANES + 1))]);
    std::unique_ptr<uint64_t[]> ranks(new (std::nothrow) uint64_t[size_t(width)]);
    if (!most || !ranks) return -1;
    return Row(asked, width, most.get(), ranks.get()).draw(places, values);
}

}  // namespace

extern "C" {

// The largest of each row of `rows` [num_rows][width], and its first place; NaN is the largest of all.
void tokenmill_first_largest(const float* rows, int64_t num_rows, int64_t width, float* values, int64_t* places,
                             int64_t threads, RunTeam run_team) {
    for_each(Team{run_team, threads}, num_rows,
             [&](int64_t row) { first_largest(rows + row * width, width, values + row, places + row); });
}

// Of each row the tokens that may win its draw, [num_rows][ROOM] in any order, and their logits, shifted and
// divided. `counts` [num_rows]: how many, or -1 if another way must be asked.
void tokenmill_draw(const Asked* asked, int64_t num_rows, int64_t width, int64_t* places, float* values,
                    int64_t* counts, int64_t threads, RunTeam run_team) {
    for_each(Team{run_team, threads}, num_rows, [&](int64_t row) {
        counts[row] = draw_row(asked[row], width, places + row * ROOM, values + row * ROOM);
    });
}
}
