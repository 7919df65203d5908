// Paged attention: stores a batch's keys and values in the pool and attends to the whole sequences.
//
// The bits of a row depend on its sequence and position, not on the batch or the threads. This file divides the
// work; tile.h computes. The interface is plain C without torch's headers, so that it compiles in seconds and does
// not depend on torch's ABI.

#include <new>
#include <vector>

#include "team.h"
#include "tile.h"

extern "C" {

// A batch. `spans` [num_spans][4]: first row, number of rows, position of the first row, offset in `tables`.
// Strides count elements; the last dimension of each tensor is contiguous.
struct TokenmillCall {
    const void* query;  // [rows, heads, head_dim]
    const void* key;    // [rows, kv heads, head_dim]
    const void* value;  // [rows, kv heads, value_dim]
    void* out;          // [rows, heads, value_dim], contiguous
    void* pool;
    const float* sinks;  // [heads], or null
    const int64_t* slot_mapping;
    const int64_t* spans;
    const int64_t* tables;
    int64_t query_strides[2];
    int64_t key_strides[2];
    int64_t value_strides[2];
    int64_t num_rows;
    int64_t num_spans;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t value_dim;
    int64_t block_size;
    int64_t window;  // 0: none
    int64_t threads;
    RunTeam run_team;
    float scaling;
    float softcap;  // 0: none
};
}

namespace {

// Rows of one KV head that a thread stores at a time.
constexpr int64_t STORED_ROWS = 32;
// With fewer tiles per thread, tiles are divided into their splits.
constexpr int64_t MIN_TILES = 4;

// The splits split to end_split (exclusive) of one tile's rows.
struct Piece {
    const int64_t* span;
    int64_t kv_head;
    int64_t first;  // index among the span's rows times the heads of a KV head
    int64_t count;
    int64_t split;
    int64_t end_split;
};

template <typename T>
class Attention {
  public:
    explicit Attention(const TokenmillCall& call)
        : call_(call),
          team_{call.run_team, call.threads},
          layer_{{call.num_kv_heads, call.head_dim, call.value_dim},
                 call.num_heads / call.num_kv_heads,
                 call.block_size,
                 call.window,
                 call.scaling,
                 call.softcap} {}

    void store_rows() const {
        int64_t parts = (call_.num_rows + STORED_ROWS - 1) / STORED_ROWS;
        for_each(team_, parts * call_.num_kv_heads, [&](int64_t i) {
            int64_t kv_head = i % call_.num_kv_heads, first = i / call_.num_kv_heads * STORED_ROWS;
            int64_t end = first + STORED_ROWS < call_.num_rows ? first + STORED_ROWS : call_.num_rows;
            for (int64_t row = first; row < end; row++) {
                const T* key = at(call_.key, call_.key_strides, row, kv_head);
                const T* value = at(call_.value, call_.value_strides, row, kv_head);
                int64_t slot = call_.slot_mapping[row];
                T* head = head_at(static_cast<T*>(call_.pool), layer_.shape, slot / PANEL, kv_head);
                put(head, layer_.shape, slot % PANEL, key, value);
            }
        });
    }

    void attend() const {
        std::vector<Piece> tiles = list_tiles();
        if (call_.threads > 1 && int64_t(tiles.size()) < MIN_TILES * call_.threads)
            return attend_in_splits(tiles);
        for_each(team_, int64_t(tiles.size()), [&](int64_t i) {
            Scratch<T> scratch;
            Sum whole;
            whole.values = scratch.whole;
            // Probably the next tile of this thread, as all take about as long.
            size_t next = size_t(i + team_.threads);
            attend_piece(tiles[size_t(i)], next < tiles.size() ? tiles[next] : tiles[size_t(i)], scratch, whole);
            finish(tiles[size_t(i)], whole);
        });
    }

  private:
    static const T* at(const void* tensor, const int64_t* strides, int64_t row, int64_t head) {
        return static_cast<const T*>(tensor) + row * strides[0] + head * strides[1];
    }

    // The last tile of a span reads most, so it is listed first.
    std::vector<Piece> list_tiles() const {
        std::vector<Piece> tiles;
        for (int64_t i = 0; i < call_.num_spans; i++) {
            const int64_t* span = call_.spans + i * 4;
            int64_t rows = span[1] * layer_.heads_per_kv;
            for (int64_t tile = (rows + TILE_ROWS - 1) / TILE_ROWS - 1; tile >= 0; tile--)
                for (int64_t kv_head = 0; kv_head < call_.num_kv_heads; kv_head++) {
                    int64_t first = tile * TILE_ROWS;
                    Piece piece{span, kv_head, first, rows - first < TILE_ROWS ? rows - first : TILE_ROWS, 0, 0};
                    Rows<T> members = rows_of(piece);
                    piece.split = members.first_token() / SPLIT;
                    piece.end_split = (members.end_token() + SPLIT - 1) / SPLIT;
                    tiles.push_back(piece);
                }
        }
        return tiles;
    }

    Rows<T> rows_of(const Piece& piece) const {
        Rows<T> rows;
        rows.count = int(piece.count);
        rows.pool = static_cast<const T*>(call_.pool);
        rows.table = call_.tables + piece.span[3];
        rows.kv_head = piece.kv_head;
        for (int i = 0; i < rows.count; i++) {
            int64_t end = piece.span[2] + (piece.first + i) / layer_.heads_per_kv + 1;
            rows.end[i] = end;
            rows.begin[i] = layer_.window != 0 && end > layer_.window ? end - layer_.window : 0;
        }
        return rows;
    }

    // Finds the first keys of a piece.
    void find_first_heads(const Piece& piece, const T** heads) const {
        Rows<T> rows = rows_of(piece);
        int64_t first = rows.first_token() / KEY_TILE * KEY_TILE, begin = piece.split * SPLIT;
        find_heads(rows, layer_, first < begin ? begin : first, rows.end_token(), heads);
    }

    // The batch's row and the query head of a tile's row.
    int64_t row_of(const Piece& piece, int64_t i) const {
        return piece.span[0] + (piece.first + i) / layer_.heads_per_kv;
    }
    int64_t head_of(const Piece& piece, int64_t i) const {
        return piece.kv_head * layer_.heads_per_kv + (piece.first + i) % layer_.heads_per_kv;
    }

    void attend_piece(const Piece& piece, const Piece& next, Scratch<T>& scratch, Sum& whole) const {
        int64_t size = layer_.shape.padded_head_dim();
        for (int64_t i = 0; i < piece.count; i++) {
            const T* query = at(call_.query, call_.query_strides, row_of(piece, i), head_of(piece, i));
            float* to = scratch.query + i * size;
            for (int64_t d = 0; d < call_.head_dim; d++) to[d] = to_float(query[d]) * layer_.scaling;
            if (call_.head_dim < size) to[call_.head_dim] = 0;
        }
        Rows<T> rows = rows_of(piece);
        find_first_heads(next, rows.after);
        attend_rows(rows, layer_, piece.split, piece.end_split, scratch, whole);
    }

    // Few tiles: each split is a piece, and the pieces of a tile are merged in the order of a single piece.
    void attend_in_splits(const std::vector<Piece>& tiles) const {
        std::vector<Piece> pieces;
        std::vector<size_t> begins;
        for (const Piece& tile : tiles) {
            begins.push_back(pieces.size());
            for (int64_t split = tile.split; split < tile.end_split; split++) {
                pieces.push_back(tile);
                pieces.back().split = split;
                pieces.back().end_split = split + 1;
            }
        }
        const size_t numel = size_t(TILE_ROWS * layer_.shape.padded_value_dim());
        std::vector<float> values(pieces.size() * numel);
        std::vector<Sum> sums(pieces.size());
        for_each(team_, int64_t(pieces.size()), [&](int64_t i) {
            Scratch<T> scratch;
            sums[size_t(i)].values = values.data() + size_t(i) * numel;
            attend_piece(pieces[size_t(i)], pieces[size_t(i)], scratch, sums[size_t(i)]);
        });
        for (size_t i = 0; i < tiles.size(); i++) {
            size_t end = begins[i] + size_t(tiles[i].end_split - tiles[i].split);
            Sum& whole = sums[begins[i]];
            for (size_t piece = begins[i] + 1; piece < end; piece++)
                merge(whole, sums[piece], int(tiles[i].count), layer_.shape.padded_value_dim());
            finish(tiles[i], whole);
        }
    }

    // Divides by the sum of weights. A sink is a score without a value. Not inlined, as `merge`.
    __attribute__((noinline)) void finish(const Piece& piece, const Sum& whole) const {
        int64_t size = layer_.shape.padded_value_dim();
        for (int64_t i = 0; i < piece.count; i++) {
            float weight = whole.weight[i], factor = 1;
            if (call_.sinks != nullptr) {
                float sink = call_.sinks[head_of(piece, i)];
                float largest = whole.largest[i] > sink ? whole.largest[i] : sink;
                float shift = largest > LOWEST ? largest : LOWEST;
                factor = decay(whole.largest[i], shift);
                weight = weight * factor + decay(sink, shift);
            }
            factor /= weight;
            const float* values = whole.values + i * size;
            T* out = static_cast<T*>(call_.out) +
                     (row_of(piece, i) * call_.num_heads + head_of(piece, i)) * call_.value_dim;
            for (int64_t d = 0; d < call_.value_dim; d++) from_float(values[d] * factor, out[d]);
        }
    }

    const TokenmillCall& call_;
    const Team team_;
    const Layer layer_;
};

template <typename T>
int attend(const TokenmillCall& call) {
    try {
        Attention<T> attention(call);
        attention.store_rows();
        attention.attend();
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}

template <typename T>
void zero_slots(void* pool, const int64_t* slots, int64_t num_slots, const Shape& shape) {
    for (int64_t i = 0; i < num_slots; i++)
        for (int64_t kv_head = 0; kv_head < shape.num_kv_heads; kv_head++)
            zero(head_at(static_cast<T*>(pool), shape, slots[i] / PANEL, kv_head), shape,
                   slots[i] % PANEL);
}

}  // namespace

// The functions for one type. `attend` returns 0, or 1 if memory could not be allocated; `zero` clears slots.
#define TOKENMILL_ATTENTION(NAME, T)                                                                            \
    int tokenmill_attend_##NAME(const TokenmillCall* call) { return attend<T>(*call); }                         \
    void tokenmill_zero_##NAME(void* pool, const int64_t* slots, int64_t num_slots, int64_t num_kv_heads,       \
                               int64_t head_dim, int64_t value_dim) {                                           \
        zero_slots<T>(pool, slots, num_slots, {num_kv_heads, head_dim, value_dim});                             \
    }

extern "C" {
TOKENMILL_ATTENTION(float32, float)
TOKENMILL_ATTENTION(bfloat16, BFloat16)

// The elements of one group of PANEL tokens.
int64_t tokenmill_group_numel(int64_t num_kv_heads, int64_t head_dim, int64_t value_dim) {
    return num_kv_heads * Shape{num_kv_heads, head_dim, value_dim}.head_numel();
}
}
