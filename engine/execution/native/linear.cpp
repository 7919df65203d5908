// Linears: rows times a weight that was packed once.
//
// Each output is its bias plus the products in float32, added in order of the inputs, so the bits of a row do not
// depend on the other rows, the blocks or the threads.
//
// A packed weight consists of panels of PANEL = 16 outputs, [out / 16][in][16], or in bfloat16
// [out / 16][in / 2][16][2], as product.h reads them. Padding is 0.

#include <memory>
#include <new>

#include "product.h"
#include "team.h"

namespace {

// Inputs that are multiplied in one pass: those of a few rows fit into the L1 cache, and the panel streams from L2.
constexpr int64_t MAX_DEPTH = 768;
// Rows that are multiplied with a panel before the next panel: few enough to leave L2 to the panels.
constexpr int64_t ROWS_TOGETHER = 66;
// More tasks than threads, so that a delayed thread does not delay all.
constexpr int64_t TASKS_PER_THREAD = 4;

constexpr int64_t CONVERTED_ROWS = 8;

// out [rows, out] = input [rows, in] times the weight, plus bias. Strides count elements.
struct Call {
    const void* input;
    int64_t input_stride;
    int64_t num_rows;
    const void* panels;
    int64_t num_inputs;
    int64_t num_outputs;
    const void* bias;  // [out], or null
    void* out;         // contiguous
    Team team;
};

constexpr int64_t parts_of(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

template <typename T>
struct Weight;

template <>
struct Weight<float> {
    static int64_t depth(int64_t num_inputs) { return num_inputs; }
    static int64_t index(int64_t input, int64_t column) { return input * PANEL + column; }
};

template <>
struct Weight<BFloat16> {
    static int64_t depth(int64_t num_inputs) { return parts_of(num_inputs, 2) * 2; }
    static int64_t index(int64_t input, int64_t column) {
        return (input / 2 * PANEL + column) * 2 + input % 2;
    }
};

// begin to end (exclusive).
struct Range {
    int64_t begin;
    int64_t end;

    int64_t size() const { return end - begin; }
};

// Part `index` of `count` parts of about equal size, all but the last a multiple of `unit`.
inline Range part_of(int64_t whole, int64_t count, int64_t index, int64_t unit) {
    int64_t units = parts_of(whole, unit);
    int64_t begin = units * index / count * unit, end = units * (index + 1) / count * unit;
    return {begin, end < whole ? end : whole};
}

template <typename T>
class Linear {
  public:
    Linear(const Call& call, const float* input, int64_t input_stride)
        : call_(call),
          input_(input),
          input_stride_(input_stride),
          num_panels_(parts_of(call.num_outputs, PANEL)),
          panel_numel_(Weight<T>::depth(call.num_inputs) * PANEL),
          num_depths_(parts_of(call.num_inputs, MAX_DEPTH)) {}

    void multiply_all() const {
        if (call_.num_rows == 0) return;
        int64_t row_parts = parts_of(call_.num_rows, ROWS_TOGETHER);
        int64_t panel_parts = parts_of(call_.team.threads * TASKS_PER_THREAD, row_parts);
        if (panel_parts > num_panels_) panel_parts = num_panels_;
        for_each(call_.team, row_parts * panel_parts, [&](int64_t i) {
            Range rows = part_of(call_.num_rows, row_parts, i / panel_parts, 1);
            Range panels = part_of(num_panels_, panel_parts, i % panel_parts, 1);
            const Blocks blocks(rows);
            for (int64_t begin = panels.begin; begin < panels.end;) {
                int64_t end = begin + blocks.width <= panels.end ? begin + blocks.width : begin + 1;
                multiply_panels(blocks, {begin, end});
                begin = end;
            }
        });
    }

  private:
    static constexpr int64_t SUMS_STRIDE = MAX_COLUMNS * PANEL;

    const T* panel_at(int64_t panel, int64_t depth) const {
        return static_cast<const T*>(call_.panels) + panel * panel_numel_ + depth * PANEL;
    }

    // Blocks of rows that are multiplied at once, computed once because divisions are slow.
    struct Blocks {
        Range rows;
        int64_t count;
        int width;  // panels that are multiplied together
        Range at[parts_of(ROWS_TOGETHER, MAX_ROWS)];

        explicit Blocks(Range all) : rows(all), count(parts_of(all.size(), MAX_ROWS)) {
            width = columns_beside(int(parts_of(all.size(), count)));
            for (int64_t i = 0; i < count; i++) {
                Range part = part_of(all.size(), count, i, 1);
                at[i] = {all.begin + part.begin, all.begin + part.end};
            }
        }
    };

    // `sums` keeps the accumulators between depths; the last depth writes the outputs.
    void multiply_panels(const Blocks& blocks, Range panels) const {
        alignas(64) float sums[ROWS_TOGETHER * SUMS_STRIDE];
        alignas(64) float bias[SUMS_STRIDE];
        const float* begin = begin_of(panels, bias);
        for (int64_t i = 0; i < num_depths_; i++) {
            Range depth = part_of(call_.num_inputs, num_depths_, i, 2);
            // To be prefetched: the next depth, or the next panels.
            Position next = i + 1 < num_depths_ ? Position{panels.begin, depth.end} : Position{panels.end, 0};
            if (next.panel + panels.size() > num_panels_) next = {0, 0};
            multiply_depth(blocks, panels, depth, next, i == 0 ? begin : nullptr, sums);
        }
    }

    // The initial values of the sums, with a stride of 0; `bias` is a buffer.
    const float* begin_of(Range panels, float* bias) const {
        if (call_.bias == nullptr) return ZEROS;
        Range outputs = outputs_of(panels);
        for (int64_t i = 0; i < outputs.size(); i++)
            bias[i] = to_float(static_cast<const T*>(call_.bias)[outputs.begin + i]);
        return bias;
    }

    struct Position {
        int64_t panel;
        int64_t depth;
    };

    // `panels`: as many as are multiplied together, or one. `begin`: see begin_of; null: continue `sums`.
    void multiply_depth(const Blocks& blocks, Range panels, Range depth, Position next, const float* begin,
                        float* sums) const {
        const bool is_last = depth.end == call_.num_inputs;
        const int columns = int(panels.size());
        const T* fronts[MAX_COLUMNS];
        for (int c = 0; c < columns; c++) fronts[c] = panel_at(panels.begin + c, depth.begin);
        // With few rows a step takes up to 1.8 times as long without the prefetch.
        Prefetch ahead{reinterpret_cast<const char*>(panel_at(next.panel, next.depth)),
                       panel_numel_ * int64_t(sizeof(T)), parts_of(PANEL * int64_t(sizeof(T)), blocks.count)};
        for (int64_t i = 0; i < blocks.count; i++, ahead.from += depth.size() * ahead.step) {
            const Range rows = blocks.at[i];
            float* kept = sums + (rows.begin - blocks.rows.begin) * SUMS_STRIDE;
            Product<T> product{input_ + rows.begin * input_stride_ + depth.begin, input_stride_, fronts,
                               depth.size(), depth.size(), begin ? begin : kept, begin ? 0 : SUMS_STRIDE,
                               kept, SUMS_STRIDE};
            multiply_block(product, int(rows.size()), columns, ahead);
            if (is_last) write_rows(rows, panels, kept);
        }
    }

    // A block with fewer rows than others may need another number of columns; it then multiplies one at a time.
    static void multiply_block(Product<T> product, int rows, int columns, const Prefetch& ahead) {
        if (columns == 1 || columns == columns_beside(rows)) return multiply(product, rows, columns, ahead);
        for (int c = 0; c < columns; c++) {
            multiply(product, rows, 1, ahead);
            product.panels++;
            product.begin += PANEL;
            product.out += PANEL;
        }
    }

    void write_rows(Range rows, Range panels, const float* sums) const {
        Range outputs = outputs_of(panels);
        for (int64_t row = rows.begin; row < rows.end; row++, sums += SUMS_STRIDE) {
            T* out = static_cast<T*>(call_.out) + row * call_.num_outputs + outputs.begin;
            for (int64_t i = 0; i < outputs.size(); i++) from_float(sums[i], out[i]);
        }
    }

    Range outputs_of(Range panels) const {
        int64_t end = panels.end * PANEL;
        return {panels.begin * PANEL, end < call_.num_outputs ? end : call_.num_outputs};
    }

    const Call& call_;
    const float* input_;
    const int64_t input_stride_;
    const int64_t num_panels_;
    const int64_t panel_numel_;
    const int64_t num_depths_;
};

int multiply_all(const Call& call, const float* input) {
    Linear<float>(call, input, call.input_stride).multiply_all();
    return 0;
}

// Converts the input to float32 once instead of once per panel.
int multiply_all(const Call& call, const BFloat16* input) {
    // A std::vector would be zeroed.
    std::unique_ptr<float[]> wide(new (std::nothrow) float[size_t(call.num_rows * call.num_inputs)]);
    if (wide == nullptr) return 1;
    const int64_t parts = parts_of(call.num_rows, CONVERTED_ROWS);
    for_each(call.team, parts, [&](int64_t i) {
        Range rows = part_of(call.num_rows, parts, i, 1);
        for (int64_t row = rows.begin; row < rows.end; row++)
            for (int64_t k = 0; k < call.num_inputs; k++)
                wide[size_t(row * call.num_inputs + k)] = to_float(input[row * call.input_stride + k]);
    });
    Linear<BFloat16>(call, wide.get(), call.num_inputs).multiply_all();
    return 0;
}

// Packs weight [out, in] into panels.
template <typename T>
void pack(const T* weight, int64_t weight_stride, int64_t num_inputs, int64_t num_outputs, T* panels,
          const Team& team) {
    const int64_t depth = Weight<T>::depth(num_inputs);
    for_each(team, parts_of(num_outputs, PANEL), [&](int64_t panel) {
        T* to = panels + panel * depth * PANEL;
        for (int64_t column = 0; column < PANEL; column++) {
            int64_t output = panel * PANEL + column;
            const T* from = weight + output * weight_stride;
            int64_t count = output < num_outputs ? num_inputs : 0;
            for (int64_t k = 0; k < count; k++) to[Weight<T>::index(k, column)] = from[k];
            for (int64_t k = count; k < depth; k++) to[Weight<T>::index(k, column)] = T{};
        }
    });
}

}  // namespace

// The functions for one type. `linear` returns 0, or 1 if memory could not be allocated. `input` [rows, in] and
// `weight` [out, in] have a row stride; `bias` is [out] or null; `out` [rows, out] is contiguous; `panels` has
// `linear_numel` elements.
#define TOKENMILL_LINEAR(NAME, T)                                                                               \
    int tokenmill_linear_##NAME(const void* input, int64_t input_stride, int64_t num_rows, const void* panels,  \
                                int64_t num_inputs, int64_t num_outputs, const void* bias, void* out,           \
                                int64_t threads, RunTeam run_team) {                                            \
        return multiply_all({input, input_stride, num_rows, panels, num_inputs, num_outputs, bias, out,         \
                             {run_team, threads}},                                                              \
                            static_cast<const T*>(input));                                                      \
    }                                                                                                           \
    void tokenmill_pack_linear_##NAME(const void* weight, int64_t weight_stride, int64_t num_inputs,            \
                                      int64_t num_outputs, void* panels, int64_t threads, RunTeam run_team) {   \
        pack(static_cast<const T*>(weight), weight_stride, num_inputs, num_outputs, static_cast<T*>(panels),    \
             {run_team, threads});                                                                              \
    }                                                                                                           \
    int64_t tokenmill_linear_numel_##NAME(int64_t num_inputs, int64_t num_outputs) {                            \
        return parts_of(num_outputs, PANEL) * PANEL * Weight<T>::depth(num_inputs);                             \
    }

extern "C" {
TOKENMILL_LINEAR(float32, float)
TOKENMILL_LINEAR(bfloat16, BFloat16)
}
