// Work that is shared among threads.
//
// Law: the threads are those of torch's own pool, so that no second pool stands on the same cores: the caller
// hands over the function of torch's OpenMP runtime. Who does what is not settled beforehand, so results must
// not depend on it.
#pragma once

#include <atomic>
#include <cstdint>

extern "C" {

// As GOMP_parallel.
typedef void (*RunTeam)(void (*work)(void*), void* data, unsigned threads, unsigned flags);
}

namespace {

// `run` is not used by a team of one.
struct Team {
    RunTeam run;
    int64_t threads;
};

// Calls body(0) to body(count - 1), each once, on up to all threads of the team.
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

}  // namespace
