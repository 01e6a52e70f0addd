# SPDX-License-Identifier: Apache-2.0
# What the lanes of a warp do together: shfl.sync (9.7.9.6), vote.sync (9.7.13.9), match.sync (9.7.13.10), activemask
# (9.7.13.11), redux.sync (9.7.13.12), elect.sync (9.7.13.14), bar.warp.sync (9.7.13.2).
#
# Operands: results, arguments, and last the member mask. Every lane must name itself, all lanes it names must be here
# with the same mask, and nothing may be taken from a lane that was not named.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from mla_oracle.ptx._block cimport EXITED, Block, Instr, fail, row
from mla_oracle.ptx._clocks cimport tell_lanes
from mla_oracle.ptx._opcodes cimport *
from mla_oracle.ptx._races cimport meet_lanes


cdef inline uint32_t bits_of(const uint32_t* mask) noexcept nogil:
    cdef uint32_t bits = 0
    cdef int k
    for k in range(32):
        bits |= (mask[k] & 1) << k
    return bits


cdef inline const uint32_t* members_of(Block* b, const Instr* i) noexcept nogil:
    """The row of member masks, or NULL: the whole warp takes part."""
    cdef int n = 0
    if i.op >= LDMATRIX or i.op == ACTIVEMASK:
        return NULL
    while n < 15 and i.operand[n + 1] >= 0:
        n += 1
    return <const uint32_t*>row(b, i.operand[n])


cdef inline int ready(Block* b, const Instr* i, const uint32_t* mask, uint32_t* waiting) noexcept nogil:
    """1: every warp can go on; 0: those in `waiting` lack lanes; -1: a fault."""
    cdef const uint32_t* members = members_of(b, i)
    cdef Py_ssize_t first
    cdef uint32_t here, done
    cdef int result = 1, k, state
    if i.op == ACTIVEMASK:
        return 1
    for first in range(0, b.n, 32):
        here, done = bits_of(mask + first), 0
        for k in range(32):
            if (here & ~done) >> k & 1:
                state = present(b, members, first, here, k)
                if state < 0:
                    return -1
                if state == 0:
                    waiting[(b.low + first) >> 5] = 1
                    result = 0
                if state == 0 or members == NULL:
                    break
                done |= members[first + k]
    return result


cdef inline int present(Block* b, const uint32_t* members, Py_ssize_t first, uint32_t here, int k) noexcept nogil:
    """Are the lanes that lane k of a warp names here, with the same mask? As `ready`."""
    cdef uint32_t named = members[first + k] if members != NULL else 0xFFFFFFFFU
    cdef int j
    if not named >> k & 1:
        fail(b, NOT_IN_MASK, b.low + first + k, named, 0, 0)
        return -1
    for j in range(32):
        if not named >> j & 1:
            continue
        if not here >> j & 1:
            if b.states[b.low + first + j] != EXITED:
                return 0
            fail(b, EXITED_LANES, b.low + first + k, named & ~here, 0, 0)
            b.fault_other = <int32_t>(b.low + first + j)
            return -1
        if members != NULL and members[first + j] != named:
            fail(b, DIFFERENT_MASKS, b.low + first + k, named, 0, 0)
            return -1
    return 1


cdef inline int first_bit(uint32_t x) noexcept nogil:
    cdef int k = 0
    while k < 31 and not x >> k & 1:
        k += 1
    return k


cdef inline bint shuffle(Block* b, const Instr* i, const uint32_t* mask, Py_ssize_t first) noexcept nogil:
    """One warp. d = a of lane j, |p = j was in range; arguments a, b, c as in the ISA's table."""
    cdef uint32_t* d = <uint32_t*>row(b, i.operand[0]) + first
    cdef uint32_t* p = <uint32_t*>row(b, i.operand[1]) + first if i.results == 2 else NULL
    cdef const uint32_t* a = <const uint32_t*>row(b, i.operand[i.results]) + first
    cdef const uint32_t* lanes = <const uint32_t*>row(b, i.operand[i.results + 1]) + first
    cdef const uint32_t* clamps = <const uint32_t*>row(b, i.operand[i.results + 2]) + first
    cdef const uint32_t* members = <const uint32_t*>row(b, i.operand[i.results + 3]) + first
    cdef uint32_t value[32]
    cdef int k, j, step, segment, clamp, top
    cdef bint inside
    for k in range(32):
        value[k] = a[k]
    for k in range(32):
        if not mask[first + k]:
            continue
        step, clamp, segment = lanes[k] & 31, clamps[k] & 31, clamps[k] >> 8 & 31
        top = (k & segment) | (clamp & ~segment)
        if i.op == SHFL_UP:
            j = k - step
            inside = j >= top
        elif i.op == SHFL_DOWN:
            j = k + step
            inside = j <= top
        elif i.op == SHFL_BFLY:
            j = k ^ step
            inside = j <= top
        else:
            j = (k & segment) | (step & ~segment)
            inside = j <= top
        if not inside:
            j = k
        if not members[k] >> j & 1:
            fail(b, NOT_IN_MASK, b.low + first + k, members[k], 0, 0)
            b.fault_other = <int32_t>(b.low + first + j)
            return False
        d[k] = value[j]
        if p != NULL:
            p[k] = 0xFFFFFFFFU if inside else 0
    return True


cdef inline uint32_t reduced(int op, const uint32_t* a, uint32_t members) noexcept nogil:
    cdef uint32_t result = 0xFFFFFFFFU if op == REDUX_AND or op == REDUX_MIN_U else 0
    cdef int k
    if op == REDUX_MIN_S:
        result = 0x7FFFFFFF
    elif op == REDUX_MAX_S:
        result = 0x80000000U
    for k in range(32):
        if not members >> k & 1:
            continue
        if op == REDUX_ADD:
            result += a[k]
        elif op == REDUX_AND:
            result &= a[k]
        elif op == REDUX_OR:
            result |= a[k]
        elif op == REDUX_XOR:
            result ^= a[k]
        elif op == REDUX_MIN_U:
            result = min(result, a[k])
        elif op == REDUX_MAX_U:
            result = max(result, a[k])
        elif op == REDUX_MIN_S:
            result = <uint32_t>min(<int32_t>result, <int32_t>a[k])
        else:
            result = <uint32_t>max(<int32_t>result, <int32_t>a[k])
    return result


cdef inline uint32_t voted(const uint32_t* a, uint32_t members) noexcept nogil:
    cdef uint32_t votes = 0
    cdef int k
    for k in range(32):
        votes |= (a[k] & 1) << k
    return votes & members


cdef inline uint32_t matching(const uint32_t* a, int k, uint32_t members) noexcept nogil:
    cdef uint32_t same = 0
    cdef int j
    for j in range(32):
        same |= <uint32_t>(a[j] == a[k]) << j
    return same & members


cdef inline void together(Block* b, const Instr* i, const uint32_t* mask, Py_ssize_t first) noexcept nogil:
    """One warp of everything but shfl: a result of the group for each of its lanes."""
    cdef uint32_t* d = <uint32_t*>row(b, i.operand[0]) + first
    cdef const uint32_t* a = <const uint32_t*>row(b, i.operand[i.results]) + first
    cdef const uint32_t* members = members_of(b, i)
    cdef uint32_t result[32]
    cdef uint32_t second[32]
    cdef uint32_t votes, here = bits_of(mask + first), m
    cdef int k
    for k in range(32):
        if not here >> k & 1:
            continue
        m = members[first + k] if members != NULL else here
        if i.op == ACTIVEMASK:
            result[k] = here
        elif i.op == ELECT:
            result[k] = first_bit(m)
            second[k] = 0xFFFFFFFFU if first_bit(m) == k else 0
        elif i.op == BAR_WARP:
            if k == first_bit(m) and b.launch.checks:
                meet_lanes(b, <uint32_t>((b.low + first) >> 5), m)
                tell_lanes(b, <uint32_t>((b.low + first) >> 5), m)
        elif i.op == MATCH_ANY or i.op == MATCH_ALL:
            result[k] = matching(a, k, m)
            if i.op == MATCH_ALL:
                second[k] = 0xFFFFFFFFU if result[k] == m else 0
                result[k] = m if result[k] == m else 0
        elif i.op <= BALLOT:
            votes = voted(a, m)
            if i.op == BALLOT:
                result[k] = votes
            elif i.op == VOTE_ALL:
                result[k] = 0xFFFFFFFFU if votes == m else 0
            elif i.op == VOTE_ANY:
                result[k] = 0xFFFFFFFFU if votes else 0
            else:
                result[k] = 0xFFFFFFFFU if votes == m or votes == 0 else 0
        else:
            result[k] = reduced(i.op, a, m)
    for k in range(32):
        if here >> k & 1 and i.results:
            d[k] = result[k]
            if i.results == 2:
                (<uint32_t*>row(b, i.operand[1]))[first + k] = second[k]


cdef inline bint collective(Block* b, const Instr* i, const uint32_t* mask) noexcept nogil:
    """All warps of the group, which are `ready`."""
    cdef Py_ssize_t first
    for first in range(0, b.n, 32):
        if not bits_of(mask + first):
            continue
        if i.op <= SHFL_IDX:
            if not shuffle(b, i, mask, first):
                return False
        else:
            together(b, i, mask, first)
    return True
