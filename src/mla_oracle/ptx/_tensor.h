/* SPDX-License-Identifier: Apache-2.0
 * Eight f32 numbers as one C type, with a fused multiply-add of all of them: one instruction where the build has FMA,
 * eight calls of fmaf where not; the bits are the same.
 */
#ifndef MLA_ORACLE_PTX_TENSOR_H
#define MLA_ORACLE_PTX_TENSOR_H

#include <math.h>
#include <string.h>
#ifdef __FMA__
#include <immintrin.h>
#endif

typedef float eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef int eight_bits __attribute__((vector_size(32), aligned(4), may_alias));

static inline eight fused(float a, const eight *b, eight c)
{
#ifdef __FMA__
    return (eight)_mm256_fmadd_ps(_mm256_set1_ps(a), (__m256)*b, (__m256)c);
#else
    for (int k = 0; k < 8; k++) c[k] = fmaf(a, (*b)[k], c[k]);
    return c;
#endif
}

/* sums[r] += a[r][k] b[k] for k from 0 to 15, a: [8][16]. */
static inline void add_products(const float *a, const eight *b, eight *sums)
{
    eight s[8];
    memcpy(s, sums, sizeof s);
    for (int k = 0; k < 16; k++)
        for (int r = 0; r < 8; r++) s[r] = fused(a[16 * r + k], b + k, s[r]);
    memcpy(sums, s, sizeof s);
}

/* Two runs of four numbers, side by side; and back, every NaN as the canonical one. */
static inline eight joined(const float *low, const float *high)
{
    eight x;
    memcpy(&x, low, 16);
    memcpy((char *)&x + 16, high, 16);
    return x;
}

static inline void parted(eight x, float *low, float *high)
{
    eight_bits number = (eight_bits)(x == x), nan = {0};
    nan += 0x7FFFFFFF;
    x = (eight)(((eight_bits)x & number) | (nan & ~number));
    memcpy(low, &x, 16);
    memcpy(high, (char *)&x + 16, 16);
}

#endif
