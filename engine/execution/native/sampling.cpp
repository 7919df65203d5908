// Row maxima, and the candidates of each row's random draw.
//
// The winner by engine/execution/sampling/draw.py, and any token with an equal sum, is among the candidates. If
// that depends on a rounding, the row is undecided and torch draws it. A row's result does not depend on other
// rows or on threads. Differences and quotients equal those of torch bit for bit. Sums of exponentials and
// logarithms do not, and are only compared with a margin.

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <new>

#include "filters.h"
#include "gumbel_candidates.h"
#include "team.h"
#include "top_k.h"
#include "vectors.h"

namespace {

constexpr int64_t TILE = 256;     // tokens that are searched together
constexpr int64_t MAX_KEPT = 512;  // with more kept tokens, their noise is searched rather than computed

// The draw of a row, as DRAW_DTYPE in engine/execution/sampling/native_draw.py.
struct DrawRequest {
    const float* logits;
    int64_t argmax;
    int64_t top_k;  // the width: off
    double top_p;   // 1: off
    float max_logit, temperature;
    float threshold;  // of min-p, on shifted and divided logits
    uint32_t key_low, key_high;
};

// The draw of one row.
class RowDraw {
  public:
    // `maxima`: room for a vector and a number per block. `ranks`: room for a number per token.
    RowDraw(const DrawRequest& request, int64_t width, float* maxima, uint64_t* ranks)
        : request_(request), width_(width), blocks_((width + BLOCK - 1) / BLOCK), maxima_(maxima), ranks_(ranks) {}

    // Writes the candidates and their values; returns their number, or -1 if the row is undecided.
    int64_t draw(int64_t* token_ids, float* values) {
        const bool has_k = request_.top_k < width_, has_p = request_.top_p < 1;
        const double total = scan(has_p && !has_k);
        GumbelCandidates candidates(noise_of(bits_of(request_.argmax)));
        if (!has_k && !has_p) {
            search(request_.threshold, candidates);
            return candidates.write(token_ids, values);
        }
        int64_t count = has_k ? collect(bound_by_k(), nullptr) : collect_by_p(total);
        if (has_k) count = keep_k(ranks_, count, request_.top_k);
        if (has_p && count >= 0)
            count = keep_p(ranks_, count, request_.top_p, has_k ? mass_of(ranks_, count) : total);
        if (count < 0) return -1;
        const float threshold = std::max(lowest_of(ranks_, count), request_.threshold);
        if (count > MAX_KEPT)
            search(threshold, candidates);
        else
            for (int64_t i = 0; i < count; ++i)
                if (value_of(ranks_[i]) >= threshold)
                    candidates.add(value_of(ranks_[i]), index_of(ranks_[i]), bits_of(index_of(ranks_[i])));
        return candidates.write(token_ids, values);
    }

  private:
    // One rounding each, so that scalars and vectors agree.
    Floats scaled(Floats logits) const {
        return (logits - splat(request_.max_logit)) / splat(request_.temperature);
    }
    float scaled(float logit) const { return (logit - request_.max_logit) / request_.temperature; }

    uint32_t bits_of(int64_t token_id) const {
        return uniform_bits(uint32_t(token_id), request_.key_low, request_.key_high);
    }

    // Computes the lane maxima of each block and, if `needs_mass`, returns the row's mass.
    double scan(bool needs_mass) {
        float padded[BLOCK];
        double sums[LANES] = {};
        for (int64_t block = 0; block < blocks_; ++block) {
            const float* from = block_of(request_.logits, width_, block * BLOCK, padded);
            store(maxima_ + block * LANES, lane_maxima(from));
            if (!needs_mass) continue;
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

    // Ranks all tokens that top-p keeps of the whole row, and perhaps more; returns their number, or -1 if the
    // row is undecided.
    int64_t collect_by_p(double total) {
        const double dropped = total * (1 - request_.top_p), enough = total * (request_.top_p + MARGIN);
        // If `share` of all tokens are below the bound, their mass is at most half of the dropped mass. Usually
        // far fewer are.
        for (double share : {0.01, 0.1, 1.0}) {
            double mass = 0;
            const int64_t count = collect(float(std::log(dropped / (2 * share * double(width_)))), &mass);
            if (mass > enough) return count;
        }
        return -1;
    }

    // A bound that at least `top_k` values of the row reach, from the block maxima.
    float bound_by_k() {
        if (request_.top_k > blocks_) return MINUS_INFINITY;
        float* maxima = maxima_ + blocks_ * LANES;
        for (int64_t block = 0; block < blocks_; ++block) maxima[block] = largest_of(load(maxima_ + block * LANES));
        std::nth_element(maxima, maxima + request_.top_k - 1, maxima + blocks_, std::greater<float>());
        return scaled(maxima[request_.top_k - 1]);
    }

    // Ranks all values that are at least `bound` and not -inf; returns their number and adds to `mass`, if given.
    int64_t collect(float bound, double* mass) {
        bound = std::max(bound, std::numeric_limits<float>::lowest());
        float padded[BLOCK];
        int64_t count = 0;
        for (int64_t block = 0; block < blocks_; ++block) {
            if (!any(scaled(load(maxima_ + block * LANES)) >= splat(bound))) continue;
            const int64_t start = block * BLOCK;
            const float* from = block_of(request_.logits, width_, start, padded);
            for (int64_t i = 0; i < BLOCK; i += LANES) {
                const Floats values = scaled(load(from + i));
                const Integers reaches = values >= splat(bound);
                if (!any(reaches)) continue;
                if (mass) *mass += double(sum_of(reaches ? exp_of_negative(values) : Floats{}));
                const int64_t last = std::min<int64_t>(LANES, width_ - start - i);
                // Branchless, since a branch would be unpredictable: values below the bound are overwritten.
                for (int64_t lane = 0; lane < last && count < width_; ++lane) {
                    ranks_[count] = ranked(values[lane], start + i + lane);
                    count += values[lane] >= bound;
                }
            }
        }
        return count;
    }

    // Adds the candidates among all values that are at least `threshold`. Noise increases with its bits, so it is
    // computed only for tokens with enough bits.
    void search(float threshold, GumbelCandidates& candidates) const {
        const int64_t best = request_.argmax / TILE;
        // First, since it raises the bound most.
        search_tile(best, threshold, candidates);
        for (int64_t tile = 0; tile * TILE < width_; ++tile)
            if (tile != best) search_tile(tile, threshold, candidates);
    }

    void search_tile(int64_t tile, float threshold, GumbelCandidates& candidates) const {
        const int64_t first = tile * (TILE / BLOCK), last = std::min(first + TILE / BLOCK, blocks_);
        Floats maxima = load(maxima_ + first * LANES);
        for (int64_t block = first + 1; block < last; ++block)
            maxima = larger(load(maxima_ + block * LANES), maxima);
        const float largest = scaled(largest_of(maxima));
        if (largest < threshold) return;
        const uint32_t required = min_bits(candidates.required_noise(largest));
        if (required >> UNIFORM_BITS) return;
        for (int64_t block = first; block < last; ++block) search_block(block, threshold, required, candidates);
    }

    void search_block(int64_t block, float threshold, uint32_t required, GumbelCandidates& candidates) const {
        const int64_t start = block * BLOCK;
        uint32_t bits[BLOCK], greatest = 0;
        for (int64_t i = 0; i < BLOCK; ++i) {
            bits[i] = bits_of(start + i);
            greatest = std::max(greatest, bits[i]);
        }
        if (greatest < required) return;
        for (int64_t i = 0; i < std::min(BLOCK, width_ - start); ++i) {
            if (bits[i] < required) continue;
            const float value = scaled(request_.logits[start + i]);
            if (value >= threshold) candidates.add(value, start + i, bits[i]);
        }
    }

    const DrawRequest& request_;
    const int64_t width_, blocks_;
    float* maxima_;
    uint64_t* ranks_;
};

int64_t draw_row(const DrawRequest& request, int64_t width, int64_t* token_ids, float* values) {
    // Any token will do: the caller reports the row as an error.
    if (!std::isfinite(request.max_logit)) {
        token_ids[0] = request.argmax;
        return 1;
    }
    const int64_t blocks = (width + BLOCK - 1) / BLOCK;
    std::unique_ptr<float[]> maxima(new (std::nothrow) float[size_t(blocks * (LANES + 1))]);
    std::unique_ptr<uint64_t[]> ranks(new (std::nothrow) uint64_t[size_t(width)]);
    if (!maxima || !ranks) return -1;
    return RowDraw(request, width, maxima.get(), ranks.get()).draw(token_ids, values);
}

}  // namespace

extern "C" {

// The maximum of each of `rows` [num_rows][width] and its first index. NaN counts as the largest.
void tokenmill_row_max(const float* rows, int64_t num_rows, int64_t width, float* values, int64_t* indices,
                       int64_t threads, RunTeam run_team) {
    for_each(Team{run_team, threads}, num_rows,
             [&](int64_t row) { row_max(rows + row * width, width, values + row, indices + row); });
}

// The candidates of each row's draw, [num_rows][MAX_CANDIDATES] in any order, and their logits, shifted and
// divided by temperature. `counts` [num_rows]: their number, or -1 for an undecided row.
void tokenmill_draw(const DrawRequest* requests, int64_t num_rows, int64_t width, int64_t* token_ids,
                    float* values, int64_t* counts, int64_t threads, RunTeam run_team) {
    for_each(Team{run_team, threads}, num_rows, [&](int64_t row) {
        const int64_t offset = row * MAX_CANDIDATES;
        counts[row] = draw_row(requests[row], width, token_ids + offset, values + offset);
    });
}
}
