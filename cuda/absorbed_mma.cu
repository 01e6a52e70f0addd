// SPDX-License-Identifier: Apache-2.0
// The two ends of the absorbed form on tensor cores, for f16 and bf16: one product per head, many tokens at a time.
//
//   query     q[t, h] = [w_uk[h]^T q_nope[t, h] | q_pe[t, h]], rounded: the query of paged_mma.cu
//   project   out[t, h] = w_uv[h] o_lat[t, h], o_lat rounded on the way in
//
// A block computes ROWS tokens x COLUMNS elements of one head; the sum runs in steps of DEPTH, copied one step ahead.
// Depths (P, L), widths (L, V) and strides are multiples of 8, rows 16-byte aligned.
//
// What the query takes at P = 128, L = 512 and H = 128, by arithmetic and not by measurement; the projection at V = 128
// has the same operations and weights. The weights, 16.8 MB, are read once for each 64 tokens, the tokens once for
// each 64 columns, from L2 where it keeps them; products are of 64 tokens, however few there are. 32 KiB of shared
// memory a block, 114 registers on sm_80, 80 on sm_90 and sm_100. Microseconds, whole machine:
//   memory   every byte once / as often as it is read, at 2.04 3.35 4.8 8.0 TB/s as published
//   tensor   at 312 989 989 2250 TFLOP/s dense, of which mma.sync has a part on the last three
//   shared   56 KiB a step of 64 x 64 x 64, at 128 bytes a cycle, no bank conflicts
//
//          T = 1                      64                         128
//   A100   8.3/8.4 3.4 6.0 memory    13.4/20.6 3.4 6.0 memory   18.5/41.1 6.9 12.1 memory
//   H100   5.1/5.1 1.1 3.8 memory     8.1/12.5 1.1 3.8 memory   11.3/25.0 2.2  7.6 memory
//   H200   3.5/3.6 1.1 3.8 shared     5.7/8.7  1.1 3.8 memory    7.9/17.5 2.2  7.6 memory
//   B200   2.1/2.2 0.5 3.3 shared     3.4/5.2  0.5 3.3 memory    4.7/10.5 1.0  6.7 shared
#include "mma.cuh"

#ifndef ROWS
#define ROWS 64
#endif

constexpr int COLUMNS = 64, DEPTH = 64, MMA_WARPS = COLUMNS / 16, MMA_THREADS = MMA_WARPS * WARP;

using Part = Rows<DEPTH / PER_CHUNK>;  // [ROWS, DEPTH] of tokens; [COLUMNS, DEPTH] or [DEPTH, COLUMNS] of weights

struct Shared {
    unsigned char tokens[2][ROWS * Part::STRIDE * CHUNK];
    unsigned char weights[2][COLUMNS * Part::STRIDE * CHUNK];
};

// Copy `n` rows of DEPTH elements; what is past `rows` or `columns` are zeros.
template <typename Stored>
__device__ inline void copy_part(const Stored *from, long long stride, int n, int rows, int columns, unsigned char *to) {
    for (int i = threadIdx.x; i < n * (DEPTH / PER_CHUNK); i += MMA_THREADS) {
        int row = i / (DEPTH / PER_CHUNK), chunk = i % (DEPTH / PER_CHUNK);
        bool is = row < rows && chunk * PER_CHUNK < columns;
        copy_async(address_of(to) + Part::at(row, chunk), is ? from + row * stride + chunk * PER_CHUNK : from, is ? CHUNK : 0);
    }
}

// The same of floats, rounded to Stored.
template <typename Stored>
__device__ inline void round_part(const float *from, long long stride, int n, int rows, int columns, unsigned char *to) {
    for (int i = threadIdx.x; i < n * (DEPTH / PER_CHUNK); i += MMA_THREADS) {
        int row = i / (DEPTH / PER_CHUNK), chunk = i % (DEPTH / PER_CHUNK);
        uint4 packed = {};
        if (row < rows && chunk * PER_CHUNK < columns) {
            const float *x = from + row * stride + chunk * PER_CHUNK;
            packed = make_uint4(pack(x[0], x[1], Stored()), pack(x[2], x[3], Stored()), pack(x[4], x[5], Stored()),
                                pack(x[6], x[7], Stored()));
        }
        *(uint4 *)(to + Part::at(row, chunk)) = packed;
    }
}

template <typename Stored>
__device__ inline void copy_tokens(const Stored *from, long long stride, int rows, int columns, unsigned char *to, Stored) {
    copy_part(from, stride, ROWS, rows, columns, to);
}

template <typename Stored>
__device__ inline void copy_tokens(const float *from, long long stride, int rows, int columns, unsigned char *to, Stored) {
    round_part<Stored>(from, stride, ROWS, rows, columns, to);
}

// acc [ROWS, 16] of this warp = tokens [rows, depth] times weights, which are [depth, columns] if `turned`, else
// [columns, depth].
template <typename Stored, bool turned, typename Token>
__device__ inline void product(
    const Token *tokens, long long token_stride, int rows,
    const Stored *weights, long long weight_stride, int columns,
    int depth, Shared &shared, float (&acc)[ROWS / 16][2][4]
) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;

    for (int first = -DEPTH, now = 1; first < depth; first += DEPTH, now ^= 1) {
        wait_for_groups();
        __syncthreads();            // this step's parts are there, and nobody reads the other ones any more
        int next = first + DEPTH, more = min(DEPTH, depth - next);
        if (more > 0) {
            copy_tokens(tokens + next, token_stride, rows, more, shared.tokens[now ^ 1], Stored());
            if (turned) copy_part(weights + next * weight_stride, weight_stride, DEPTH, more, columns, shared.weights[now ^ 1]);
            else copy_part(weights + next, weight_stride, COLUMNS, columns, more, shared.weights[now ^ 1]);
            end_of_group();
        }
        if (first < 0) continue;

        for (int chunk = 0; chunk < DEPTH / PER_CHUNK; chunk += 2) {
            unsigned a[4], b[4];
            if (turned) load_turned(b, address_of(shared.weights[now]) + Part::at(chunk * PER_CHUNK + lane % 16, 2 * warp + lane / 16));
            else load_matrices(b, address_of(shared.weights[now]) + Part::at(16 * warp + lane % 8 + lane / 16 * 8, chunk + lane / 8 % 2));
            for (int i = 0; i < ROWS / 16; i++) {
                load_matrices(a, address_of(shared.tokens[now]) + Part::at(16 * i + lane % 16, chunk + lane / 16));
                for (int n = 0; n < 2; n++) multiply(acc[i][n], a, b + 2 * n, Stored());
            }
        }
    }
}

// Fill `q`: a block per group of ROWS tokens, COLUMNS elements and head; the first one copies q_pe, too.
template <typename Stored>
__device__ inline void absorb(
    const Stored *q_nope, const Stored *q_pe, const Stored *w_uk, Stored *q, int t_q, int P, int L, int R,
    long long q_nope_token, long long q_nope_head, long long q_pe_token, long long q_pe_head, long long w_uk_head,
    long long w_uk_row, long long q_token, long long q_head
) {
    __shared__ __align__(128) Shared shared;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int h = blockIdx.z, column = blockIdx.y * COLUMNS;
    long long t = (long long)blockIdx.x * ROWS;
    int rows = min((long long)ROWS, t_q - t);
    float acc[ROWS / 16][2][4] = {};
    product<Stored, true>(q_nope + t * q_nope_token + h * q_nope_head, q_nope_token, rows,
                          w_uk + h * w_uk_head + column, w_uk_row, L - column, P, shared, acc);

    q += t * q_token + h * q_head;
    for (int i = 0; i < ROWS / 16; i++)
        for (int n = 0; n < 2; n++)
            for (int half = 0; half < 2; half++) {
                int row = 16 * i + 8 * half + lane / 4, l = column + 16 * warp + 8 * n + lane % 4 * 2;
                if (row < rows && l < L)
                    *(unsigned *)(q + row * q_token + l) = pack(acc[i][n][2 * half], acc[i][n][2 * half + 1], Stored());
            }
    if (blockIdx.y == 0)
        for (int i = threadIdx.x; i < rows * R; i += MMA_THREADS)
            q[i / R * q_token + L + i % R] = q_pe[(t + i / R) * q_pe_token + h * q_pe_head + i % R];
}

// Fill `out`: a block per group of ROWS tokens, COLUMNS elements and head.
template <typename Stored>
__device__ inline void project(
    const float *o_lat, const Stored *w_uv, float *out, int t_q, int H, int L, int V,
    long long w_uv_head, long long w_uv_row
) {
    __shared__ __align__(128) Shared shared;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int h = blockIdx.z, column = blockIdx.y * COLUMNS;
    long long t = (long long)blockIdx.x * ROWS;
    int rows = min((long long)ROWS, t_q - t);
    float acc[ROWS / 16][2][4] = {};
    product<Stored, false>(o_lat + (t * H + h) * L, (long long)H * L, rows,
                           w_uv + h * w_uv_head + column * w_uv_row, w_uv_row, V - column, L, shared, acc);

    out += (t * H + h) * V;
    for (int i = 0; i < ROWS / 16; i++)
        for (int n = 0; n < 2; n++)
            for (int half = 0; half < 2; half++) {
                int row = 16 * i + 8 * half + lane / 4, v = column + 16 * warp + 8 * n + lane % 4 * 2;
                if (row < rows && v < V)
                    *(float2 *)(out + (long long)row * H * V + v) =
                        make_float2(acc[i][n][2 * half], acc[i][n][2 * half + 1]);
            }
}

#define KERNELS(Stored)                                                                                          \
    extern "C" __global__ void __launch_bounds__(MMA_THREADS) absorbed_query_mma_##Stored(                       \
        const Stored *q_nope,       /* [t_q, H, P] */                                                            \
        const Stored *q_pe,         /* [t_q, H, R] */                                                            \
        const Stored *w_uk,         /* [H, P, L] */                                                              \
        Stored *q,                  /* [t_q, H, L + R] */                                                        \
        int t_q, int P, int L, int R,                                                                            \
        long long q_nope_token, long long q_nope_head, long long q_pe_token, long long q_pe_head,                \
        long long w_uk_head, long long w_uk_row, long long q_token, long long q_head                             \
    ) {                                                                                                          \
        absorb(q_nope, q_pe, w_uk, q, t_q, P, L, R, q_nope_token, q_nope_head, q_pe_token, q_pe_head, w_uk_head, \
               w_uk_row, q_token, q_head);                                                                       \
    }                                                                                                            \
    extern "C" __global__ void __launch_bounds__(MMA_THREADS) absorbed_project_mma_##Stored(                     \
        const float *o_lat,         /* [t_q, H, L], contiguous */                                                \
        const Stored *w_uv,         /* [H, V, L] */                                                              \
        float *out,                 /* [t_q, H, V], contiguous */                                                \
        int t_q, int H, int L, int V,                                                                            \
        long long w_uv_head, long long w_uv_row                                                                  \
    ) {                                                                                                          \
        project(o_lat, w_uv, out, t_q, H, L, V, w_uv_head, w_uv_row);                                            \
    }

KERNELS(f16)
KERNELS(bf16)
