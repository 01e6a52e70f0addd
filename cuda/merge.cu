// SPDX-License-Identifier: Apache-2.0
// Merge: attention states over disjoint sets of keys, joined by their LSE.
//
//   w[s] = e^(lse[s] - max lse)     out = sum_s w[s] out[s] / sum_s w[s]     lse = max lse + log sum_s w[s]
#include "common.cuh"

// A state whose lse is infinite or `marker` is empty: its out is not touched.
__device__ inline bool empty(float lse, float marker) {
    return lse == INF || lse == -INF || lse == marker || (isnan(lse) && isnan(marker));
}

#define MERGE(T)                                                                                                 \
    const T *partial_out,           /* [S, N, V], contiguous */                                                  \
    const float *partial_lse,       /* [S, N], contiguous */                                                     \
    float unit,                     /* log(base of the LSE) */                                                   \
    float marker,                   /* the lse of an empty state, next to -inf and +inf */                       \
    float empty_lse,                /* the lse of a row that has none but empty states */                        \
    float *out,                     /* [N, V], contiguous */                                                     \
    float *lse,                     /* [N], contiguous */                                                        \
    int S, int V

// Fill `out` and `lse`: a block per row, states in ascending order.
template <typename T>
__device__ void merge(MERGE(T)) {
    long long n = blockIdx.x, N = gridDim.x;
    partial_lse += n;

    float m = -INF, total = 0;
    for (int s = 0; s < S; s++)
        if (!empty(partial_lse[s * N], marker)) m = fmaxf(m, partial_lse[s * N]);
    for (int s = 0; s < S; s++)
        if (!empty(partial_lse[s * N], marker)) total += expf((partial_lse[s * N] - m) * unit);

    for (int d = threadIdx.x; d < V; d += THREADS) {
        float sum = 0;
        for (int s = 0; s < S; s++)
            if (!empty(partial_lse[s * N], marker))
                sum += expf((partial_lse[s * N] - m) * unit) * load(partial_out + (s * N + n) * V + d);
        out[n * V + d] = total == 0 ? 0 : sum / total;
    }
    if (threadIdx.x == 0) lse[n] = total == 0 ? empty_lse : m + logf(total) / unit;
}

#define KERNEL(T, dtype)                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS) merge_states_##dtype(MERGE(T)) {                       \
        merge(partial_out, partial_lse, unit, marker, empty_lse, out, lse, S, V);                                \
    }

KERNEL(float, f32)
KERNEL(f16, f16)
KERNEL(bf16, bf16)
