// The operator of linears: rows times a weight that was packed for it once.
//
// Law: each number of the output is its bias, to which the products are added in float32 in the order of the
// input's numbers, one after the other. So a row's bits do not depend on the rows beside it, on the blocks it
// is cut into or on the threads.
//
// A packed weight is panels of sixteen outputs, [out / 16][in][16], and in bfloat16 [out / 16][in / 2][16][2],
// as product.h reads them. What fills a size up is 0.

#include <memory>
#include <new>
#include <type_traits>

#include "product.h"
#include "team.h"

namespace {

// Of the input's numbers, what is multiplied in one go: of a few rows so much stays in the first cache. The
// panel's part comes out of the second one, in order and in time.
constexpr int64_t MOST_DEPTH = 768;
// Rows that are multiplied with a panel before the next: few enough to leave the second cache to the panels.
constexpr int64_t ROWS_TOGETHER = 66;
// Tasks for each thread, so that one that is held up does not hold up all.
constexpr int64_t TASKS_EACH = 4;

constexpr int64_t CONVERTED_ROWS = 8;

// out [rows, out] = input [rows, in] times the weight, plus bias. Strides count numbers.
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
    static int64_t place(int64_t input, int64_t column) { return input * SIXTEEN + column; }
};

template <>
struct Weight<BFloat16> {
    static int64_t depth(int64_t num_inputs) { return parts_of(num_inputs, 2) * 2; }
    static int64_t place(int64_t input, int64_t column) {
        return (input / 2 * SIXTEEN + column) * 2 + input % 2;
    }
};

// From `begin` up to `end`.
struct Range {
    int64_t begin;
    int64_t end;

    int64_t size() const { return end - begin; }
};

// Part `index` of `count` about equal ones, all but the last a multiple of `unit`.
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
          num_panels_(parts_of(call.num_outputs, SIXTEEN)),
          panel_numbers_(Weight<T>::depth(call.num_inputs) * SIXTEEN),
          num_depths_(parts_of(call.num_inputs, MOST_DEPTH)) {}

    void multiply_all() const {
        if (call_.num_rows == 0) return;
        int64_t row_parts = parts_of(call_.num_rows, ROWS_TOGETHER);
        int64_t panel_parts = parts_of(call_.team.threads * TASKS_EACH, row_parts);
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
    static constexpr int64_t SUMS_STRIDE = MOST_COLUMNS * SIXTEEN;

    const T* panel_at(int64_t panel, int64_t depth) const {
        return static_cast<const T*>(call_.panels) + panel * panel_numbers_ + depth * SIXTEEN;
    }

    // Rows that are multiplied at once. Found once, as a division takes as long as dozens of products.
    struct Blocks {
        Range rows;
        int64_t count;
        int width;  // panels that are multiplied at once
        Range at[parts_of(ROWS_TOGETHER, MOST_ROWS)];

        explicit Blocks(Range all) : rows(all), count(parts_of(all.size(), MOST_ROWS)) {
            width = columns_beside(int(parts_of(all.size(), count)));
            for (int64_t i = 0; i < count; i++) {
                Range part = part_of(all.size(), count, i, 1);
                at[i] = {all.begin + part.begin, all.begin + part.end};
            }
        }
    };

    // Sums wait between two depths; those of the last depth go out at once, while others are multiplied.
    void multiply_panels(const Blocks& blocks, Range panels) const {
        alignas(64) float sums[ROWS_TOGETHER * SUMS_STRIDE];
        alignas(64) float bias[SUMS_STRIDE];
        const float* begin = begin_of(panels, bias);
        for (int64_t i = 0; i < num_depths_; i++) {
            Range depth = part_of(call_.num_inputs, num_depths_, i, 2);
            // What comes next is fetched meanwhile: the next depth, or the next panels.
            Place next = i + 1 < num_depths_ ? Place{panels.begin, depth.end} : Place{panels.end, 0};
            if (next.panel + panels.size() > num_panels_) next = {0, 0};
            multiply_depth(blocks, panels, depth, next, i == 0 ? begin : nullptr, sums);
        }
    }

    // What sums of some panels begin with, of a row stride of 0; `bias` is room for it.
    const float* begin_of(Range panels, float* bias) const {
        if (call_.bias == nullptr) return ZEROS;
        Range outputs = outputs_of(panels);
        for (int64_t i = 0; i < outputs.size(); i++)
            bias[i] = to_float(static_cast<const T*>(call_.bias)[outputs.begin + i]);
        return bias;
    }

    struct Place {
        int64_t panel;
        int64_t depth;
    };

    // Panels: as many as are multiplied at once, or one. `begin` as of begin_of, or null: the sums that are there.
    void multiply_depth(const Blocks& blocks, Range panels, Range depth, Place next, const float* begin,
                        float* sums) const {
        const bool is_last = depth.end == call_.num_inputs;
        const bool is_straight = is_last && goes_straight(panels);
        const int columns = int(panels.size());
        const T* fronts[MOST_COLUMNS];
        for (int c = 0; c < columns; c++) fronts[c] = panel_at(panels.begin + c, depth.begin);
        Ahead ahead{reinterpret_cast<const char*>(panel_at(next.panel, next.depth)),
                    panel_numbers_ * int64_t(sizeof(T)),
                    parts_of(SIXTEEN * int64_t(sizeof(T)), blocks.count)};
        for (int64_t i = 0; i < blocks.count; i++, ahead.from += depth.size() * ahead.step) {
            const Range rows = blocks.at[i];
            float* kept = sums + (rows.begin - blocks.rows.begin) * SUMS_STRIDE;
            Product<T> product{input_ + rows.begin * input_stride_ + depth.begin,
                               input_stride_,
                               fronts,
                               depth.size(),
                               depth.size(),
                               begin ? begin : kept,
                               begin ? 0 : SUMS_STRIDE,
                               kept,
                               SUMS_STRIDE};
            if (is_straight) put_straight(product, rows, panels);
            multiply_block(product, int(rows.size()), columns, ahead);
            if (is_last && !is_straight) give_out(rows, panels, kept);
        }
    }

    // Blocks of fewer rows than their neighbours may take more columns at once than these do: they then take one.
    static void multiply_block(Product<T> product, int rows, int columns, const Ahead& ahead) {
        if (columns == 1 || columns == columns_beside(rows)) return multiply(product, rows, columns, ahead);
        for (int c = 0; c < columns; c++) {
            multiply(product, rows, 1, ahead);
            product.panels++;
            product.begin += SIXTEEN;
            product.out += SIXTEEN;
        }
    }

    // Whether the sums are what goes out: no other type, and nothing beside the outputs.
    bool goes_straight(Range panels) const {
        return std::is_same_v<T, float> && panels.end * SIXTEEN <= call_.num_outputs;
    }

    void put_straight(Product<T>& product, Range rows, Range panels) const {
        product.out = static_cast<float*>(call_.out) + rows.begin * call_.num_outputs + panels.begin * SIXTEEN;
        product.out_stride = call_.num_outputs;
        // Where nobody has been yet: by the time it is written it is here.
        for (int64_t row = 0; row < rows.size(); row++)
            for (int64_t c = 0; c < panels.size(); c++)
                __builtin_prefetch(product.out + row * product.out_stride + c * SIXTEEN, 1);
    }

    void give_out(Range rows, Range panels, const float* sums) const {
        Range outputs = outputs_of(panels);
        for (int64_t row = rows.begin; row < rows.end; row++, sums += SUMS_STRIDE) {
            T* out = static_cast<T*>(call_.out) + row * call_.num_outputs + outputs.begin;
            for (int64_t i = 0; i < outputs.size(); i++) from_float(sums[i], out[i]);
        }
    }

    Range outputs_of(Range panels) const {
        int64_t end = panels.end * SIXTEEN;
        return {panels.begin * SIXTEEN, end < call_.num_outputs ? end : call_.num_outputs};
    }

    const Call& call_;
    const float* input_;
    const int64_t input_stride_;
    const int64_t num_panels_;
    const int64_t panel_numbers_;
    const int64_t num_depths_;
};

int multiply_all(const Call& call, const float* input) {
    Linear<float>(call, input, call.input_stride).multiply_all();
    return 0;
}

// Each number is made a float32 once, not once for each panel.
int multiply_all(const Call& call, const BFloat16* input) {
    // Not a vector: it would be zeroed.
    std::unique_ptr<float[]> numbers(new (std::nothrow) float[size_t(call.num_rows * call.num_inputs)]);
    if (numbers == nullptr) return 1;
    const int64_t parts = parts_of(call.num_rows, CONVERTED_ROWS);
    for_each(call.team, parts, [&](int64_t i) {
        Range rows = part_of(call.num_rows, parts, i, 1);
        for (int64_t row = rows.begin; row < rows.end; row++)
            for (int64_t k = 0; k < call.num_inputs; k++)
                numbers[size_t(row * call.num_inputs + k)] = to_float(input[row * call.input_stride + k]);
    });
    Linear<BFloat16>(call, numbers.get(), call.num_inputs).multiply_all();
    return 0;
}

// weight [out, in], of a stride in numbers, into panels.
template <typename T>
void pack(const T* weight, int64_t weight_stride, int64_t num_inputs, int64_t num_outputs, T* panels,
          const Team& team) {
    const int64_t depth = Weight<T>::depth(num_inputs);
    for_each(team, parts_of(num_outputs, SIXTEEN), [&](int64_t panel) {
        T* to = panels + panel * depth * SIXTEEN;
        for (int64_t column = 0; column < SIXTEEN; column++) {
            int64_t output = panel * SIXTEEN + column;
            const T* from = weight + output * weight_stride;
            int64_t given = output < num_outputs ? num_inputs : 0;
            for (int64_t k = 0; k < given; k++) to[Weight<T>::place(k, column)] = from[k];
            for (int64_t k = given; k < depth; k++) to[Weight<T>::place(k, column)] = T{};
        }
    });
}

}  // namespace

extern "C" {

// Both return 0, or 1 if memory is out. `input` [rows, in] of a stride in numbers; `bias` [out], or null;
// `out` [rows, out], contiguous.
int tokenmill_linear_float32(const void* input, int64_t input_stride, int64_t num_rows, const void* panels,
                             int64_t num_inputs, int64_t num_outputs, const void* bias, void* out,
                             int64_t threads, RunTeam run_team) {
    return multiply_all({input, input_stride, num_rows, panels, num_inputs, num_outputs, bias, out,
                         {run_team, threads}},
                        static_cast<const float*>(input));
}
int tokenmill_linear_bfloat16(const void* input, int64_t input_stride, int64_t num_rows, const void* panels,
                              int64_t num_inputs, int64_t num_outputs, const void* bias, void* out,
                              int64_t threads, RunTeam run_team) {
    return multiply_all({input, input_stride, num_rows, panels, num_inputs, num_outputs, bias, out,
                         {run_team, threads}},
                        static_cast<const BFloat16*>(input));
}

// `weight` [out, in] of a stride in numbers; `panels` of as many numbers as the functions below say.
void tokenmill_pack_linear_float32(const void* weight, int64_t weight_stride, int64_t num_inputs,
                                   int64_t num_outputs, void* panels, int64_t threads, RunTeam run_team) {
    pack(static_cast<const float*>(weight), weight_stride, num_inputs, num_outputs,
         static_cast<float*>(panels), {run_team, threads});
}
void tokenmill_pack_linear_bfloat16(const void* weight, int64_t weight_stride, int64_t num_inputs,
                                    int64_t num_outputs, void* panels, int64_t threads, RunTeam run_team) {
    pack(static_cast<const BFloat16*>(weight), weight_stride, num_inputs, num_outputs,
         static_cast<BFloat16*>(panels), {run_team, threads});
}

int64_t tokenmill_linear_numbers_float32(int64_t num_inputs, int64_t num_outputs) {
    return parts_of(num_outputs, SIXTEEN) * SIXTEEN * Weight<float>::depth(num_inputs);
}
int64_t tokenmill_linear_numbers_bfloat16(int64_t num_inputs, int64_t num_outputs) {
    return parts_of(num_outputs, SIXTEEN) * SIXTEEN * Weight<BFloat16>::depth(num_inputs);
}
}
