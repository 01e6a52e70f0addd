// SPDX-License-Identifier: Apache-2.0
// Paged form on the tensor cores of sm_90a: what paged_mma.cu does for plain rows of pages, by two warpgroups.
//
//   rows      the T x H queries of a request in order, ROWS to a block, so that a latent row is read once for all
//   tiles     KEYS latent rows in shared memory, two of them: a third warpgroup copies each as soon as it is free
//   scores    Q K^T of a tile's keys by one warpgroup, base 2, softmax_scale * log2(e) folded in: the even tiles by the
//             first, the odd ones by the second
//   weights   P = 2^(score - m), rounded to the cache's dtype, in shared memory: where the tile's last columns were, no
//             values and read no more, or behind them
//   values    P V by both, each half of the columns, V the same tile, read across its rows
//
// The schedule is the seesaw: while one warpgroup weighs a tile, the tensor cores form the other's scores or values.
//
//   first     scores 0   weights 0   values 0             values 1               scores 2 ...
//   second    scores 1               values 0             weights 1   values 1   scores 3 ...
//
// D and V are given by the compiler's command line: D a multiple of 64, V 128, 256 or 512, rows 16-byte aligned.
//
// What it takes at D = 576 and V = 512, by arithmetic and not by measurement. Of each key a block reads 2 D bytes and
// computes 2 ROWS (D + V) operations, which is the least if T x H is a multiple of ROWS; groups of rows of a request
// share the read where L2 keeps it. Besides, a block reads ROWS queries and writes ROWS states of 4 V bytes, which are
// read again where splits are combined. Nanoseconds a key of a request while every multiprocessor works:
//   memory   from it once / once for each group, at 3.35 4.8 TB/s as published
//   tensor   at 989 TFLOP/s dense
//   shared   4.75 KiB a key and group at 128 bytes a cycle, no bank conflicts
//
//                rows keys  shared  registers   T x H = 16              64                      128
//   H100 sm_90a   64   64   218 KiB    168      .34/.34 .14 .16 memory  .34/.34 .14 .16 memory  .34/.69 .28 .31 memory
//   H200 sm_90a   64   64   218 KiB    168      .24/.24 .14 .16 memory  .24/.24 .14 .16 memory  .24/.48 .28 .31 shared
//
// Nothing hides the weights of a pair's first tile but the scores of its second, and a tile is copied only when both
// warpgroups have done with the one two before it. A thread that computes takes 232 registers, one that copies keeps 40.
//
// Decode takes splits of 512 keys whatever the batch and the machine: the bits of a row must not depend on them. Those
// that would fill the machine, by split_keys in gpu/paged_mma.py (one block at a time a multiprocessor), are what
// gpu.check times besides, and nothing else runs: of 32k keys at B = 1 and T x H = 16, 64, 128, an H100 and an H200 take
// 256, 256, 512; at B = 128 all of them.
#ifndef D
#define D 576
#define V 512
#endif
#include "splits.cuh"
#include "wgmma.cuh"

constexpr float LOG2E = 1.44269504088896341f;

constexpr int ROWS = BOX;
constexpr int KEYS = BOX;
constexpr int STAGES = 2;                           // tiles in shared memory
constexpr int GROUPS = 2;                           // warpgroups that compute; behind them is the one that copies
constexpr int MMA_THREADS = (GROUPS + 1) * WARPGROUP;
constexpr int LOADERS = 8;                          // threads that copy a row
constexpr int COPIES = KEYS * LOADERS / WARPGROUP;  // rows of a tile that a thread has a part in
constexpr int COLUMNS = V / GROUPS;                 // of a warpgroup's values
constexpr int ROW_BOXES = D / BOX;
constexpr int WEIGHTS_BOX = D > V ? ROW_BOXES - 1 : V / BOX;
constexpr int TILE_BYTES = (WEIGHTS_BOX + 1) * BOX_BYTES;
static_assert(D % BOX == 0 && V % (GROUPS * BOX) == 0 && V <= D, "whole boxes for both");

struct Shared {
    unsigned char tiles[STAGES][TILE_BYTES];
    unsigned char queries[ROW_BOXES * BOX_BYTES];
    float maximum[STAGES][ROWS];                    // of the scores so far, this tile's included
    float rescale[STAGES][ROWS];                    // what values summed before this tile are worth
    float sums[GROUPS][ROWS];
    Barrier there;                                  // the queries are
    Barrier copied[STAGES];                         // the tile is there,
    Barrier weighed[STAGES];                        // so are its weights,
    Barrier done[STAGES];                           // and nobody reads it any more
};

template <typename Stored>
struct Problem {
    const Stored *q;                // [B, T, H, D]
    const Stored *kv_cache;         // [num_blocks, block_size, D]
    const int *block_table;         // [B, max_blocks]
    const int *seq_lens;            // [B]
    float scale;                    // softmax_scale * log2(e)
    int causal;
    float *partial_out;             // [B T, H, splits, V], contiguous
    float *partial_max;             // [B T, H, splits], contiguous
    float *partial_sum;             // [B T, H, splits], contiguous
    int T, H, block_size, split_keys;
    long long q_request, q_token, q_head, cache_block, cache_row, table_request;
};

struct Part {                       // what a block does
    int b, group, split;            // the request, its first row, the split
    int begin, end, tiles;          // keys, and tiles of them
};

// Copy ROWS queries from the group's first on; rows past the last are zeros.
template <typename Stored>
__device__ inline void copy_queries(const Problem<Stored> &p, const Part &part, Shared &shared) {
    for (int i = threadIdx.x; i < ROWS * (D / PER_CHUNK); i += GROUPS * WARPGROUP) {
        int row = i / (D / PER_CHUNK), chunk = i % (D / PER_CHUNK), r = part.group + row;
        bool is = r < p.T * p.H;
        const Stored *from = p.q;
        if (is) from += part.b * p.q_request + r / p.H * p.q_token + r % p.H * p.q_head + chunk * PER_CHUNK;
        copy_async(address_of(shared.queries) + in_tile(row, chunk), from, is ? CHUNK : 0);
    }
    arrive_when_copied(shared.there);
}

// Copy one tile after another, as each is done with; rows from `end` on are zeros. LOADERS threads copy a row.
template <typename Stored>
__device__ inline void copy_tiles(const Problem<Stored> &p, const Part &part, Shared &shared) {
    int chunk = threadIdx.x % LOADERS;
    for (int i = 0; i < part.tiles; i++) {
        const Stored *begins[COPIES];
        for (int k = 0; k < COPIES; k++) {
            int j = part.begin + i * KEYS + k * (WARPGROUP / LOADERS) + threadIdx.x % WARPGROUP / LOADERS;
            begins[k] = nullptr;
            if (j >= part.end) continue;
            int block = p.block_table[part.b * p.table_request + j / p.block_size];
            begins[k] = p.kv_cache + block * p.cache_block + j % p.block_size * p.cache_row;
        }
        if (i >= STAGES) wait(shared.done[i % STAGES], i / STAGES - 1 & 1);
        for (int k = 0; k < COPIES; k++) {
            int key = k * (WARPGROUP / LOADERS) + threadIdx.x % WARPGROUP / LOADERS;
            unsigned to = address_of(shared.tiles[i % STAGES]) + in_tile(key, chunk);
            const Stored *row = (begins[k] ? begins[k] : p.kv_cache) + chunk * PER_CHUNK;
            for (int box = 0; box < ROW_BOXES; box++)
                copy_async(to + box * BOX_BYTES, row + box * BOX, begins[k] ? CHUNK : 0);
        }
        arrive_when_copied(shared.copied[i % STAGES]);
    }
}

// s [ROWS, KEYS] = Q K^T of a tile, when it is there. It was copied when all had done with the one before, but a copy's
// arrival tells nothing else: who writes to the tile has to know.
template <typename Stored>
__device__ inline void scores(Shared &shared, int stage, int pair, float (&s)[KEYS / 2]) {
    wait(shared.copied[stage], pair & 1);
    if (pair > 0) wait(shared.done[stage], pair - 1 & 1);
    show_to_products();
    unsigned long long a = matrix_at(address_of(shared.queries)), b = matrix_at(address_of(shared.tiles[stage]));
    before_products();
    #pragma unroll
    for (int column = 0; column < D; column += STEP) {
        unsigned at = (column / BOX * BOX_BYTES + column % BOX * 2) / CHUNK;
        multiply<0>(s, a + at, b + at, column > 0, Stored());
    }
    end_of_products();
    wait_for_products(s);
}

// Begin acc [ROWS, COLUMNS] of warpgroup `mine`, when the tile's weights are there: rescaled, plus P V.
template <typename Stored>
__device__ inline void begin_values(Shared &shared, int stage, int pair, int mine, float (&acc)[COLUMNS / 2]) {
    int lane = threadIdx.x % WARP, row = threadIdx.x % WARPGROUP / WARP * 16 + lane / 4;
    wait(shared.weighed[stage], pair & 1);
    float upper = shared.rescale[stage][row], lower = shared.rescale[stage][row + 8];
    for (int i = 0; i < COLUMNS / 2; i++) acc[i] *= i % 4 < 2 ? upper : lower;
    unsigned tile = address_of(shared.tiles[stage]);
    unsigned long long a = matrix_at(tile + WEIGHTS_BOX * BOX_BYTES);
    unsigned long long b = matrix_at(tile + mine * (COLUMNS / BOX) * BOX_BYTES);
    before_products();
    #pragma unroll
    for (int key = 0; key < KEYS; key += STEP)
        multiply<1>(acc, a + key * 2 / CHUNK, b + key * ROW_OF_BOX / CHUNK, 1, Stored());
    end_of_products();
}

// Until no products of this warpgroup are under way: it has done with the tile.
__device__ inline void end_values(Shared &shared, int stage, float (&acc)[COLUMNS / 2]) {
    wait_for_products(acc);
    if (threadIdx.x % WARP == 0) arrive(shared.done[stage]);
}

// A quarter of the tile's values: those that are not finite become 0. A row that sees one is NaN by its score, others
// weigh it 0. Each of four warps has scores of every key, so that all of them meet a row that is not finite.
template <typename Stored>
__device__ inline void scrub(unsigned char *tile) {
    unsigned exponent = exponent_of(Stored());
    for (int i = threadIdx.x % WARPGROUP; i < KEYS * (V / PER_CHUNK); i += WARPGROUP) {
        uint4 *at = (uint4 *)(tile + in_tile(i / (V / PER_CHUNK), i % (V / PER_CHUNK)));
        uint4 x = *at;
        *at = make_uint4(finite_or_zero(x.x, exponent), finite_or_zero(x.y, exponent), finite_or_zero(x.z, exponent),
                         finite_or_zero(x.w, exponent));
    }
}

// What a warpgroup keeps of rows lane/4 and lane/4 + 8 of each warp.
struct Softmax {
    int visible[2];                 // keys that they see
    float m[2], l[2];               // the maximum at the last tile it weighed, a lane's part of the sum of these
};

// Weights of the scores of the tile that begins at key `first`.
template <typename Stored>
__device__ inline void weigh(const Problem<Stored> &p, Shared &shared, int stage, int first, bool is_first,
                             float (&s)[KEYS / 2], Softmax &rows) {
    int lane = threadIdx.x % WARP, row = threadIdx.x % WARPGROUP / WARP * 16 + lane / 4;
    unsigned char *weights = shared.tiles[stage] + WEIGHTS_BOX * BOX_BYTES;
    bool odd = false;
    float top[2] = {-INF, -INF};
    for (int i = 0; i < KEYS / 2; i++) {
        int key = first + i / 4 * 8 + lane % 4 * 2 + i % 2, half = i % 4 / 2;
        odd |= !(fabsf(s[i]) < INF);
        s[i] = key < rows.visible[half] ? s[i] * p.scale : -INF;
        top[half] = fmaxf(top[half], s[i]);
    }
    meet(1 + stage, WARPGROUP);     // its products have ended in every warp: the tile may be written to
    if (__any_sync(~0u, odd)) scrub<Stored>(shared.tiles[stage]);

    for (int half = 0; half < 2; half++) {
        top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 1));
        top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 2));
        float before = is_first ? -INF : shared.maximum[stage ^ 1][row + 8 * half];
        float m = fmaxf(before, top[half]);
        rows.l[half] *= rows.m[half] == -INF ? 0 : exp2f(rows.m[half] - m);
        rows.m[half] = m;
        if (lane % 4 == 0) {
            shared.maximum[stage][row + 8 * half] = m;
            shared.rescale[stage][row + 8 * half] = before == -INF ? 0 : exp2f(before - m);
        }
        for (int i = 2 * half; i < KEYS / 2; i += 4) {
            float weight[2];
            for (int e = 0; e < 2; e++) {
                weight[e] = s[i + e] == -INF ? 0 : exp2f(s[i + e] - m);
                rows.l[half] += weight[e];
            }
            *(unsigned *)(weights + in_tile(row + 8 * half, i / 4) + lane % 4 * 4) =
                pack(weight[0], weight[1], Stored());
        }
    }
    show_to_products();
    __syncwarp();
    if (lane == 0) arrive(shared.weighed[stage]);
}

// Warpgroup MINE of a block: weights of the tiles MINE, MINE + 2, ..., values of all, its part of the partial states.
template <int MINE, typename Stored>
__device__ inline void attend(const Problem<Stored> &p, const Part &part, Shared &shared) {
    int lane = threadIdx.x % WARP, row = threadIdx.x % WARPGROUP / WARP * 16 + lane / 4, len = p.seq_lens[part.b];
    Softmax rows;
    for (int half = 0; half < 2; half++) {
        int t = (part.group + row + 8 * half) / p.H;
        rows.visible[half] = min(part.end, p.causal ? len - p.T + t + 1 : len);
        rows.m[half] = -INF;
        rows.l[half] = 0;
    }
    float acc[COLUMNS / 2] = {}, s[KEYS / 2];

    copy_queries(p, part, shared);
    wait(shared.there, 0);
    for (int pair = 0; 2 * pair < part.tiles; pair++) {
        int first = part.begin + (2 * pair + MINE) * KEYS;
        bool both = 2 * pair + 1 < part.tiles;
        if (MINE == 0) {
            scores<Stored>(shared, 0, pair, s);
            weigh(p, shared, 0, first, pair == 0, s, rows);
            begin_values<Stored>(shared, 0, pair, 0, acc);
        } else {
            if (both) scores<Stored>(shared, 1, pair, s);
            begin_values<Stored>(shared, 0, pair, 1, acc);
            if (both) weigh(p, shared, 1, first, false, s, rows);
        }
        end_values(shared, 0, acc);
        if (!both) break;
        begin_values<Stored>(shared, 1, pair, MINE, acc);
        end_values(shared, 1, acc);
    }

    float *maximum = shared.maximum[(part.tiles - 1) % STAGES];
    for (int half = 0; half < 2; half++) {
        float sum = rows.l[half] * (rows.m[half] == -INF ? 0 : exp2f(rows.m[half] - maximum[row + 8 * half]));
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (lane % 4 == 0) shared.sums[MINE][row + 8 * half] = sum;
    }
    meet(1 + GROUPS, GROUPS * WARPGROUP);

    long long state = ((long long)part.b * p.T * p.H + part.group) * gridDim.y + part.split;    // of the first row
    for (int half = 0; half < 2; half++) {
        int r = row + 8 * half;
        if (part.group + r >= p.T * p.H) continue;
        long long at = state + (long long)r * gridDim.y;
        if (MINE == 0 && lane % 4 == 0) {
            p.partial_max[at] = maximum[r] / LOG2E;
            p.partial_sum[at] = shared.sums[0][r] + shared.sums[1][r];
        }
        float *out = p.partial_out + at * V + MINE * COLUMNS + lane % 4 * 2;
        for (int i = 2 * half; i < COLUMNS / 2; i += 4) *(float2 *)(out + i / 4 * 8) = make_float2(acc[i], acc[i + 1]);
    }
}

// Fill the partial states of one split: a block per group of ROWS queries, split and request.
template <typename Stored>
__device__ inline void decode(const Problem<Stored> &p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared &shared = *(Shared *)memory;
    Part part;
    part.group = blockIdx.x * ROWS, part.split = blockIdx.y, part.b = blockIdx.z;
    int rows = min(ROWS, p.T * p.H - part.group), len = p.seq_lens[part.b];
    int last = p.causal ? len - p.T + (part.group + rows - 1) / p.H + 1 : len;  // keys that the last row sees
    int keys = keys_of_split(len, p.split_keys);
    part.begin = part.split * keys;
    if (part.begin >= last) return;
    part.end = part.begin + min(keys, last - part.begin);
    part.tiles = (part.end - part.begin - 1) / KEYS + 1;

    if (threadIdx.x == 0) {
        expect(shared.there, GROUPS * WARPGROUP);
        for (int stage = 0; stage < STAGES; stage++) {
            expect(shared.copied[stage], WARPGROUP);
            expect(shared.weighed[stage], WARPGROUP / WARP);
            expect(shared.done[stage], GROUPS * WARPGROUP / WARP);
        }
    }
    __syncthreads();
    int warpgroup = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    if (warpgroup == GROUPS) {
        keep_registers<40>();
        copy_tiles(p, part, shared);
    } else {
        take_registers<232>();
        if (warpgroup == 0)
            attend<0>(p, part, shared);
        else
            attend<1>(p, part, shared);
    }
}

#define KERNEL(Stored)                                                                                           \
    DYNAMIC_SMEM(paged_wgmma_##Stored, sizeof(Shared))                                                           \
    extern "C" __global__ void __launch_bounds__(MMA_THREADS, 1) paged_wgmma_##Stored(                           \
        const Stored *q,            /* [B, T, H, D] */                                                           \
        const Stored *kv_cache,     /* [num_blocks, block_size, D] */                                            \
        const int *block_table,     /* [B, max_blocks] */                                                        \
        const int *seq_lens,        /* [B] */                                                                    \
        float softmax_scale,                                                                                     \
        int causal,                                                                                              \
        float *partial_out,         /* [B T, H, splits, V], contiguous */                                        \
        float *partial_max,         /* [B T, H, splits], contiguous */                                           \
        float *partial_sum,         /* [B T, H, splits], contiguous */                                           \
        int T, int H, int block_size, int split_keys,                                                            \
        long long q_request, long long q_token, long long q_head,                                                \
        long long cache_block, long long cache_row, long long table_request                                      \
    ) {                                                                                                          \
        decode(Problem<Stored>{q, kv_cache, block_table, seq_lens, softmax_scale * LOG2E, causal, partial_out,   \
                               partial_max, partial_sum, T, H, block_size, split_keys, q_request, q_token,       \
                               q_head, cache_block, cache_row, table_request});                                  \
    }

KERNEL(f16)
KERNEL(bf16)
