// SPDX-License-Identifier: Apache-2.0
// Rotary embedding: first the cosines and sines of every position, then the rotation of the pairs.
//
//   theta  = position * base^(-2j/n)          pair j of n/2; three ways to round it, see Angles
//   theta' = theta/factor (1 - kept[j]) + theta kept[j]     YaRN; without it kept = 1: theta' = theta, exactly
//   first' = first cos - second sin           second' = first sin + second cos
//
// The fourth way, a table, is made by the host in double and has no kernel: rope_rotate takes it as it is.
#include "common.cuh"

// The order is that of rope.ANGLES.
enum Angles {
    RECURRENCE,     // theta[j] = theta[j-1] * base^(-2/n)
    POWER,          // theta[j] = position * (base^(-2/n))^j
    CLOSED,         // theta[j] = position * base^(-2j/n)
};

// Fill `cosine` and `sine` with amplitude * cos(theta') and amplitude * sin(theta'): a thread per position and pair.
extern "C" __global__ void __launch_bounds__(THREADS) rope_turn_f32(
    const long long *positions,     // [T], contiguous
    int n,
    float base,
    int angles,
    const float *kept,              // [n/2], 1: theta stays, 0: divided by factor
    float factor,
    float amplitude,
    float *cosine,                  // [T, n/2], contiguous
    float *sine                     // [T, n/2], contiguous
) {
    int t = blockIdx.x, j = blockIdx.y * THREADS + threadIdx.x;
    if (j >= n / 2) return;
    float position = positions[t], theta = position;

    if (angles == CLOSED) {
        theta = position * powf(base, (float)(-2 * j) / n);
    } else {
        float theta_scale = powf(base, -2.0f / n);
        if (angles == POWER) theta = position * powf(theta_scale, j);
        else for (int i = 0; i < j; i++) theta *= theta_scale;
    }

    float mixed = theta / factor * (1 - kept[j]) + theta * kept[j];
    cosine[(long long)t * (n / 2) + j] = cosf(mixed) * amplitude;
    sine[(long long)t * (n / 2) + j] = sinf(mixed) * amplitude;
}

// Fill `out`: a block per token and head. The pairs are (j, j + n/2) if `neox`, else (2j, 2j + 1); what lies beyond
// them is copied.
template <typename T>
__device__ void rotate(const T *x, const float *cosine, const float *sine, int neox, float *out, int pairs, int R,
                       long long x_token, long long x_head) {
    int t = blockIdx.x, h = blockIdx.y;
    x += t * x_token + h * x_head;
    out += ((long long)t * gridDim.y + h) * R;
    cosine += (long long)t * pairs;
    sine += (long long)t * pairs;

    for (int j = threadIdx.x; j < pairs; j += THREADS) {
        int first = neox ? j : 2 * j, second = neox ? j + pairs : 2 * j + 1;
        float a = load(x + first), b = load(x + second);
        out[first] = a * cosine[j] - b * sine[j];
        out[second] = a * sine[j] + b * cosine[j];
    }
    for (int d = 2 * pairs + threadIdx.x; d < R; d += THREADS) out[d] = load(x + d);
}

#define KERNEL(T, dtype)                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS) rope_rotate_##dtype(                                   \
        const T *x,                 /* [T, H, R] */                                                              \
        const float *cosine,        /* [T, n/2], contiguous */                                                   \
        const float *sine,          /* [T, n/2], contiguous */                                                   \
        int neox,                                                                                                \
        float *out,                 /* [T, H, R], contiguous */                                                  \
        int pairs, int R,                                                                                        \
        long long x_token, long long x_head                                                                      \
    ) {                                                                                                          \
        rotate(x, cosine, sine, neox, out, pairs, R, x_token, x_head);                                           \
    }

KERNEL(float, f32)
KERNEL(f16, f16)
KERNEL(bf16, bf16)
