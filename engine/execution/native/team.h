// Parallel loops on torch's threads, through a function of torch's OpenMP runtime that the caller passes.
//
// The assignment of iterations to threads is dynamic, so results must not depend on it.
#pragma once

#include <atomic>
#include <cstdint>

extern "C" {

// As GOMP_parallel.
typedef void (*RunTeam)(void (*work)(void*), void* data, unsigned threads, unsigned flags);
}

namespace {

// `run` is unused with one thread.
struct Team {
    RunTeam run;
    int64_t threads;
};

// Calls body(0) to body(count - 1) once each, on up to `threads` threads.
template <typename Body>
void for_each(const Team& team, int64_t count, const Body& body) {
    struct Share {
        const Body& body;
        int64_t count;
        std::atomic<int64_t> next;
    } share{body, count, {0}};
    auto work = [](void* data) {
        Share& mine = *static_cast<Share*>(data);
        for (int64_t i; (i = mine.next.fetch_add(1, std::memory_order_relaxed)) < mine.count;) mine.body(i);
    };
    int64_t threads = team.threads < count ? team.threads : count;
    if (threads > 1)
        team.run(work, &share, unsigned(threads), 0);
    else
        work(&share);
}

// Elements that a thread takes at a time, and below which a second thread costs more than it saves.
constexpr int64_t PIECE = 8192;
constexpr int64_t MIN_SHARED = 4 * PIECE;

// Calls body(row) for every row of `size` elements.
template <typename Body>
void for_each_row(RunTeam run_team, int64_t threads, int64_t rows, int64_t size, const Body& body) {
    Team team{run_team, rows * size < MIN_SHARED ? 1 : threads};
    int64_t each = size < PIECE ? PIECE / size : 1;
    for_each(team, (rows + each - 1) / each, [&](int64_t piece) {
        int64_t end = (piece + 1) * each < rows ? (piece + 1) * each : rows;
        for (int64_t row = piece * each; row < end; row++) body(row);
    });
}

}  // namespace
