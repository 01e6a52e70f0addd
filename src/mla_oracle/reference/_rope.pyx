# SPDX-License-Identifier: Apache-2.0
# Rotary embedding: first the cosines and sines of every position, then the rotation of the pairs.
#
#   theta  = position * base^(-2j/n)          pair j of n/2; three ways to round it, see Angles
#   theta' = theta/factor (1 - kept[j]) + theta kept[j]     YaRN; without it kept = 1: theta' = theta, exactly
#   first' = first cos - second sin           second' = first sin + second cos
#
# An odd n has n//2 pairs and divides by the odd n.
from libc.math cimport cos, cosf, pow, powf, sin, sinf
from libc.stdint cimport int64_t

from mla_oracle.reference._common cimport real

# The order is that of rope.ANGLES.
cdef enum Angles:
    RECURRENCE      # theta[j] = theta[j-1] * base^(-2/n)
    POWER           # theta[j] = position * (base^(-2/n))^j
    CLOSED          # theta[j] = position * base^(-2j/n)


cdef inline real cos_of(real x) noexcept nogil:
    if real is float:
        return cosf(x)
    else:
        return cos(x)


cdef inline real sin_of(real x) noexcept nogil:
    if real is float:
        return sinf(x)
    else:
        return sin(x)


cdef inline real pow_of(real x, real y) noexcept nogil:
    if real is float:
        return powf(x, y)
    else:
        return pow(x, y)


def turn(
    const int64_t[::1] positions,   # [T]
    Py_ssize_t n,
    double base,
    int angles,
    const real[::1] kept,           # [n/2], 1: theta stays, 0: divided by factor
    double factor,
    double amplitude,
    real[:, ::1] cosine,            # [T, n/2]
    real[:, ::1] sine,              # [T, n/2]
):
    """Fill `cosine` and `sine` with amplitude * cos(theta') and amplitude * sin(theta')."""
    cdef Py_ssize_t t, j
    cdef real b = <real>base, f = <real>factor, a = <real>amplitude
    cdef real theta_scale = pow_of(b, <real>(-2) / <real>n)
    cdef real position, mixed, theta = 0

    with nogil:
        for t in range(positions.shape[0]):
            position = <real>positions[t]
            for j in range(n // 2):
                if angles == RECURRENCE:
                    theta = position if j == 0 else theta * theta_scale
                elif angles == POWER:
                    theta = position * pow_of(theta_scale, <real>j)
                else:
                    theta = position * pow_of(b, <real>(-2 * j) / <real>n)

                # A bare 1 is a C double, and would take the whole expression with it.
                mixed = theta / f * (<real>1 - kept[j]) + theta * kept[j]
                cosine[t, j] = cos_of(mixed) * a
                sine[t, j] = sin_of(mixed) * a


def rotate(
    real[:, :, ::1] x,              # [T, H, R], R >= n
    const real[:, ::1] cosine,      # [T, n/2]
    const real[:, ::1] sine,        # [T, n/2]
    bint neox,
):
    """Rotate the pairs of `x` in place: (j, j + n/2) if `neox`, else (2j, 2j + 1)."""
    cdef Py_ssize_t pairs = cosine.shape[1]
    cdef Py_ssize_t t, h, j, first, second
    cdef real a, b

    with nogil:
        for t in range(x.shape[0]):
            for h in range(x.shape[1]):
                for j in range(pairs):
                    first = j if neox else 2 * j
                    second = j + pairs if neox else 2 * j + 1
                    a = x[t, h, first]
                    b = x[t, h, second]
                    x[t, h, first] = a * cosine[t, j] - b * sine[t, j]
                    x[t, h, second] = a * sine[t, j] + b * cosine[t, j]
