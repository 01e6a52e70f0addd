// SPDX-License-Identifier: Apache-2.0
// Instructions of sm_90a by which threads and copies wait for each other, one to a kernel: gpu/check/barriers.py.
//
// As in instructions.cu, thread i reads word i of a, b and c and writes word i of d, but for copies, where a block is one
// warp and a lane has four words. What an instruction leaves in its barrier cannot be seen, but what the barrier answers
// then. A wait gives up after TRIES, so that a phase that never ends makes wrong words.
#include "wgmma.cuh"

#define WORDS const unsigned *a_, const unsigned *b_, const unsigned *c_, unsigned *d_
constexpr int BLOCK = 4 * WARP, HALF = BLOCK / 2;
constexpr int TRIES = 1 << 20;

// --- an mbarrier for each thread; arrivals up to 1000, bytes below 2^19

#define ARRIVES(name, text)                                                                                      \
    __device__ inline Barrier name(unsigned at, unsigned n) {                                                    \
        Barrier state;                                                                                           \
        asm volatile("mbarrier." text ".shared::cta.b64 %0, [%1], %2;" : "=l"(state) : "r"(at), "r"(n) : "memory"); \
        return state;                                                                                            \
    }
ARRIVES(arrive_n, "arrive")
ARRIVES(arrive_some, "arrive.noComplete")
ARRIVES(arrive_expecting, "arrive.expect_tx")

#define COUNTS(name, text)                                                                                       \
    __device__ inline void name(unsigned at, unsigned bytes) {                                                   \
        asm volatile("mbarrier." text ".shared::cta.b64 [%0], %1;" ::"r"(at), "r"(bytes) : "memory");            \
    }
COUNTS(expect_bytes, "expect_tx.relaxed.cta")
COUNTS(complete_bytes, "complete_tx.relaxed.cta")

#define ASKS(name, text, Phase, as)                                                                              \
    __device__ inline unsigned name(unsigned at, Phase phase) {                                                  \
        unsigned ended;                                                                                          \
        asm volatile("{\n\t.reg .pred ended;\n\tmbarrier." text ".shared::cta.b64 ended, [%1], %2;\n\t"          \
                     "selp.b32 %0, 1, 0, ended;\n\t}" : "=r"(ended) : "r"(at), as(phase) : "memory");            \
        return ended;                                                                                            \
    }
ASKS(test, "test_wait", Barrier, "l")
ASKS(test_parity, "test_wait.parity", unsigned, "r")
ASKS(try_for, "try_wait", Barrier, "l")
ASKS(try_parity, "try_wait.parity", unsigned, "r")

__device__ inline unsigned pending(Barrier state) {
    unsigned n;
    asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(n) : "l"(state));
    return n;
}

#define OWN(name, arrivals, body)                                                                                \
    extern "C" __global__ void __launch_bounds__(BLOCK) name(WORDS) {                                            \
        __shared__ Barrier barriers[BLOCK];                                                                      \
        long long i = (long long)blockIdx.x * BLOCK + threadIdx.x;                                               \
        [[maybe_unused]] unsigned a = a_[i], b = b_[i], c = c_[i];                                               \
        unsigned d, n = arrivals, at = address_of(barriers + threadIdx.x);                                       \
        expect(barriers[threadIdx.x], n);                                                                        \
        body;                                                                                                    \
        asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(at) : "memory");                               \
        d_[i] = d;                                                                                               \
    }
// Of n that are expected some arrive; a quarter of the time all.
#define SOME (b % 4 ? 1 + b % n : n)
OWN(mbarrier_arrive_b64, 1 + a % 1000, Barrier state = arrive_n(at, SOME); d = pending(state) << 1 | test(at, state))
OWN(mbarrier_arrive_noComplete_b64, 2 + a % 999, unsigned some = 1 + b % (n - 1);
    Barrier state = arrive_some(at, some); d = pending(state) << 12 | test(at, state);
    state = arrive_n(at, n - some); d |= pending(state) << 2 | test(at, state) << 1)
OWN(mbarrier_try_wait_b64, 1 + a % 4, Barrier state = arrive_n(at, SOME); d = try_for(at, state))
OWN(mbarrier_test_wait_parity_b64, 1, for (unsigned j = 0; j < a % 4; j++) arrive_n(at, 1);
    d = test_parity(at, 0) | test_parity(at, 1) << 1)
OWN(mbarrier_try_wait_parity_b64, 1, for (unsigned j = 0; j < a % 4; j++) arrive_n(at, 1);
    d = try_parity(at, 0) | try_parity(at, 1) << 1)
#define BYTES (b % 4 ? b >> 13 : 0)
OWN(mbarrier_expect_tx_b64, 1, expect_bytes(at, BYTES); arrive_n(at, 1); d = test_parity(at, 0);
    if (!d) {
        unsigned part = c % (BYTES ? BYTES : 1);
        complete_bytes(at, part);
        d |= test_parity(at, 0) << 1;
        complete_bytes(at, BYTES - part);
        d |= test_parity(at, 0) << 2;
    })
OWN(mbarrier_arrive_expect_tx_b64, 1 + a % 2, Barrier state = arrive_expecting(at, BYTES);
    d = pending(state) << 4 | test(at, state); if (BYTES) complete_bytes(at, BYTES);
    d |= test(at, state) << 1; if (n > 1) arrive_n(at, 1); d |= test(at, state) << 2)

// --- a block is a warp with four words a lane, rows of 16 bytes in shared memory: copies an mbarrier waits for

// The lane's words of d: row `row`, turned over if it was waited for in vain.
__device__ inline void write_row(unsigned *d_, const unsigned *rows, int row, unsigned ended) {
    unsigned *d = d_ + 4 * (blockIdx.x * 32LL + threadIdx.x);
    for (int j = 0; j < 4; j++) d[j] = ended ? rows[4 * row + j] : ~rows[4 * row + j];
}

__device__ inline void begin(Barrier &barrier, int arrivals) {
    if (threadIdx.x == 0) {
        expect(barrier, arrivals);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
}

__device__ inline unsigned wait_a_while(Barrier &barrier, unsigned parity) {
    unsigned ended = 0;
    for (int j = 0; j < TRIES && !ended; j++) ended = try_parity(address_of(&barrier), parity);
    return ended;
}

#define COPIED(name, text)                                                                                       \
    extern "C" __global__ void __launch_bounds__(WARP) name(WORDS) {                                             \
        __shared__ __align__(16) unsigned rows[128];                                                             \
        __shared__ Barrier barrier;                                                                              \
        long long first = 4 * (blockIdx.x * 32LL + threadIdx.x);                                                 \
        begin(barrier, WARP);                                                                                    \
        copy_async(address_of(rows + 4 * threadIdx.x), a_ + first, 16);                                          \
        text;                                                                                                    \
        unsigned ended = wait_a_while(barrier, 0);                                                               \
        write_row(d_, rows, b_[first] % 32, ended);                                                              \
    }
COPIED(cp_async_mbarrier_arrive_noinc_b64, arrive_when_copied(barrier))
COPIED(cp_async_mbarrier_arrive_b64,
       asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(address_of(&barrier)) : "memory");
       arrive(barrier))

// 1 to 32 rows of a, from any row to any row, over those of c; the block's first word of b says which.
struct Run {
    unsigned rows, from, to;

    __device__ explicit Run(unsigned b) : rows(1 + b % 32), from((b >> 8) % (33 - rows)), to((b >> 16) % (33 - rows)) {}
};

extern "C" __global__ void __launch_bounds__(WARP) cp_async_bulk_shared_cluster_global(WORDS) {
    __shared__ __align__(16) unsigned rows[128];
    __shared__ Barrier barrier;
    long long first = 128LL * blockIdx.x;
    Run run(b_[first]);
    for (int j = 0; j < 4; j++) rows[4 * threadIdx.x + j] = c_[first + 4 * threadIdx.x + j];
    show_to_products();
    begin(barrier, 1);
    if (threadIdx.x == 0) {
        arrive_expecting(address_of(&barrier), 16 * run.rows);
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     ::"r"(address_of(rows + 4 * run.to)), "l"(a_ + first + 4 * run.from), "r"(16 * run.rows),
                     "r"(address_of(&barrier)) : "memory");
    }
    unsigned ended = wait_a_while(barrier, 0);
    write_row(d_, rows, threadIdx.x, ended);
}

#define BULK_STORE(name, read)                                                                                   \
    extern "C" __global__ void __launch_bounds__(WARP) name(WORDS) {                                             \
        __shared__ __align__(16) unsigned rows[128];                                                             \
        long long first = 128LL * blockIdx.x;                                                                    \
        Run run(b_[first]);                                                                                      \
        for (int j = 0; j < 4; j++) rows[4 * threadIdx.x + j] = a_[first + 4 * threadIdx.x + j];                 \
        show_to_products();                                                                                      \
        __syncthreads();                                                                                         \
        if (threadIdx.x - run.to >= run.rows)                                                                    \
            for (int j = 0; j < 4; j++) d_[first + 4 * threadIdx.x + j] = c_[first + 4 * threadIdx.x + j];       \
        if (threadIdx.x == 0) {                                                                                  \
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"                           \
                         ::"l"(d_ + first + 4 * run.to), "r"(address_of(rows + 4 * run.from)), "r"(16 * run.rows) \
                         : "memory");                                                                            \
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");                                            \
            asm volatile("cp.async.bulk.wait_group" read " 0;" ::: "memory");                                    \
        }                                                                                                        \
    }
BULK_STORE(cp_async_bulk_global_shared_cta, "")
BULK_STORE(cp_async_bulk_global_shared_cta_wait_read, ".read")

// --- named barriers: the halves of a block meet, each at one that its first word of a names

#define HALVES(name, body)                                                                                       \
    extern "C" __global__ void __launch_bounds__(BLOCK) name(WORDS) {                                            \
        __shared__ unsigned words[BLOCK];                                                                        \
        int thread = threadIdx.x, first = thread / HALF * HALF;                                                  \
        long long block = (long long)blockIdx.x * BLOCK;                                                         \
        [[maybe_unused]] unsigned a = a_[block + thread], b = b_[block + thread], c = c_[block + thread];        \
        unsigned d, barrier = first ? 8 + a_[block + first] % 8 : 1 + a_[block] % 7;                             \
        words[thread] = c;                                                                                       \
        body;                                                                                                    \
        d_[block + thread] = d;                                                                                  \
    }
HALVES(bar_sync, meet(barrier, HALF); d = words[first + (thread + b) % HALF])
HALVES(bar_arrive, barrier = 1 + a_[block] % 15;
       if (first) meet(barrier, BLOCK); else asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(BLOCK) : "memory");
       d = first ? words[b % HALF] : c)
HALVES(bar_red_popc_u32,
       asm volatile("{ .reg .pred p; setp.lt.u32 p, %1, %2; bar.red.popc.u32 %0, %3, %4, p; }"
                    : "=r"(d) : "r"(a), "r"(b), "r"(barrier), "n"(HALF) : "memory"))
#define VOTE(name, text, compare)                                                                                \
    HALVES(name, asm volatile("{ .reg .pred p, q; setp." compare ".u32 p, %1, 0; bar.red." text ".pred q, %2, %3, p; " \
                              "selp.b32 %0, 1, 0, q; }"                                                          \
                              : "=r"(d) : "r"(a % HALF), "r"(barrier), "n"(HALF) : "memory"))
VOTE(bar_red_and_pred, "and", "ne")
VOTE(bar_red_or_pred, "or", "eq")

// --- a leader of some lanes of a warp, and how many registers it has

extern "C" __global__ void __launch_bounds__(BLOCK) elect_sync(WORDS) {
    long long i = (long long)blockIdx.x * BLOCK + threadIdx.x, warp = i - threadIdx.x % WARP;
    unsigned lanes = b_[warp] & (c_[warp] | a_[warp]), leader = 0, elected = 0;
    if (lanes >> threadIdx.x % WARP & 1)
        asm volatile("{ .reg .pred p; elect.sync %0|p, %2; selp.b32 %1, 1, 0, p; }"
                     : "=r"(leader), "=r"(elected) : "r"(lanes));
    d_[i] = leader << 1 | elected;
}

constexpr int KEPT = 20;    // words of a thread that outlive the change

extern "C" __global__ void __launch_bounds__(4 * WARPGROUP, 1) setmaxnreg_sync_aligned_u32(WORDS) {
    long long i = (long long)blockIdx.x * 4 * WARPGROUP + threadIdx.x;
    unsigned x[KEPT], d = 0;
    for (int j = 0; j < KEPT; j++) x[j] = (a_[i] ^ b_[i] * (2 * j + 1)) + c_[i];
    for (int j = 0; j < KEPT; j++) asm volatile("" : "+r"(x[j])::"memory");
    if (threadIdx.x < WARPGROUP)
        keep_registers<40>();
    else
        take_registers<152>();
    for (int j = 0; j < KEPT; j++) asm volatile("" : "+r"(x[j])::"memory");
    for (int j = 0; j < KEPT; j++) d = d * 31 + x[j];
    d_[i] = d;
}
