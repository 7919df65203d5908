// Layout of the KV pool.
//
// PANEL = 16 consecutive slots form a group. For each KV head a group stores the keys, [size][16 tokens], then the
// values, [value size / 16][16 tokens][16 elements]. A vector holds one element of 16 keys or 16 elements of one
// value, so no horizontal sums are needed. In bfloat16 two elements that are multiplied consecutively share a word:
// keys [size / 2][16 tokens][2], values [value size / 16][8 pairs of tokens][16 elements][2]; a shift and a mask
// make two float32 vectors. Key sizes are padded to even numbers, value sizes to multiples of 16.
#pragma once

#include "vectors.h"

namespace {

struct Shape {
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t value_dim;

    int64_t padded_head_dim() const { return (head_dim + 1) / 2 * 2; }
    int64_t padded_value_dim() const { return (value_dim + PANEL - 1) / PANEL * PANEL; }
    // Elements of one KV head in a group, and of its keys alone.
    int64_t head_numel() const { return (padded_head_dim() + padded_value_dim()) * PANEL; }
    int64_t key_numel() const { return padded_head_dim() * PANEL; }
};

inline int64_t key_index(const float*, int64_t size, int64_t token) { return size * PANEL + token; }

inline int64_t key_index(const BFloat16*, int64_t size, int64_t token) {
    return (size / 2 * PANEL + token) * 2 + size % 2;
}

inline int64_t value_index(const float*, int64_t size, int64_t token) {
    return (size / PANEL * PANEL + token) * PANEL + size % PANEL;
}

inline int64_t value_index(const BFloat16*, int64_t size, int64_t token) {
    return size / PANEL * PANEL * PANEL + (token / 2 * PANEL + size % PANEL) * 2 + token % 2;
}

template <typename T>
T* head_at(T* pool, const Shape& shape, int64_t group, int64_t kv_head) {
    return pool + (group * shape.num_kv_heads + kv_head) * shape.head_numel();
}

// Stores one token's key and value of one KV head. Padding is 0.
template <typename T>
void put(T* head, const Shape& shape, int64_t token, const T* key, const T* value) {
    for (int64_t i = 0; i < shape.head_dim; i++) head[key_index(head, i, token)] = key[i];
    if (shape.head_dim % 2) head[key_index(head, shape.head_dim, token)] = T{};
    T* values = head + shape.key_numel();
    for (int64_t i = 0; i < shape.value_dim; i++) values[value_index(head, i, token)] = value[i];
    for (int64_t i = shape.value_dim; i < shape.padded_value_dim(); i++)
        values[value_index(head, i, token)] = T{};
}

// Copies a token between groups.
template <typename T>
void move(T* to, int64_t to_token, const T* from, int64_t from_token, const Shape& shape) {
    for (int64_t i = 0; i < shape.padded_head_dim(); i++)
        to[key_index(to, i, to_token)] = from[key_index(from, i, from_token)];
    to += shape.key_numel();
    from += shape.key_numel();
    for (int64_t i = 0; i < shape.padded_value_dim(); i++)
        to[value_index(to, i, to_token)] = from[value_index(from, i, from_token)];
}

template <typename T>
void zero(T* head, const Shape& shape, int64_t token) {
    for (int64_t i = 0; i < shape.padded_head_dim(); i++) head[key_index(head, i, token)] = T{};
    T* values = head + shape.key_numel();
    for (int64_t i = 0; i < shape.padded_value_dim(); i++) values[value_index(head, i, token)] = T{};
}

}  // namespace
