// SPDX-License-Identifier: Apache-2.0
// Paged form on tensor cores, for f16 and bf16 caches: the splits of paged.cu, many rows of queries at a time.
//
//   rows      the T x H queries of a request in order, ROWS to a block, so that a latent row is read once for all
//   tile      KEYS latent rows in shared memory, two of them: while one is computed with, the next is copied; of packed
//             rows (see rows.cuh) one, and the next as it is stored
//   scores    warps side by side over the keys: Q K^T, base 2, softmax_scale * log2(e) folded in
//   weights   P = 2^(score - m), rounded to the cache's dtype, in shared memory
//   values    warps side by side over the columns: P V, V the same tile, turned round by ldmatrix
//
// D, V, ROWS and KEYS are given by the compiler's command line: D and V multiples of 16, rows 16-byte aligned; the tile
// is the largest that fits of 64 rows and 64 keys, 64 and 32, 32 and 32, 16 and 32. So are PACKED, how a row is stored,
// and LISTED: the keys of a request are a list of rows (keys.cu), not pages of a table.
//
// What it takes at D = 576 and V = 512, by arithmetic and not by measurement. Of each key a block reads 2 D bytes and
// computes 2 ROWS (D + V) operations, which is the least if T x H is a multiple of ROWS; groups of rows of a request
// share the read where L2 keeps it. Besides, a block reads ROWS queries and writes ROWS states of 4 V bytes, which are
// read again where splits are combined. Nanoseconds a key of a request while every multiprocessor works:
//   memory   from it once / once for each group, at 2.04 3.35 4.8 8.0 TB/s as published
//   tensor   at 312 989 989 2250 TFLOP/s dense; mma.sync has a part of the last three: at half, the limiters stay
//   shared   10 KiB a key and group (14.5 KiB with tiles of 32 keys, .76 of an A100, and .77 with the statistics of rows)
//            at 128 bytes a cycle, no bank conflicts
//
//               rows keys  shared  registers   T x H = 16              64                      128
//   A100 sm_80   64   32   150 KiB    199      .57/.57 .45 .77 shared  .57/.57  .45 .77 shared .57/1.13 .89 1.54 shared
//   H100 sm_90   64   64   226 KiB    211      .34/.34 .14 .33 memory  .34/.34  .14 .33 memory .34/.69  .28 .66  shared
//   H200 sm_90   64   64   226 KiB    211      .24/.24 .14 .33 shared  .24/.24  .14 .33 shared .24/.48  .28 .66  shared
//   B200 sm_100  64   64   226 KiB    244      .14/.14 .06 .29 shared  .14/.14  .06 .29 shared .14/.29  .12 .58  shared
//
// Decode takes splits of 512 keys whatever the batch and the machine: the bits of a row must not depend on them. Those
// that would fill the machine, by split_keys in gpu/paged_mma.py (one block at a time a multiprocessor), are what
// gpu.check times besides, and nothing else runs: of 32k keys at B = 1 and T x H = 16, 64, 128, an A100 takes 320, 320,
// 608, an H200 256, 256, 512, a B200 256, 256, 448; at B = 128 an A100 6560, an H200 all of them, a B200 4096, 4096, 8192.
#ifndef D
#define D 576
#define V 512
#endif
#ifndef ROWS
#define ROWS 64
#define KEYS 64
#endif
#ifndef LISTED
#define LISTED 0
#endif
#include "rows.cuh"
#include "splits.cuh"

constexpr float LOG2E = 1.44269504088896341f;

constexpr int KEY_WARPS = 4;                                // side by side over the keys of a tile
constexpr int ROW_TILES = ROWS == 16 ? 1 : 2;               // of 16 rows, of one warp's scores
constexpr int ROW_WARPS = ROWS / 16 / ROW_TILES;
constexpr int KEY_TILES = KEYS / 8 / KEY_WARPS;             // of 8 keys, of one warp's scores
constexpr int MMA_WARPS = KEY_WARPS * ROW_WARPS;
constexpr int MMA_THREADS = MMA_WARPS * WARP;
constexpr int COLUMN_TILES = (V / 16 + MMA_WARPS - 1) / MMA_WARPS;  // of 16 columns, of one warp's values
constexpr int LOADERS = 8;                                  // threads that copy a row
constexpr int COPIES = KEYS * LOADERS / MMA_THREADS;        // rows of a tile that a thread has a part in

using Latent = Rows<D / PER_CHUNK>;
using Weights = Rows<KEYS / PER_CHUNK | 1>;

constexpr int TILE_BYTES = KEYS * Latent::STRIDE * CHUNK;

struct Shared {
    unsigned char queries[ROWS * Latent::STRIDE * CHUNK];
    unsigned char tiles[TILE_BYTES + (PACKED ? KEYS * ROW_BYTES : TILE_BYTES)];
    unsigned char weights[ROWS * Weights::STRIDE * CHUNK];
    float of_warp[KEY_WARPS][ROWS];                     // maxima, and in the end sums
    float rescale[ROWS];
};

#if LISTED
using Entry = long long;            // where a row begins, in elements from the cache's first
#else
using Entry = int;                  // a page
#endif

template <typename Stored>
struct Problem {
    using Row = typename RowOf<Stored>::type;
    const Stored *q;                // [B, T, H, D]
    const Row *kv_cache;            // [num_blocks, block_size, D]; of packed rows, bytes
    const Entry *block_table;       // [B, max_blocks], or [B, keys] where listed
    const int *seq_lens;            // [B]
    float scale;                    // softmax_scale * log2(e)
    int causal;
    float *partial_out;             // [B T, H, splits, V], contiguous
    float *partial_max;             // [B T, H, splits], contiguous
    float *partial_sum;             // [B T, H, splits], contiguous
    int T, H, block_size, split_keys;
    long long q_request, q_token, q_head, cache_block, cache_row, table_request;
};

// Copy ROWS queries from `first` on; rows past the last are zeros.
template <typename Stored>
__device__ inline void copy_queries(const Problem<Stored> &p, int b, int first, unsigned to) {
    for (int i = threadIdx.x; i < ROWS * (D / PER_CHUNK); i += MMA_THREADS) {
        int row = i / (D / PER_CHUNK), chunk = i % (D / PER_CHUNK), r = first + row;
        bool is = r < p.T * p.H;
        const Stored *from = p.q;
        if (is) from += b * p.q_request + r / p.H * p.q_token + r % p.H * p.q_head + chunk * PER_CHUNK;
        copy_async(to + Latent::at(row, chunk), from, is ? CHUNK : 0);
    }
}

// Where the rows of the tile at key `first` begin of which this thread copies a part; null from `end` on.
template <typename Stored, typename Row>
__device__ inline void find_rows(const Problem<Stored> &p, int b, int first, int end, const Row *(&begins)[COPIES]) {
    for (int i = 0; i < COPIES; i++) {
        int j = first + i * (MMA_THREADS / LOADERS) + threadIdx.x / LOADERS;
        begins[i] = nullptr;
        if (j >= end) continue;
#if LISTED
        begins[i] = p.kv_cache + p.block_table[b * p.table_request + j];
#else
        int block = p.block_table[b * p.table_request + j / p.block_size];
        begins[i] = p.kv_cache + block * p.cache_block + j % p.block_size * p.cache_row;
#endif
    }
}

// Copy rows to a tile, or as they are stored to `to`; zeros where there is none.
template <typename Stored, typename Row>
__device__ inline void copy_rows(const Problem<Stored> &p, const Row *const (&begins)[COPIES], unsigned to) {
    for (int i = 0; i < COPIES; i++) {
        int key = i * (MMA_THREADS / LOADERS) + threadIdx.x / LOADERS;
        const Row *row = begins[i] ? begins[i] : p.kv_cache;
        for (int chunk = threadIdx.x % LOADERS; chunk < ROW_BYTES / CHUNK; chunk += LOADERS)
            copy_async(to + (PACKED ? key * ROW_BYTES + chunk * CHUNK : Latent::at(key, chunk)),
                       row + chunk * (CHUNK / sizeof(Row)), begins[i] ? CHUNK : 0);
    }
    end_of_group();
}

// The tile of the packed rows that were copied.
template <typename Stored>
__device__ inline void unpack_tile(Shared &shared) {
    for (int i = threadIdx.x; i < KEYS * (D / PER_CHUNK); i += MMA_THREADS) {
        int key = i / (D / PER_CHUNK), chunk = i % (D / PER_CHUNK);
        const unsigned char *row = shared.tiles + TILE_BYTES + key * ROW_BYTES;
        *(uint4 *)(shared.tiles + Latent::at(key, chunk)) = unpack<Stored>(row, chunk);
    }
}

// s [16 ROW_TILES, 8 KEY_TILES] of this warp = queries from row `row`, keys from `key`.
template <typename Stored>
__device__ inline void scores(unsigned queries, unsigned tile, int row, int key, float (&s)[ROW_TILES][KEY_TILES][4]) {
    int lane = threadIdx.x % WARP;
    for (int i = 0; i < ROW_TILES; i++)
        for (int j = 0; j < KEY_TILES; j++)
            for (int e = 0; e < 4; e++) s[i][j][e] = 0;
    #pragma unroll 4
    for (int chunk = 0; chunk < D / PER_CHUNK; chunk += 2) {
        unsigned a[4], b[2 * KEY_TILES];
        load_matrices(b, tile + Latent::at(key + lane % 8 + lane / 16 % KEY_TILES * 8, chunk + lane / 8 % 2));
        for (int i = 0; i < ROW_TILES; i++) {
            load_matrices(a, queries + Latent::at(row + 16 * i + lane % 16, chunk + lane / 16));
            for (int j = 0; j < KEY_TILES; j++) multiply(s[i][j], a, b + 2 * j, Stored());
        }
    }
}

// acc [ROWS, 16 COLUMN_TILES] of this warp: rescaled, plus weights times the tile's values.
template <typename Stored>
__device__ inline void values(const Shared &shared, unsigned weights, unsigned tile, float (&acc)[ROWS / 16][COLUMN_TILES][2][4]) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (int i = 0; i < ROWS / 16; i++) {
        float upper = shared.rescale[16 * i + lane / 4], lower = shared.rescale[16 * i + lane / 4 + 8];
        for (int c = 0; c < COLUMN_TILES; c++)
            for (int n = 0; n < 2; n++)
                for (int e = 0; e < 4; e++) acc[i][c][n][e] *= e < 2 ? upper : lower;
    }
    for (int key = 0; key < KEYS; key += 16) {
        unsigned p[ROWS / 16][4], v[4];
        for (int i = 0; i < ROWS / 16; i++)
            load_matrices(p[i], weights + Weights::at(16 * i + lane % 16, key / PER_CHUNK + lane / 16));
        for (int c = 0; c < COLUMN_TILES; c++) {
            int column = 16 * (c * MMA_WARPS + warp);
            if (column >= V) break;
            load_turned(v, tile + Latent::at(key + lane % 16, column / PER_CHUNK + lane / 16));
            for (int i = 0; i < ROWS / 16; i++)
                for (int n = 0; n < 2; n++) multiply(acc[i][c][n], p[i], v + 2 * n, Stored());
        }
    }
}

// The tile's values that are not finite become 0: a row that sees one is NaN by its score, others weigh it 0.
template <typename Stored>
__device__ inline void scrub(unsigned char *tile) {
    unsigned exponent = exponent_of(Stored());
    for (int i = threadIdx.x; i < KEYS * (V / PER_CHUNK); i += MMA_THREADS) {
        uint4 *at = (uint4 *)(tile + Latent::at(i / (V / PER_CHUNK), i % (V / PER_CHUNK)));
        uint4 x = *at;
        *at = make_uint4(finite_or_zero(x.x, exponent), finite_or_zero(x.y, exponent), finite_or_zero(x.z, exponent),
                         finite_or_zero(x.w, exponent));
    }
}

// Fill the partial states of one split: a block per group of ROWS queries, split and request.
template <typename Stored>
__device__ inline void decode(const Problem<Stored> &p) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared &shared = *(Shared *)memory;
    unsigned queries = address_of(shared.queries), weights = address_of(shared.weights);
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int key_warp = warp % KEY_WARPS, first_row = warp / KEY_WARPS * 16 * ROW_TILES;
    int group = blockIdx.x * ROWS, split = blockIdx.y, b = blockIdx.z;
    int rows = min(ROWS, p.T * p.H - group), len = p.seq_lens[b];
    int last = p.causal ? len - p.T + (group + rows - 1) / p.H + 1 : len;  // keys that the last row sees
    int keys = keys_of_split(len, p.split_keys), begin = split * keys;
    if (begin >= last) return;
    int end = begin + min(keys, last - begin);

    int visible[ROW_TILES][2];      // keys that rows lane/4 and lane/4 + 8 of a tile see
    float m[ROW_TILES][2], l[ROW_TILES][2];
    for (int i = 0; i < ROW_TILES; i++)
        for (int half = 0; half < 2; half++) {
            int t = (group + first_row + 16 * i + 8 * half + lane / 4) / p.H;
            visible[i][half] = p.causal ? len - p.T + t + 1 : len;
            m[i][half] = -INF;
            l[i][half] = 0;
        }
    float acc[ROWS / 16][COLUMN_TILES][2][4] = {};

    const typename Problem<Stored>::Row *begins[COPIES];
    copy_queries(p, b, group, queries);
    find_rows(p, b, begin, end, begins);
    copy_rows(p, begins, address_of(shared.tiles) + (PACKED ? TILE_BYTES : 0));
    find_rows(p, b, begin + KEYS, end, begins);

    for (int first = begin, now = 0; first < end; first += KEYS, now ^= !PACKED) {
        unsigned tile = address_of(shared.tiles + now * TILE_BYTES);
        wait_for_groups();
        __syncthreads();            // the rows are there, and nobody reads the other tile any more
        if (PACKED) {
            unpack_tile<Stored>(shared);
            __syncthreads();        // the tile is there, and nobody reads what was copied any more
        }
        if (first + KEYS < end) {
            copy_rows(p, begins, address_of(shared.tiles + (now ^ 1) * TILE_BYTES));
            find_rows(p, b, first + 2 * KEYS, end, begins);
        }

        float s[ROW_TILES][KEY_TILES][4];
        scores<Stored>(queries, tile, first_row, key_warp * 8 * KEY_TILES, s);
        bool odd = false;
        for (int i = 0; i < ROW_TILES; i++)
            for (int half = 0; half < 2; half++) {
                float top = -INF;
                for (int j = 0; j < KEY_TILES; j++)
                    for (int e = 2 * half; e < 2 * half + 2; e++) {
                        int key = first + (key_warp * KEY_TILES + j) * 8 + lane % 4 * 2 + e % 2;
                        odd |= !(fabsf(s[i][j][e]) < INF);
                        s[i][j][e] = key < min(end, visible[i][half]) ? s[i][j][e] * p.scale : -INF;
                        top = fmaxf(top, s[i][j][e]);
                    }
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
                if (lane % 4 == 0) shared.of_warp[key_warp][first_row + 16 * i + 8 * half + lane / 4] = top;
            }
        if (__syncthreads_or(odd))  // the maxima are there
            scrub<Stored>(shared.tiles + now * TILE_BYTES);

        for (int i = 0; i < ROW_TILES; i++)
            for (int half = 0; half < 2; half++) {
                int row = first_row + 16 * i + 8 * half + lane / 4;
                float m_new = m[i][half];
                for (int w = 0; w < KEY_WARPS; w++) m_new = fmaxf(m_new, shared.of_warp[w][row]);
                float rescale = m[i][half] == -INF ? 0 : exp2f(m[i][half] - m_new);
                m[i][half] = m_new;
                l[i][half] *= rescale;
                for (int j = 0; j < KEY_TILES; j++) {
                    float weight[2];
                    for (int e = 0; e < 2; e++) {
                        float score = s[i][j][2 * half + e];
                        weight[e] = score == -INF ? 0 : exp2f(score - m_new);
                        l[i][half] += weight[e];
                    }
                    int key = (key_warp * KEY_TILES + j) * 8;
                    *(unsigned *)(shared.weights + Weights::at(row, key / PER_CHUNK) + lane % 4 * 4) =
                        pack(weight[0], weight[1], Stored());
                }
                if (key_warp == 0 && lane % 4 == 0) shared.rescale[row] = rescale;
            }
        __syncthreads();            // the weights are there
        values<Stored>(shared, weights, tile, acc);
    }

    for (int i = 0; i < ROW_TILES; i++)
        for (int half = 0; half < 2; half++) {
            float sum = l[i][half];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (lane % 4 == 0) shared.of_warp[key_warp][first_row + 16 * i + 8 * half + lane / 4] = sum;
        }
    __syncthreads();

    long long state = ((long long)b * p.T * p.H + group) * gridDim.y + split;  // of the group's first row
    for (int i = 0; i < ROW_TILES; i++)
        for (int half = 0; half < 2; half++) {
            int row = first_row + 16 * i + 8 * half + lane / 4;
            if (key_warp != 0 || lane % 4 != 0 || row >= rows) continue;
            float sum = 0;
            for (int w = 0; w < KEY_WARPS; w++) sum += shared.of_warp[w][row];
            p.partial_max[state + (long long)row * gridDim.y] = m[i][half] / LOG2E;
            p.partial_sum[state + (long long)row * gridDim.y] = sum;
        }
    #pragma unroll                  // or the accumulators, which it indexes, would not be in registers
    for (int i = 0; i < ROWS / 16; i++)
        for (int half = 0; half < 2; half++) {
            int row = 16 * i + 8 * half + lane / 4;
            if (row >= rows) continue;
            float *out = p.partial_out + (state + (long long)row * gridDim.y) * V;
            for (int c = 0; c < COLUMN_TILES; c++)
                for (int n = 0; n < 2; n++) {
                    int column = 16 * (c * MMA_WARPS + warp) + 8 * n + lane % 4 * 2;
                    if (column < V)
                        *(float2 *)(out + column) = make_float2(acc[i][c][n][2 * half], acc[i][c][n][2 * half + 1]);
                }
        }
}

#define KERNEL(Stored)                                                                                           \
    DYNAMIC_SMEM(paged_mma_##Stored, sizeof(Shared))                                                             \
    extern "C" __global__ void __launch_bounds__(MMA_THREADS) paged_mma_##Stored(                                \
        const Stored *q,            /* [B, T, H, D] */                                                           \
        const RowOf<Stored>::type *kv_cache,    /* [num_blocks, block_size, D]; of packed rows, bytes */         \
        const Entry *block_table,   /* [B, max_blocks], or [B, keys] where listed */                             \
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
