/* SPDX-License-Identifier: Apache-2.0
 * Codes of a byte or of half a byte to bf16, 32 at a time: tables that lie in registers, looked up by words.
 *
 * Loops over a table in memory read a code, then its number, one by one. Where the build has no lookup of words, or
 * numbers are double, HAS_LOOKUP is 0 and everything here does nothing: the code that calls it is dead.
 */
#ifndef MLA_ORACLE_CODES_H
#define MLA_ORACLE_CODES_H

#include "_vec.h"

#if defined __AVX512BW__
#include <immintrin.h>
#define HAS_LOOKUP (!IS_DOUBLE)

/* 32 bytes, or 16 of two codes each, the low half first, to 32 words. */
static inline veci bytes_as_words(const void* at)
{
    return (veci)_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)at));
}

static inline veci nibbles_as_words(const void* at)
{
    __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)at));
    return (veci)_mm512_and_si512(_mm512_or_si512(pairs, _mm512_slli_epi32(pairs, 12)), _mm512_set1_epi32(0x000F000F));
}

/* word[i] = table[word[i]], of 256 words; of 16. */
static inline veci look_up(veci words, const veci* table)
{
    __m512i at = (__m512i)words, found[4];
    __mmask32 odd = _mm512_test_epi16_mask(at, _mm512_set1_epi16(64));
    __mmask32 last = _mm512_test_epi16_mask(at, _mm512_set1_epi16(128));
    for (int i = 0; i < 4; i++)
        found[i] = _mm512_permutex2var_epi16((__m512i)table[2 * i], at, (__m512i)table[2 * i + 1]);
    found[0] = _mm512_mask_blend_epi16(odd, found[0], found[1]);
    found[2] = _mm512_mask_blend_epi16(odd, found[2], found[3]);
    return (veci)_mm512_mask_blend_epi16(last, found[0], found[2]);
}

static inline veci look_up_few(veci words, const veci* table)
{
    return (veci)_mm512_permutexvar_epi16((__m512i)words, (__m512i)table[0]);
}

/* a in the lower lanes, b in the upper. */
static inline vec splat_two(float a, float b)
{
    return (vec)_mm512_mask_blend_ps(0xFF00, _mm512_set1_ps(a), _mm512_set1_ps(b));
}

/* To memory: the lanes of `even` and `odd` in turn, as bf16 (their upper halves), or as they are. */
static inline void store_halves(void* to, vec even, vec odd)
{
    __m512i tops = _mm512_srli_epi32((__m512i)even, 16);
    _mm512_storeu_si512(to, _mm512_mask_blend_epi16(0xAAAAAAAA, tops, (__m512i)odd));
}

static inline void store_floats(void* to, vec even, vec odd)
{
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    __m512i a = (__m512i)even, b = (__m512i)odd;
    _mm512_storeu_si512(to, _mm512_permutex2var_epi32(a, low, b));
    _mm512_storeu_si512((char*)to + 64, _mm512_permutex2var_epi32(a, high, b));
}

#else
#define HAS_LOOKUP 0
#define bytes_as_words(at) ((void)(at), (veci){0})
#define nibbles_as_words(at) ((void)(at), (veci){0})
#define look_up(words, table) ((void)(table), (words))
#define look_up_few(words, table) ((void)(table), (words))
#define splat_two(a, b) ((void)(b), splat(a))
#define store_halves(to, even, odd) ((void)(to), (void)(even), (void)(odd))
#define store_floats(to, even, odd) ((void)(to), (void)(even), (void)(odd))
#endif

#endif
