// Attention of a few rows over the keys and values of one KV head: one pass, with an online softmax.
//
// Keys are read in tiles of KEY_TILE at absolute positions, and the sums of every SPLIT keys are merged in order.
// Keys that a row does not see get weight 0, which changes none of its bits. So the bits of a row depend on its
// position alone: not on decode or prefill, the chunk, the other rows, the pieces or the threads. Only slots that
// the sequence has written are read.
#pragma once

#include "pool.h"
#include "product.h"

namespace {

constexpr int TILE_ROWS = 24;
constexpr int KEY_TILE = 64;
constexpr int GROUPS = KEY_TILE / PANEL;
constexpr int64_t SPLIT = 512;
constexpr int64_t MAX_HEAD_DIM = 512;
constexpr float LOWEST = -1e30f;

struct Layer {
    Shape shape;
    int64_t heads_per_kv;
    int64_t block_size;
    int64_t window;  // 0: none
    float scaling;
    float softcap;  // 0: none
};

// Rows of one sequence and one KV head. Row i sees tokens begin[i] to end[i] (exclusive), which ascend.
template <typename T>
struct Rows {
    int count;
    int64_t begin[TILE_ROWS];
    int64_t end[TILE_ROWS];
    const T* pool;
    const int64_t* table;
    int64_t kv_head;
    const T* after[GROUPS];  // groups that this thread may read next, to be prefetched

    int64_t first_token() const { return begin[0]; }
    int64_t end_token() const { return end[count - 1]; }
};

// Accumulators of the online softmax: the largest score, the sum of weights, and the weighted values.
struct Sum {
    float largest[TILE_ROWS];
    float weight[TILE_ROWS];
    float* values;  // [rows, padded value size]

    void clear(int rows, int64_t size) {
        for (int r = 0; r < rows; r++) largest[r] = -__builtin_inff(), weight[r] = 0;
        std::memset(values, 0, sizeof(float) * size_t(rows * size));
    }
};

// exp(left - right), where right is the larger of both, or LOWEST if both are -inf.
inline float decay(float left, float right) { return exp_of_negative(left - right); }

inline void scale_row(float* row, int64_t size, float factor) {
    for (int64_t i = 0; i < size; i += LANES) store(row + i, load(row + i) * factor);
}

// Adds `part` to `sum`, whose tokens precede it. Not inlined: the compiler may contract products and sums
// differently in each copy.
__attribute__((noinline)) void merge(Sum& sum, const Sum& part, int rows, int64_t size) {
    for (int r = 0; r < rows; r++) {
        float largest = sum.largest[r] > part.largest[r] ? sum.largest[r] : part.largest[r];
        float shift = largest > LOWEST ? largest : LOWEST;
        float before = decay(sum.largest[r], shift), now = decay(part.largest[r], shift);
        sum.largest[r] = largest;
        sum.weight[r] = sum.weight[r] * before + part.weight[r] * now;
        float* to = sum.values + r * size;
        const float* from = part.values + r * size;
        for (int64_t i = 0; i < size; i += LANES)
            store(to + i, load(to + i) * before + load(from + i) * now);
    }
}

// Buffers of one thread.
template <typename T>
struct Scratch {
    alignas(64) float query[TILE_ROWS * MAX_HEAD_DIM];
    alignas(64) float scores[TILE_ROWS * KEY_TILE];
    alignas(64) float part[TILE_ROWS * MAX_HEAD_DIM];
    alignas(64) float whole[TILE_ROWS * MAX_HEAD_DIM];
    alignas(64) T packed[GROUPS * 2 * MAX_HEAD_DIM * PANEL];
};

template <typename T>
int64_t slot_of(const Rows<T>& rows, const Layer& layer, int64_t token) {
    // A 64-bit division is several times slower.
    uint32_t block = uint32_t(token) / uint32_t(layer.block_size);
    return rows.table[block] * layer.block_size + (token - block * layer.block_size);
}

// Finds the groups of a key tile, or the first token of each if they are packed. The last group is repeated.
template <typename T>
void find_heads(const Rows<T>& rows, const Layer& layer, int64_t first, int64_t end, const T** heads) {
    for (int64_t i = 0; i < GROUPS; i++, first += PANEL) {
        heads[i] = head_at(rows.pool, layer.shape, slot_of(rows, layer, first < end ? first : end - 1) / PANEL,
                           rows.kv_head);
    }
}

// A prefetch policy: for each column the memory at from[column], in step with the depth.
template <typename T>
struct Runs {
    const T* from[MAX_COLUMNS];

    template <int COLUMNS>
    void fetch(int64_t depth) const {
        for (int c = 0; c < COLUMNS; c++) __builtin_prefetch(from[c] + depth * PANEL, 0, 3);
    }
};

// Finds the groups of a key tile. Groups whose tokens are in several blocks are copied to `packed`.
template <typename T>
void find_groups(const Rows<T>& rows, const Layer& layer, int64_t first, int64_t end, T* packed,
                 const T** groups) {
    const Shape& shape = layer.shape;
    for (int64_t token = first; token < end; token += PANEL, groups++) {
        if (layer.block_size % PANEL == 0) {
            *groups = head_at(rows.pool, shape, slot_of(rows, layer, token) / PANEL, rows.kv_head);
            continue;
        }
        for (int64_t i = 0; i < PANEL && token + i < end; i++) {
            int64_t from = slot_of(rows, layer, token + i);
            move(packed, i, head_at(rows.pool, shape, from / PANEL, rows.kv_head), from % PANEL, shape);
        }
        *groups = packed;
        packed += shape.head_numel();
    }
}

// Scores of all rows over a key tile: query [rows, size], scores [rows, KEY_TILE]. Prefetches the values.
template <typename T>
void score(const float* query, int rows, const Shape& shape, const T* const* groups, int num_groups,
           float* scores) {
    int64_t size = shape.padded_head_dim();
    for (int r = 0; r < rows; r += MAX_ROWS) {
        int count = rows - r < MAX_ROWS ? rows - r : MAX_ROWS;
        for (int g = 0; g < num_groups;) {
            int columns = g + columns_beside(count) <= num_groups ? columns_beside(count) : 1;
            float* out = scores + r * KEY_TILE + g * PANEL;
            Product<T> product{query + r * size, size, groups + g, size, size, ZEROS, 0, out, KEY_TILE};
            Runs<T> values;
            for (int c = 0; c < columns; c++) values.from[c] = groups[g + c] + shape.key_numel();
            r == 0 ? multiply(product, count, columns, values) : multiply(product, count, columns);
            g += columns;
        }
    }
}

// Adds the weighted values of `num_tokens` tokens: weights [rows, KEY_TILE], out [rows, padded value size].
// Prefetches the keys of `next`: for each PANEL elements of a value as many lines as there are tokens.
template <typename T>
void add_values(const float* weights, int rows, const Shape& shape, const T* const* groups, int num_tokens,
                const T* const* next, float* out) {
    int64_t size = shape.padded_value_dim(), key_size = shape.padded_head_dim();
    const T* panels[GROUPS * MAX_COLUMNS];
    for (int r = 0; r < rows; r += MAX_ROWS) {
        int count = rows - r < MAX_ROWS ? rows - r : MAX_ROWS;
        for (int64_t at = 0; at < size;) {
            int columns = at + columns_beside(count) * PANEL <= size ? columns_beside(count) : 1;
            for (int g = 0; g * PANEL < num_tokens; g++)
                for (int c = 0; c < columns; c++)
                    panels[g * MAX_COLUMNS + c] =
                        groups[g] + shape.key_numel() + (at + c * PANEL) * PANEL;
            float* sums = out + r * size + at;
            Product<T> product{weights + r * KEY_TILE, KEY_TILE, panels, num_tokens, PANEL, sums, size, sums, size};
            Runs<T> keys;
            for (int c = 0; c < columns; c++) {
                int64_t line = (at / PANEL + c) * KEY_TILE, group = line / key_size;
                if (group >= GROUPS) group = GROUPS - 1;
                keys.from[c] = next[group] + (line - group * key_size) * PANEL;
            }
            r == 0 ? multiply(product, count, columns, keys) : multiply(product, count, columns);
            at += columns * PANEL;
        }
    }
}

// Sets the scores of tokens outside begin to end to -inf.
inline void mask_outside(float* scores, int width, int64_t first, int64_t begin, int64_t end) {
    Words lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = uint32_t(i);
    const Words seen = Words{} + uint32_t(end - begin);
    // Tokens before `begin` wrap around to large unsigned numbers.
    for (int i = 0; i < width; i += LANES)
        store(scores + i, lanes + uint32_t(first - begin + i) < seen ? load(scores + i) : splat(-__builtin_inff()));
}

// Turns one row's scores of tokens first to first + width into weights. Returns the factor for earlier sums.
inline float softmax_tile(float* scores, int width, int64_t first, int64_t begin, int64_t end, const Layer& layer,
                    float& largest, Floats& weight) {
    if (layer.softcap != 0)
        for (int i = 0; i < width; i += LANES)
            store(scores + i, tanh_of(load(scores + i) / layer.softcap) * layer.softcap);
    if (begin > first || end < first + width) mask_outside(scores, width, first, begin, end);
    Floats top = load(scores);
    for (int i = LANES; i < width; i += LANES) top = larger(top, load(scores + i));
    float before = largest, now = largest_of(top);
    largest = before > now ? before : now;
    float shift = largest > LOWEST ? largest : LOWEST;
    Floats total = Floats{};
    for (int i = 0; i < width; i += LANES) {
        Floats one = exp_of_negative(load(scores + i) - shift);
        store(scores + i, one);
        total += one;
    }
    float factor = before == shift ? 1.0f : decay(before, shift);
    weight = weight * factor + total;
    return factor;
}

// Accumulates tokens first to end (exclusive), which belong to one split.
template <typename T>
void attend_split(const Rows<T>& rows, const Layer& layer, int64_t first, int64_t end, Scratch<T>& scratch,
                  Sum& part) {
    const T* next[GROUPS];
    const int64_t size = layer.shape.padded_value_dim();
    Floats weights[TILE_ROWS] = {};
    part.clear(rows.count, size);
    for (; first < end; first += KEY_TILE) {
        int num_tokens = end - first < KEY_TILE ? int(end - first) : KEY_TILE;
        int num_groups = (num_tokens + PANEL - 1) / PANEL;
        const T* groups[GROUPS];
        find_groups(rows, layer, first, end < first + KEY_TILE ? end : first + KEY_TILE, scratch.packed,
                    groups);
        score(scratch.query, rows.count, layer.shape, groups, num_groups, scratch.scores);
        for (int r = 0; r < rows.count; r++) {
            float factor = softmax_tile(scratch.scores + r * KEY_TILE, num_groups * PANEL, first, rows.begin[r],
                                        rows.end[r], layer, part.largest[r], weights[r]);
            if (factor != 1.0f) scale_row(part.values + r * size, size, factor);
        }
        if (first + KEY_TILE < rows.end_token())
            find_heads(rows, layer, first + KEY_TILE, rows.end_token(), next);
        else
            std::memcpy(next, rows.after, sizeof next);
        add_values(scratch.scores, rows.count, layer.shape, groups, num_tokens, next, part.values);
    }
    for (int r = 0; r < rows.count; r++) part.weight[r] = sum_of(weights[r]);
}

// Merges splits split to end_split (exclusive) into `whole`. scratch.query holds the scaled queries.
template <typename T>
void attend_rows(const Rows<T>& rows, const Layer& layer, int64_t split, int64_t end_split,
                 Scratch<T>& scratch, Sum& whole) {
    const int64_t size = layer.shape.padded_value_dim();
    Sum part;
    part.values = scratch.part;
    whole.clear(rows.count, size);
    for (; split < end_split; split++) {
        int64_t first = rows.first_token() / KEY_TILE * KEY_TILE;
        if (first < split * SPLIT) first = split * SPLIT;
        int64_t end = rows.end_token() < (split + 1) * SPLIT ? rows.end_token() : (split + 1) * SPLIT;
        attend_split(rows, layer, first, end, scratch, part);
        merge(whole, part, rows.count, size);
    }
}

}  // namespace
