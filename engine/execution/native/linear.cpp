// The operator of linears: rows times a weight that was packed for it once.
//
// Law: each number of the output is its bias, to which the products are added in float32 in the order of the
// input's numbers, one after the other. So a row's bits do not depend on the rows beside it, on the blocks it
// is cut into or on the threads.
//
// A packed weight is panels of sixteen outputs, [out / 16][in][16], and in bfloat16 [out / 16][in / 2][16][2],
// as product.h reads them. What fills a size up is 0.

#include <new>
#include <memory>

#include "product.h"
#include "team.h"

namespace {

// Of the input's numbers, what is multiplied in one go: of a panel so much stays in the first cache.
constexpr int64_t MOST_DEPTH = 320;
// Rows whose part of that depth stays in the second cache.
constexpr int64_t ROWS_TOGETHER = 192;
// Panels that are multiplied with these before the next depth.
constexpr int64_t PANELS_TOGETHER = 4;
// Up to so many rows wait for the memory: they take no more panels than are multiplied at once, so that what is
// fetched ahead is closer.
constexpr int64_t FEW_ROWS = 64;
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

inline int64_t parts_of(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

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
            const int64_t together = rows.size() <= FEW_ROWS ? width_of(rows.size()) : PANELS_TOGETHER;
            for (int64_t begin = panels.begin; begin < panels.end; begin += together) {
                int64_t end = begin + together;
                multiply_panels(rows, {begin, end < panels.end ? end : panels.end});
            }
        });
    }

  private:
    static constexpr int64_t SUMS_STRIDE = PANELS_TOGETHER * SIXTEEN;

    const T* panel_at(int64_t panel, int64_t depth) const {
        return static_cast<const T*>(call_.panels) + panel * panel_numbers_ + depth * SIXTEEN;
    }

    // Panels that are multiplied at once.
    static int width_of(int64_t rows) { return columns_beside(int(parts_of(rows, parts_of(rows, MOST_ROWS)))); }

    void multiply_panels(Range rows, Range panels) const {
        alignas(64) float sums[ROWS_TOGETHER * SUMS_STRIDE];
        begin_sums(rows, panels, sums);
        for (int64_t i = 0; i < num_depths_; i++) {
            Range depth = part_of(call_.num_inputs, num_depths_, i, 2);
            // What comes next is fetched meanwhile: the next depth, or the next panels.
            Place next = i + 1 < num_depths_ ? Place{panels.begin, depth.end} : Place{panels.end, 0};
            if (next.panel + panels.size() > num_panels_) next = {0, 0};
            multiply_depth(rows, panels, depth, next, sums);
        }
        end_sums(rows, panels, sums);
    }

    struct Place {
        int64_t panel;
        int64_t depth;
    };

    void multiply_depth(Range rows, Range panels, Range depth, Place next, float* sums) const {
        const int64_t blocks = parts_of(rows.size(), MOST_ROWS);
        const int64_t run_bytes = SIXTEEN * int64_t(sizeof(T));
        const int width = width_of(rows.size());
        for (int64_t panel = panels.begin; panel < panels.end;) {
            const int columns = panel + width <= panels.end ? width : 1;
            const T* fronts[MOST_COLUMNS];
            for (int c = 0; c < columns; c++) fronts[c] = panel_at(panel + c, depth.begin);
            const char* ahead = reinterpret_cast<const char*>(
                panel_at(next.panel + panel - panels.begin, next.depth));
            for (int64_t i = 0; i < blocks; i++) {
                Range some = part_of(rows.size(), blocks, i, 1);
                Ahead fetched{ahead + i * depth.size() * run_bytes / blocks, panel_numbers_ * int64_t(sizeof(T)),
                              parts_of(run_bytes, blocks)};
                Product<T> product{input_ + (rows.begin + some.begin) * input_stride_ + depth.begin,
                                   input_stride_,
                                   fronts,
                                   depth.size(),
                                   depth.size(),
                                   sums + some.begin * SUMS_STRIDE + (panel - panels.begin) * SIXTEEN,
                                   SUMS_STRIDE};
                multiply_block(product, int(some.size()), columns, fetched);
            }
            panel += columns;
        }
    }

    // Blocks of fewer rows than their neighbours may take more columns at once than these do: they then take one.
    static void multiply_block(Product<T> product, int rows, int columns, const Ahead& ahead) {
        if (columns == 1 || columns == columns_beside(rows)) return multiply(product, rows, columns, ahead);
        for (int c = 0; c < columns; c++) {
            multiply(product, rows, 1, ahead);
            product.panels++;
            product.out += SIXTEEN;
        }
    }

    Range outputs_of(Range panels) const {
        int64_t end = panels.end * SIXTEEN;
        return {panels.begin * SIXTEEN, end < call_.num_outputs ? end : call_.num_outputs};
    }

    void begin_sums(Range rows, Range panels, float* sums) const {
        const T* bias = static_cast<const T*>(call_.bias);
        std::memset(sums, 0, sizeof(float) * size_t(rows.size() * SUMS_STRIDE));
        if (bias == nullptr) return;
        Range outputs = outputs_of(panels);
        for (int64_t row = 0; row < rows.size(); row++)
            for (int64_t i = 0; i < outputs.size(); i++)
                sums[row * SUMS_STRIDE + i] = to_float(bias[outputs.begin + i]);
    }

    void end_sums(Range rows, Range panels, const float* sums) const {
        Range outputs = outputs_of(panels);
        for (int64_t row = 0; row < rows.size(); row++) {
            T* out = static_cast<T*>(call_.out) + (rows.begin + row) * call_.num_outputs + outputs.begin;
            for (int64_t i = 0; i < outputs.size(); i++) from_float(sums[row * SUMS_STRIDE + i], out[i]);
        }
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
