// Rotary position embeddings: each query and key of a token is turned by the angles of its position.
//
// Law: the bits are those of x * cos + cat(-x2, x1) * sin as torch computes it, product by product, each rounded
// to the tensors' type. So nothing changes but the time.
//
// The interface is plain C, as that of attention.cpp.

#include "elements.h"
#include "team.h"

extern "C" {

// Numbers of a head stand side by side. All strides count numbers.
struct TokenmillRotary {
    const void* query;  // [rows, heads, size]
    const void* key;    // [rows, kv heads, size]
    const void* cosine;  // [rows, size]
    const void* sine;    // [rows, size]
    void* out;           // [rows, heads + kv heads, size], contiguous
    int64_t query_strides[2];
    int64_t key_strides[2];
    int64_t angle_strides[2];  // of cosine's rows, of sine's
    int64_t num_rows;
    int64_t num_heads;
    int64_t num_kv_heads;
    int64_t size;  // even
    int64_t threads;
    RunTeam run_team;
};
}

namespace {

// A product as it is when it is rounded. The compiler must not make one operation of it and the sum it is for.
template <typename T>
inline Floats product(Floats left, Floats right) {
    return rounded<T>(left * right);
}

template <>
inline Floats product<float>(Floats left, Floats right) {
    Floats value = left * right;
#if defined(__x86_64__)
    asm("" : "+x"(value));
#elif defined(__aarch64__)
    asm("" : "+w"(value));
#else
    asm("" : "+m"(value));
#endif
    return value;
}

template <typename T>
void rotate_head(const T* x, const T* cosine, const T* sine, T* out, int64_t half) {
    auto rotate = [](Floats first, Floats second, const Floats* cosines, const Floats* sines, Floats* to) {
        to[0] = product<T>(first, cosines[0]) - product<T>(second, sines[0]);
        to[1] = product<T>(second, cosines[1]) + product<T>(first, sines[1]);
    };
    int64_t i = 0;
    Floats turned[2];
    for (; i + LANES <= half; i += LANES) {
        Floats cosines[2] = {load(cosine + i), load(cosine + half + i)};
        Floats sines[2] = {load(sine + i), load(sine + half + i)};
        rotate(load(x + i), load(x + half + i), cosines, sines, turned);
        store(out + i, turned[0]);
        store(out + half + i, turned[1]);
    }
    if (i == half) return;
    const int64_t rest = half - i;
    Floats cosines[2] = {load_part(cosine + i, rest), load_part(cosine + half + i, rest)};
    Floats sines[2] = {load_part(sine + i, rest), load_part(sine + half + i, rest)};
    rotate(load_part(x + i, rest), load_part(x + half + i, rest), cosines, sines, turned);
    store_part(out + i, turned[0], rest);
    store_part(out + half + i, turned[1], rest);
}

template <typename T>
void rotate_rows(const TokenmillRotary& call) {
    const int64_t heads = call.num_heads + call.num_kv_heads, row_numbers = heads * call.size;
    if (call.num_rows * row_numbers == 0) return;
    for_each_row(call.run_team, call.threads, call.num_rows, row_numbers, [&](int64_t row) {
        const T* cosine = static_cast<const T*>(call.cosine) + row * call.angle_strides[0];
        const T* sine = static_cast<const T*>(call.sine) + row * call.angle_strides[1];
        const T* query = static_cast<const T*>(call.query) + row * call.query_strides[0];
        const T* key = static_cast<const T*>(call.key) + row * call.key_strides[0];
        T* out = static_cast<T*>(call.out) + row * row_numbers;
        for (int64_t head = 0; head < call.num_heads; head++, out += call.size)
            rotate_head(query + head * call.query_strides[1], cosine, sine, out, call.size / 2);
        for (int64_t head = 0; head < call.num_kv_heads; head++, out += call.size)
            rotate_head(key + head * call.key_strides[1], cosine, sine, out, call.size / 2);
    });
}

}  // namespace

extern "C" {

void tokenmill_rotate_float32(const TokenmillRotary* call) { rotate_rows<float>(*call); }
void tokenmill_rotate_bfloat16(const TokenmillRotary* call) { rotate_rows<BFloat16>(*call); }
}
