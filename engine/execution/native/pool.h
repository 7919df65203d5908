// Where keys and values lie.
//
// Law: sixteen slots that follow each other make a group, and for each of its KV heads a group is one run of
// memory: the keys, [size][16 tokens], then the values, [value size / 16][16 tokens][16 sizes]. So a vector
// holds one number of sixteen keys, or sixteen numbers of one value, and no sum across a vector is needed. In
// bfloat16 two numbers that are multiplied one after the other lie side by side in a word, keys
// [size / 2][16 tokens][2], values [value size / 16][8 pairs of tokens][16 sizes][2], from which a shift and a
// mask make two vectors of float32. A key's size is filled up to an even number, a value's to sixteen.
#pragma once

#include "vectors.h"

namespace {

struct Shape {
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t value_dim;

    int64_t padded_head_dim() const { return (head_dim + 1) / 2 * 2; }
    int64_t padded_value_dim() const { return (value_dim + SIXTEEN - 1) / SIXTEEN * SIXTEEN; }
    // Numbers of one KV head in a group, and before the first value among them.
    int64_t head_numbers() const { return (padded_head_dim() + padded_value_dim()) * SIXTEEN; }
    int64_t key_numbers() const { return padded_head_dim() * SIXTEEN; }
};

inline int64_t key_place(const float*, int64_t size, int64_t token) { return size * SIXTEEN + token; }

inline int64_t key_place(const BFloat16*, int64_t size, int64_t token) {
    return (size / 2 * SIXTEEN + token) * 2 + size % 2;
}

inline int64_t value_place(const float*, int64_t size, int64_t token) {
    return (size / SIXTEEN * SIXTEEN + token) * SIXTEEN + size % SIXTEEN;
}

inline int64_t value_place(const BFloat16*, int64_t size, int64_t token) {
    return size / SIXTEEN * SIXTEEN * SIXTEEN + (token / 2 * SIXTEEN + size % SIXTEEN) * 2 + token % 2;
}

template <typename T>
T* head_at(T* pool, const Shape& shape, int64_t group, int64_t kv_head) {
    return pool + (group * shape.num_kv_heads + kv_head) * shape.head_numbers();
}

// One token's key and value of one KV head. What fills a size up is 0: it is multiplied with 0.
template <typename T>
void put(T* head, const Shape& shape, int64_t token, const T* key, const T* value) {
    for (int64_t i = 0; i < shape.head_dim; i++) head[key_place(head, i, token)] = key[i];
    if (shape.head_dim % 2) head[key_place(head, shape.head_dim, token)] = T{};
    T* values = head + shape.key_numbers();
    for (int64_t i = 0; i < shape.value_dim; i++) values[value_place(head, i, token)] = value[i];
    for (int64_t i = shape.value_dim; i < shape.padded_value_dim(); i++)
        values[value_place(head, i, token)] = T{};
}

// The same from one place in a group to another.
template <typename T>
void move(T* to, int64_t to_token, const T* from, int64_t from_token, const Shape& shape) {
    for (int64_t i = 0; i < shape.padded_head_dim(); i++)
        to[key_place(to, i, to_token)] = from[key_place(from, i, from_token)];
    to += shape.key_numbers();
    from += shape.key_numbers();
    for (int64_t i = 0; i < shape.padded_value_dim(); i++)
        to[value_place(to, i, to_token)] = from[value_place(from, i, from_token)];
}

template <typename T>
void forget(T* head, const Shape& shape, int64_t token) {
    for (int64_t i = 0; i < shape.padded_head_dim(); i++) head[key_place(head, i, token)] = T{};
    T* values = head + shape.key_numbers();
    for (int64_t i = 0; i < shape.padded_value_dim(); i++) values[value_place(head, i, token)] = T{};
}

}  // namespace
