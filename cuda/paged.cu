// SPDX-License-Identifier: Apache-2.0
// Paged form: an absorbed query over latent rows scattered in pages; an online softmax over every split, then the
// splits of a row combined in ascending order.
//
//   key = the whole row, value = its first V elements
//   per tile:  m' = max(m, scores)   acc = acc e^(m - m') + sum e^(score - m') value   l likewise
//   out = sum_s e^(m_s - m) acc_s / l, l = sum_s e^(m_s - m) l_s                      lse = m + log l
//
#include "splits.cuh"

#define DECODE(Row)                                                                                              \
    const void *q,                  /* [B, T, H, D] */                                                           \
    int q_dtype,                                                                                                 \
    const Row *kv_cache,            /* [num_blocks, block_size, D] */                                            \
    const int *block_table,         /* [B, max_blocks] */                                                        \
    const int *seq_lens,            /* [B] */                                                                    \
    float softmax_scale,                                                                                         \
    int causal,                                                                                                  \
    float *partial_out,             /* [B T, H, splits, V], contiguous */                                        \
    float *partial_max,             /* [B T, H, splits], contiguous */                                           \
    float *partial_sum,             /* [B T, H, splits], contiguous */                                           \
    int T, int D, int V, int block_size, int split_keys,                                                         \
    long long q_request, long long q_token, long long q_head,                                                    \
    long long cache_block, long long cache_row, long long table_request

// Fill the partial state of one split: a block per row of queries, head and split. Splits past the row's end have none.
template <typename Row>
__device__ void decode(DECODE(Row)) {
    extern __shared__ float shared[];
    float *query = shared;          // [D]
    float *acc = query + D;         // [V]
    __shared__ float score[TILE], weight[TILE];
    __shared__ long long key[TILE]; // where the rows of a tile begin

    int row = blockIdx.x, h = blockIdx.y, split = blockIdx.z;
    int b = row / T, t = row % T;
    int visible = visible_of(seq_lens, row, T, causal);
    int keys = keys_of_split(seq_lens[b], split_keys), begin = split * keys;
    if (begin >= visible) return;
    int end = begin + min(keys, visible - begin);
    float m = -INF, l = 0;

    for (int d = threadIdx.x; d < D; d += THREADS)
        query[d] = load(q, q_dtype, b * q_request + t * q_token + h * q_head + d);
    for (int d = threadIdx.x; d < V; d += THREADS) acc[d] = 0;
    __syncthreads();

    for (int first = begin; first < end; first += TILE) {
        int n = min(TILE, end - first);

        for (int k = threadIdx.x / WARP; k < n; k += WARPS) {
            int j = first + k;
            int block = block_table[b * table_request + j / block_size];
            long long begins = block * cache_block + j % block_size * cache_row;
            float sum = warp_sum(lane_dot(query, kv_cache + begins, D));
            if (threadIdx.x % WARP == 0) {
                key[k] = begins;
                score[k] = sum * softmax_scale;
            }
        }
        __syncthreads();

        float rescale = soften(score, n, m, l, weight);
        __syncthreads();

        for (int d = threadIdx.x; d < V; d += THREADS) {
            float sum = acc[d] * rescale;
            for (int k = 0; k < n; k++)
                if (weight[k] != 0) sum += weight[k] * load(kv_cache + key[k] + d);
            acc[d] = sum;
        }
        __syncthreads();
    }

    long long state = ((long long)row * gridDim.y + h) * gridDim.z + split;
    for (int d = threadIdx.x; d < V; d += THREADS) partial_out[state * V + d] = acc[d];
    if (threadIdx.x == 0) {
        partial_max[state] = m;
        partial_sum[state] = l;
    }
}

#define KERNEL(Row, dtype)                                                                                       \
    DYNAMIC_SMEM(paged_decode_##dtype, 2 * WIDEST * sizeof(float))                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) paged_decode_##dtype(DECODE(Row)) {                    \
        decode(q, q_dtype, kv_cache, block_table, seq_lens, softmax_scale, causal, partial_out, partial_max,     \
               partial_sum, T, D, V, block_size, split_keys, q_request, q_token, q_head, cache_block, cache_row, \
               table_request);                                                                                   \
    }

KERNEL(float, f32)
KERNEL(f16, f16)
KERNEL(bf16, bf16)

// Fill `out` and `lse`: a block per row of queries and head. A row without keys is an empty row, and so is one whose
// scores are all -inf: out 0, lse `empty_lse`, whatever its sink. A sink is the logit of a key without a value.
extern "C" __global__ void __launch_bounds__(THREADS) paged_combine_f32(
    const float *partial_out,       // [B T, H, splits, V], contiguous
    const float *partial_max,       // [B T, H, splits], contiguous
    const float *partial_sum,       // [B T, H, splits], contiguous
    const int *seq_lens,            // [B]
    int causal,
    float lse_unit,                 // 1, or log2(e) for an LSE in base 2
    float empty_lse,
    const float *sinks,             // [H], or null
    int sinks_in_lse,
    float out_scale,
    float *out,                     // [B T, H, V], contiguous
    float *lse,                     // [B T, H], contiguous
    int T, int V, int splits, int split_keys
) {
    int row = blockIdx.x, h = blockIdx.y;
    int visible = visible_of(seq_lens, row, T, causal);
    int used = visible <= 0 ? 0 : (visible - 1) / keys_of_split(seq_lens[row / T], split_keys) + 1;
    long long state = (long long)row * gridDim.y + h;
    partial_out += state * splits * V;
    partial_max += state * splits;
    partial_sum += state * splits;

    float m = -INF, l = 0;
    for (int s = 0; s < used; s++) m = fmaxf(m, partial_max[s]);
    for (int s = 0; s < used; s++) {
        float rescale = partial_max[s] == -INF ? 0 : expf(partial_max[s] - m);
        l += rescale * partial_sum[s];
    }
    float sink = sinks ? sinks[h] : -INF;
    float whole = sink == -INF ? l : l + expf(sink - m);

    for (int d = threadIdx.x; d < V; d += THREADS) {
        float sum = 0;
        for (int s = 0; s < used; s++) {
            float rescale = partial_max[s] == -INF ? 0 : expf(partial_max[s] - m);
            sum += rescale * partial_out[(long long)s * V + d];
        }
        out[state * V + d] = l == 0 ? 0 : sum / whole * out_scale;
    }
    if (threadIdx.x != 0) return;
    float sum = m + logf(l);
    if (sinks_in_lse && sink != -INF) {
        float top = fmaxf(sum, sink);
        sum = top == INF ? sum + sink : top + logf(expf(sum - top) + expf(sink - top));
    }
    lse[state] = l == 0 ? empty_lse : sum * lse_unit;
}

// Find the first length that is negative or past the table, or else block id in use that no block has: lower `fault`
// to b (max_blocks + 1) for a length of request b, to b (max_blocks + 1) + 1 + slot for an id. A thread per request.
extern "C" __global__ void __launch_bounds__(THREADS) paged_check_ids(
    const int *block_table,         // [B, max_blocks]
    const int *seq_lens,            // [B]
    long long num_blocks,
    unsigned long long *fault,      // [1], all ones if nothing is wrong
    int B, int max_blocks, int block_size,
    long long table_request
) {
    int b = blockIdx.x * THREADS + threadIdx.x;
    if (b >= B) return;
    unsigned long long request = (unsigned long long)b * (max_blocks + 1ull);

    if (seq_lens[b] < 0 || seq_lens[b] > (long long)max_blocks * block_size) {
        atomicMin(fault, request);
        return;
    }
    for (int slot = 0; (long long)slot * block_size < seq_lens[b]; slot++) {
        int id = block_table[b * table_request + slot];
        if (id < 0 || id >= num_blocks) {
            atomicMin(fault, request + 1 + slot);
            return;
        }
    }
}
