# SPDX-License-Identifier: Apache-2.0
# Random numbers, each generator bit for bit the same on every machine and for ever.
#
#   xorshift  64-bit state, shifts 13/7/17, then a multiplier: uniform in [-1, 1), 24 bits
#   lcg       32-bit state: uniform in [-1, 1), 24 bits
#   counter   a hash of (key, index): any element alone, no state; `words` is what the others of inputs.py are made of
from libc.stdint cimport uint32_t, uint64_t


def xorshift(uint64_t state, float scale, float[::1] out):
    """Fill `out` with uniform [-1, 1) times `scale`; the state after the last draw."""
    cdef Py_ssize_t i
    for i in range(out.shape[0]):
        state ^= state << 13
        state ^= state >> 7
        state ^= state << 17
        out[i] = (<float>((state * <uint64_t>0x2545F4914F6CDD1D) >> 40) / 16777216 * 2 - 1) * scale
    return state


def lcg(uint32_t state, float[::1] out):
    """Fill `out` with uniform [-1, 1); the state after the last draw."""
    cdef Py_ssize_t i
    for i in range(out.shape[0]):
        state = state * <uint32_t>1664525 + <uint32_t>1013904223
        out[i] = <float>(state >> 8) / 16777216 * 2 - 1
    return state


cdef inline uint64_t mix(uint64_t x) noexcept nogil:
    # The finaliser of SplitMix64.
    x = (x ^ (x >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * <uint64_t>0x94D049BB133111EB
    return x ^ (x >> 31)


def words(uint64_t key, uint64_t start, uint64_t[::1] out):
    """Fill `out` with 64 random bits each: element i is the hash of (key, start + i)."""
    cdef Py_ssize_t i
    for i in range(out.shape[0]):
        out[i] = mix(key + (start + <uint64_t>i + 1) * <uint64_t>0x9E3779B97F4A7C15)


def normal(uint64_t key, float[::1] out):
    """Fill `out` with sums of twelve 16-bit uniforms: mean 0, variance 1, within +-6, exact in f32.

    Element i is made of words 3i, 3i + 1 and 3i + 2.
    """
    cdef Py_ssize_t i, k
    cdef uint64_t word
    cdef int total
    for i in range(out.shape[0]):
        total = -6 * 65535
        for k in range(3):
            word = mix(key + (<uint64_t>(3 * i + k) + 1) * <uint64_t>0x9E3779B97F4A7C15)
            total += (word & 0xFFFF) + (word >> 16 & 0xFFFF) + (word >> 32 & 0xFFFF) + (word >> 48)
        out[i] = <float>total / 65536
