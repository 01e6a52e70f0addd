# SPDX-License-Identifier: Apache-2.0
# cvt (9.7.9.21): between integers of any width, integers and floating point, and floating-point formats.
#
# Instr.kind is the format of the narrow side, or the integer's 2 * bytes + signed; Instr.size the bytes per lane of
# the argument's row, Instr.width those of the result's. Integers go through 64 bits, numbers through double.
from libc.math cimport ceil, floor, rint, trunc
from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from mla_oracle.ptx._block cimport Instr
from mla_oracle.ptx._formats cimport narrow, narrow_bf16, quiet, widen
from mla_oracle.ptx._half cimport FINITE, RELU, ROUNDING
from mla_oracle.ptx._opcodes cimport *


cdef inline int64_t integer_at(const uint8_t* row, Py_ssize_t lane, int size, int kind) noexcept nogil:
    """Element `lane` of a row of `size`-byte elements, of which kind's bytes and sign count."""
    cdef int64_t x
    if size == 2:
        x = (<const int16_t*>row)[lane]
    elif size == 4:
        x = (<const int32_t*>row)[lane]
    else:
        x = (<const int64_t*>row)[lane]
    if kind == 2:
        return <uint8_t>x
    if kind == 3:
        return <int8_t>x
    if kind == 4:
        return <uint16_t>x
    if kind == 5:
        return <int16_t>x
    if kind == 8:
        return <uint32_t>x
    if kind == 9:
        return <int32_t>x
    return x


cdef inline void put_integer(uint8_t* row, Py_ssize_t lane, int width, int64_t x) noexcept nogil:
    if width == 2:
        (<int16_t*>row)[lane] = <int16_t>x
    elif width == 4:
        (<int32_t*>row)[lane] = <int32_t>x
    else:
        (<int64_t*>row)[lane] = x


cdef inline double rounded(double x, int mode) noexcept nogil:
    if mode == NEAREST:
        return rint(x)
    if mode == ZERO:
        return trunc(x)
    return floor(x) if mode == DOWN else ceil(x)


cdef inline int64_t to_integer(double x, int kind, int mode) noexcept nogil:
    """Rounded, then clamped to the type's range; NaN is 0 (9.7.9.21)."""
    cdef int bits = 4 * (kind & ~1)
    cdef bint signed = kind & 1
    cdef double two = 1
    if x != x:
        return 0
    x = rounded(x, mode)
    two = <double>(<uint64_t>1 << (bits - 1))
    if signed:
        if x >= two:
            return <int64_t>((<uint64_t>1 << (bits - 1)) - 1)
        return <int64_t>x if x > -two else -<int64_t>(<uint64_t>1 << (bits - 1))
    if x <= 0:
        return 0
    if x >= 2 * two:
        return <int64_t>(~<uint64_t>0 >> (64 - bits))
    return <int64_t><uint64_t>x


cdef inline int64_t clamped(int64_t x, bint unsigned_source, int kind) noexcept nogil:
    """cvt.sat between integers."""
    cdef int bits = 4 * (kind & ~1)
    cdef int64_t top
    if kind & 1:
        top = <int64_t>((<uint64_t>1 << (bits - 1)) - 1)
        if unsigned_source:
            return top if <uint64_t>x > <uint64_t>top else x
        return top if x > top else max(x, -top - 1)
    if x < 0 and not unsigned_source:
        return 0
    if bits == 64:
        return x
    return <int64_t>min(<uint64_t>x, (<uint64_t>1 << bits) - 1)


cdef inline void convert(const Instr* i, uint8_t* out, uint8_t** args, Py_ssize_t n) noexcept nogil:
    cdef int op = i.op, kind = i.kind, mode = i.flags & ROUNDING
    cdef bint finite = i.flags & FINITE, zero = mode == ZERO
    cdef Py_ssize_t k
    cdef double x
    cdef int64_t whole
    cdef float* a4 = <float*>args[0]
    cdef float* b4 = <float*>args[1]
    cdef uint16_t* a2 = <uint16_t*>args[0]
    cdef uint16_t* d2 = <uint16_t*>out
    cdef uint32_t* d4 = <uint32_t*>out
    if op == CVT_INT:
        if kind == 9 and i.size == 4 and i.width == 8:
            for k in range(n):
                (<int64_t*>out)[k] = (<int32_t*>args[0])[k]
        elif kind == 8 and i.size == 4 and i.width == 8:
            for k in range(n):
                (<uint64_t*>out)[k] = (<uint32_t*>args[0])[k]
        elif i.count:       # .sat: i.count is the result's kind
            for k in range(n):
                whole = integer_at(args[0], k, i.size, kind)
                put_integer(out, k, i.width, clamped(whole, not kind & 1, i.count))
        else:
            for k in range(n):
                put_integer(out, k, i.width, integer_at(args[0], k, i.size, kind))
    elif op == CVT_F32_S32:
        for k in range(n):
            (<float*>out)[k] = <float>(<int32_t*>args[0])[k]
    elif op == CVT_FLOAT_INT:   # integer to f32 or f64
        for k in range(n):
            whole = integer_at(args[0], k, i.size, kind)
            if i.width == 8:
                (<double*>out)[k] = <double>whole if kind & 1 else <double><uint64_t>whole
            else:
                (<float*>out)[k] = <float>whole if kind & 1 else <float><uint64_t>whole
    elif op == CVT_INT_FLOAT:   # f32 or f64 to an integer
        for k in range(n):
            x = (<double*>args[0])[k] if i.size == 8 else a4[k]
            put_integer(out, k, i.width, to_integer(x, kind, mode))
    elif op == CVT_ROUND_F32:
        for k in range(n):
            (<float*>out)[k] = quiet(<float>rounded(a4[k], mode))
    elif op == CVT_ROUND_F64:
        for k in range(n):
            (<double*>out)[k] = rounded((<double*>args[0])[k], mode)
    elif op == CVT_F64_F32:
        for k in range(n):
            (<double*>out)[k] = a4[k]
    elif op == CVT_F32_F64:     # the processor's rounding mode is set
        for k in range(n):
            (<float*>out)[k] = quiet(<float>(<double*>args[0])[k])
    elif op == CVT_H_F32:
        for k in range(n):
            d2[k] = <uint16_t>narrow(relu(a4[k], i.flags), kind, zero, finite)
    elif op == CVT_H_F64:
        for k in range(n):
            d2[k] = <uint16_t>narrow((<double*>args[0])[k], kind, zero, finite)
    elif op == CVT_F32_H:
        for k in range(n):
            (<float*>out)[k] = quiet(widen(a2[k], kind))
    elif op == CVT_F64_H:
        for k in range(n):
            (<double*>out)[k] = widen(a2[k], kind)
    elif op == CVT_2H_2F32:     # the first argument becomes the upper half
        if kind == BF16 and i.flags == 0:
            for k in range(n):
                d4[k] = narrow_bf16(a4[k]) << 16 | narrow_bf16(b4[k])
        else:
            for k in range(n):
                d4[k] = (narrow(relu(a4[k], i.flags), kind, zero, finite) << 16
                         | narrow(relu(b4[k], i.flags), kind, zero, finite))
    elif op == CVT_2E_2F32:
        for k in range(n):
            d2[k] = <uint16_t>(narrow(relu(a4[k], i.flags), kind, False, True) << 8
                               | narrow(relu(b4[k], i.flags), kind, False, True))
    elif op == CVT_2F16_2E:
        for k in range(n):
            d4[k] = (narrow(widen(a2[k] >> 8, kind), F16, False, False) << 16
                     | narrow(widen(a2[k] & 0xFF, kind), F16, False, False))


cdef inline double relu(double x, int flags) noexcept nogil:
    return 0 if flags & RELU and x <= 0 else x
