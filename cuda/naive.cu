// SPDX-License-Identifier: Apache-2.0
// Naive form: decompress every cached row to a key and a value per head, then attend.
//
//   k_nope[t] = w_uk[h] c[t]            v[t] = w_uv[h] c[t]
//   score[t]  = (q_nope . k_nope[t] + q_pe . k_pe[t]) * scale
//   out       = sum_t softmax(score)[t] v[t]
#include "common.cuh"

// Fill `decompressed`, keys or values: a block per cached row and head, a warp per element.
extern "C" __global__ void __launch_bounds__(THREADS) naive_decompress_f32(
    const float *c_kv,              // [t_kv, L]
    const float *w,                 // [H, N, L]: w_uk or w_uv
    float *decompressed,            // [H, t_kv, N], contiguous
    int N, int L,
    long long c_kv_row, long long w_head, long long w_row
) {
    int t = blockIdx.x, h = blockIdx.y;
    const float *c = c_kv + t * c_kv_row;
    float *row = decompressed + ((long long)h * gridDim.x + t) * N;

    for (int p = threadIdx.x / WARP; p < N; p += WARPS) {
        float sum = warp_sum(lane_dot(c, w + h * w_head + p * w_row, L));
        if (threadIdx.x % WARP == 0) row[p] = sum;
    }
}

DYNAMIC_SMEM(naive_attend_f32, 2 * WIDEST * sizeof(float))

// Fill `out`; the queries are the last t_q rows of the cache. A block per query and head.
extern "C" __global__ void __launch_bounds__(THREADS) naive_attend_f32(
    const float *q_nope,            // [t_q, H, P]
    const float *q_pe,              // [t_q, H, R]
    const float *k_nope,            // [H, t_kv, P], contiguous
    const float *k_pe,              // [t_kv, R]
    const float *v,                 // [H, t_kv, V], contiguous
    float scale,
    float *out,                     // [t_q, H, V], contiguous
    int t_kv, int P, int R, int V,
    long long q_nope_token, long long q_nope_head, long long q_pe_token, long long q_pe_head, long long k_pe_row
) {
    extern __shared__ float shared[];
    float *query = shared;          // [P + R]
    float *acc = query + P + R;     // [V]
    __shared__ float score[TILE], weight[TILE];

    int i = blockIdx.x, h = blockIdx.y;
    int visible = t_kv - gridDim.x + i + 1;
    float m = -INF, l = 0;
    k_nope += (long long)h * t_kv * P;
    v += (long long)h * t_kv * V;
    out += ((long long)i * gridDim.y + h) * V;

    for (int p = threadIdx.x; p < P; p += THREADS) query[p] = q_nope[i * q_nope_token + h * q_nope_head + p];
    for (int p = threadIdx.x; p < R; p += THREADS) query[P + p] = q_pe[i * q_pe_token + h * q_pe_head + p];
    for (int j = threadIdx.x; j < V; j += THREADS) acc[j] = 0;
    __syncthreads();

    for (int first = 0; first < visible; first += TILE) {
        int n = min(TILE, visible - first);

        for (int k = threadIdx.x / WARP; k < n; k += WARPS) {
            long long t = first + k;
            float sum = lane_dot(query, k_nope + t * P, P) + lane_dot(query + P, k_pe + t * k_pe_row, R);
            sum = warp_sum(sum);
            if (threadIdx.x % WARP == 0) score[k] = sum * scale;
        }
        __syncthreads();

        float rescale = soften(score, n, m, l, weight);
        __syncthreads();

        for (int j = threadIdx.x; j < V; j += THREADS) {
            float sum = acc[j] * rescale;
            for (int k = 0; k < n; k++)
                if (weight[k] != 0) sum += weight[k] * v[(long long)(first + k) * V + j];
            acc[j] = sum;
        }
    }

    for (int j = threadIdx.x; j < V; j += THREADS) out[j] = l == 0 ? 0 : acc[j] / l;
}
