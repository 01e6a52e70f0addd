// SPDX-License-Identifier: Apache-2.0
// Absorbed form: fold w_uk into the query, attend over the latent rows themselves, decompress the output once.
//
//   q_lat    = w_uk[h]^T q_nope
//   score[t] = (q_lat . c[t] + q_pe . k_pe[t]) * scale
//   o_lat    = sum_t softmax(score)[t] c[t]
//   out      = w_uv[h] o_lat
//
// The kernels are at the end of the page, one of each step for every dtype that its inputs may be stored in.
#include "common.cuh"

#define ABSORB(T)                                                                                                \
    const T *q_nope,                /* [t_q, H, P] */                                                            \
    const T *w_uk,                  /* [H, P, L] */                                                              \
    float *q_lat,                   /* [t_q, H, L], contiguous */                                                \
    int P, int L,                                                                                                \
    long long q_nope_token, long long q_nope_head, long long w_uk_head, long long w_uk_row

// Fill `q_lat`: a thread per query, head and element.
template <typename T>
__device__ void absorb(ABSORB(T)) {
    int i = blockIdx.x, h = blockIdx.y, l = blockIdx.z * THREADS + threadIdx.x;
    if (l >= L) return;
    q_nope += i * q_nope_token + h * q_nope_head;
    w_uk += h * w_uk_head + l;

    float sum = 0;
    for (int p = 0; p < P; p++) sum += load(q_nope + p) * load(w_uk + p * w_uk_row);
    q_lat[((long long)i * gridDim.y + h) * L + l] = sum;
}

#define ATTEND(T)                                                                                                \
    const float *q_lat,             /* [t_q, H, L], contiguous */                                                \
    const T *q_pe,                  /* [t_q, H, R] */                                                            \
    const T *c_kv,                  /* [t_kv, L] */                                                              \
    const T *k_pe,                  /* [t_kv, R] */                                                              \
    float scale,                                                                                                 \
    float *o_lat,                   /* [t_q, H, L], contiguous */                                                \
    int t_kv, int L, int R,                                                                                      \
    long long q_pe_token, long long q_pe_head, long long c_kv_row, long long k_pe_row

// Fill `o_lat`; the queries are the last t_q rows of the cache. A block per query and head.
template <typename T>
__device__ void attend(ATTEND(T)) {
    extern __shared__ float shared[];
    float *query = shared;          // [L + R]
    float *acc = query + L + R;     // [L]
    __shared__ float score[TILE], weight[TILE];

    int i = blockIdx.x, h = blockIdx.y;
    int visible = t_kv - gridDim.x + i + 1;
    float m = -INF, total = 0;
    q_lat += ((long long)i * gridDim.y + h) * L;
    q_pe += i * q_pe_token + h * q_pe_head;
    o_lat += ((long long)i * gridDim.y + h) * L;

    for (int l = threadIdx.x; l < L; l += THREADS) query[l] = q_lat[l];
    for (int p = threadIdx.x; p < R; p += THREADS) query[L + p] = load(q_pe + p);
    for (int l = threadIdx.x; l < L; l += THREADS) acc[l] = 0;
    __syncthreads();

    for (int first = 0; first < visible; first += TILE) {
        int n = min(TILE, visible - first);

        for (int k = threadIdx.x / WARP; k < n; k += WARPS) {
            long long t = first + k;
            float sum = lane_dot(query, c_kv + t * c_kv_row, L) + lane_dot(query + L, k_pe + t * k_pe_row, R);
            sum = warp_sum(sum);
            if (threadIdx.x % WARP == 0) score[k] = sum * scale;
        }
        __syncthreads();

        float rescale = soften(score, n, m, total, weight);
        __syncthreads();

        for (int l = threadIdx.x; l < L; l += THREADS) {
            float sum = acc[l] * rescale;
            for (int k = 0; k < n; k++)
                if (weight[k] != 0) sum += weight[k] * load(c_kv + (first + k) * c_kv_row + l);
            acc[l] = sum;
        }
    }

    for (int l = threadIdx.x; l < L; l += THREADS) o_lat[l] = total == 0 ? 0 : acc[l] / total;
}

#define PROJECT(T)                                                                                               \
    const float *o_lat,             /* [t_q, H, L], contiguous */                                                \
    const T *w_uv,                  /* [H, V, L] */                                                              \
    float *out,                     /* [t_q, H, V], contiguous */                                                \
    int L, int V,                                                                                                \
    long long w_uv_head, long long w_uv_row

// Fill `out`: a block per query and head, a warp per element.
template <typename T>
__device__ void project(PROJECT(T)) {
    int i = blockIdx.x, h = blockIdx.y;
    long long row = (long long)i * gridDim.y + h;

    for (int j = threadIdx.x / WARP; j < V; j += WARPS) {
        float sum = warp_sum(lane_dot(o_lat + row * L, w_uv + h * w_uv_head + j * w_uv_row, L));
        if (threadIdx.x % WARP == 0) out[row * V + j] = sum;
    }
}

#define KERNELS(T, dtype)                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS) absorbed_query_##dtype(ABSORB(T)) {                    \
        absorb(q_nope, w_uk, q_lat, P, L, q_nope_token, q_nope_head, w_uk_head, w_uk_row);                       \
    }                                                                                                            \
    DYNAMIC_SMEM(absorbed_attend_##dtype, 2 * WIDEST * sizeof(float))                                            \
    extern "C" __global__ void __launch_bounds__(THREADS) absorbed_attend_##dtype(ATTEND(T)) {                   \
        attend(q_lat, q_pe, c_kv, k_pe, scale, o_lat, t_kv, L, R, q_pe_token, q_pe_head, c_kv_row, k_pe_row);    \
    }                                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS) absorbed_project_##dtype(PROJECT(T)) {                 \
        project(o_lat, w_uv, out, L, V, w_uv_head, w_uv_row);                                                    \
    }

KERNELS(float, f32)
KERNELS(bf16, bf16)
