// SPDX-License-Identifier: Apache-2.0
// What the kernels share: how stored numbers are read, sums and maxima over a warp, one tile of an online softmax.
//
// Sizes are int, strides are long long and count elements, so that every product with an id or a row has 64 bits.
// A stored number is widened to float, exactly; no header of CUDA is needed for that.
#pragma once
#define INF __int_as_float(0x7f800000)

constexpr int WARP = 32;
constexpr int THREADS = 128;        // of a block
constexpr int WARPS = THREADS / WARP;
constexpr int TILE = WARP;          // keys whose weights are formed together, one a lane

constexpr int WIDEST = 4096;        // elements of a key or a value, by gpu/layout.py

// The most shared memory that a launch of `kernel` may ask for, in bytes; gpu/resources.py reads it back.
#define DYNAMIC_SMEM(kernel, bytes) extern "C" __device__ unsigned kernel##_smem = bytes;

struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };

enum Stored { STORED_F32, STORED_F16, STORED_BF16 };  // the order is that of dtypes.STORED

__device__ inline float load(const float *x) { return *x; }

__device__ inline float load(const bf16 *x) { return __uint_as_float((unsigned)x->bits << 16); }

__device__ inline float load(const f16 *x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x->bits));
    return y;
}

__device__ inline float load(const void *x, int stored, long long i) {
    if (stored == STORED_F16) return load((const f16 *)x + i);
    if (stored == STORED_BF16) return load((const bf16 *)x + i);
    return ((const float *)x)[i];
}

// The same value in every lane, whichever lane asks: both trees are symmetric.
__device__ inline float warp_sum(float x) {
    for (int away = WARP / 2; away > 0; away /= 2) x += __shfl_xor_sync(~0u, x, away);
    return x;
}

__device__ inline float warp_max(float x) {  // NaN never becomes the maximum
    for (int away = WARP / 2; away > 0; away /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, away));
    return x;
}

// What a lane adds to query . key: its elements, WARP apart.
template <typename T>
__device__ inline float lane_dot(const float *query, const T *key, int width) {
    float sum = 0;
    for (int d = threadIdx.x % WARP; d < width; d += WARP) sum += query[d] * load(key + d);
    return sum;
}

// One tile of an online softmax: n <= TILE scores to weights, relative to the maximum so far, m, which may rise; the
// return value is what everything summed at the old maximum is worth at the new one. Every warp computes the same.
// A score of -inf weighs 0; NaN and +inf spread through l.
__device__ inline float soften(const float *score, int n, float &m, float &l, float *weight) {
    int lane = threadIdx.x % WARP;
    float s = lane < n ? score[lane] : -INF;
    float m_new = fmaxf(m, warp_max(s));
    float rescale = m == -INF ? 0 : expf(m - m_new);
    float p = s == -INF ? 0 : expf(s - m_new);
    l = l * rescale + warp_sum(p);
    m = m_new;
    if (threadIdx.x < WARP) weight[lane] = p;
    return rescale;
}
