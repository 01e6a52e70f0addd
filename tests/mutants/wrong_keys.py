# SPDX-License-Identifier: Apache-2.0
"""Wrong pages, bytes, lengths and visible keys in plain loops: name of the mutant -> steps of loops.Kernel."""

import math

import numpy as np
from loops import Kernel, state

NAN = math.nan


def entry(of):
    """The block id of entry i; None: no page."""
    return {"entry": lambda k, b, i: of(k, b, i)}


def used(k, b):
    return -(-k.lens[b] // k.P)


def at(k, b, i):
    return Kernel.entry(k, b, i)


def of_used(index):
    """Entry i of the used ones is entry index(k, b, i); past the used ones there is none."""
    return entry(lambda k, b, i: at(k, b, index(k, b, i)) if 0 <= i < used(k, b) else None)


def slot(of):
    """Token j lies in slot of(k, b, j) of the cache; None is nowhere."""

    def address(k, b, j):
        own = of(k, b, j)
        return None if own is None else k.slot(own)

    return {"address": address}


def size(block):
    def of(k, b, j):
        page = at(k, b, j // block(k))
        return None if page is None else page * block(k) + j % block(k)

    return slot(of)


def right_slot(k, b, j):
    page = at(k, b, j // k.P)
    return None if page is None else page * k.P + j % k.P


def token_slots(k, b, j):
    own = right_slot(k, b, j // k.P)
    return None if own is None else own * k.P + j % k.P


def flat_used(k):
    return [at(k, b, i) for b in range(k.B) for i in range(used(k, b))]


def start_offset(k, b, i):
    pages, first = flat_used(k), sum(k.lens[:b]) // k.P
    return pages[first + i] if first + i < len(pages) else None


def in_flat(start, step):
    def of(k, b, i):
        place = start(k, b) + step(k) * i
        return int(k.table.reshape(-1)[place]) if place < k.table.size else None

    return entry(of)


def widest(k):
    return -(-max(k.lens) // k.P)


def zero_from(first):
    """Entries from first(used pages) on are 0."""
    return entry(lambda k, b, i: at(k, b, i) if i < max(first(used(k, b)), 1) or i >= k.table.shape[1] else 0)


def keys(of):
    return {"keys": of}


def right(k, b, t, h):
    return Kernel.keys(k, b, t, h)


def kept(which):
    return keys(lambda k, b, t, h: [j for j in right(k, b, t, h) if which(k, b, j)])


def twice(which):
    return keys(lambda k, b, t, h: right(k, b, t, h) + [j for j in right(k, b, t, h) if which(k, b, j)])


def middle(k, b):
    return max(used(k, b) // 2, 1)


def last_swapped(page, zero):
    """Entry `page` is the last used one, and the last the other, where a request has both."""

    def index(k, b, i):
        last = used(k, b) - 1
        return {page: last, last: page}.get(i, i) if page < last else i

    def row(k, b, j):
        stale = page < used(k, b) - 1 and j // k.P == page and j % k.P > (k.lens[b] - 1) % k.P
        return np.zeros(k.D) if zero and stale else Kernel.row(k, b, j)

    return of_used(index) | {"row": row}


PAGING = {
    "last-swapped-0": last_swapped(0, False),
    "last-swapped-0-zero": last_swapped(0, True),
    "last-swapped-1": last_swapped(1, False),
    "last-swapped-1-zero": last_swapped(1, True),
    "table-of-request-0": entry(lambda k, b, i: at(k, 0, i)),
    "next-table-row": entry(lambda k, b, i: at(k, (b + 1) % k.B, i)),
    "table-stride": in_flat(lambda k, b: b * widest(k), lambda k: 1),
    "table-transposed": in_flat(lambda k, b: b, lambda k: k.B),
    "start-offset": entry(start_offset),
    "identity": entry(lambda k, b, i: i if i < k.table.shape[1] else None),
    "contiguous": entry(lambda k, b, i: at(k, b, 0) + i if i < k.table.shape[1] else None),
    "first-page": of_used(lambda k, b, i: 0),
    "next-entry": of_used(lambda k, b, i: i + 1),
    "entry-before": of_used(lambda k, b, i: max(i - 1, 0)),
    "pairs-swapped": of_used(lambda k, b, i: i ^ 1 if i ^ 1 < used(k, b) else i),
    "edge-early": {"address": lambda k, b, j: None if at(k, b, (j + 1) // k.P) is None
                   else at(k, b, (j + 1) // k.P) * k.stride + j % k.P * k.D * k.item},
    "packed": slot(lambda k, b, j: sum(k.lens[:b]) + j),
    "row-rotated": slot(lambda k, b, j: None if at(k, b, j // k.P) is None
                        else at(k, b, j // k.P) * k.P + (j + 1) % k.P),
    "next-page-id": entry(lambda k, b, i: None if at(k, b, i) is None else at(k, b, i) + 1),
    "table-int64": entry(lambda k, b, i: 0 if i % 2 else at(k, b, i // 2)),
    "truncated-last": zero_from(lambda n: n - 1),
    "truncated-half": zero_from(lambda n: math.ceil(n / 2)),
    "truncated-first": zero_from(lambda n: 1),
    "clamped": of_used(lambda k, b, i: min(i, max(used(k, b) - 2, 0))),
    "first-page-dropped": kept(lambda k, b, j: j >= k.P),
    "middle-page-dropped": kept(lambda k, b, j: j // k.P != middle(k, b)),
    "last-page-dropped": kept(lambda k, b, j: j // k.P != max(used(k, b) - 1, 1)),
    "first-page-twice": twice(lambda k, b, j: j < k.P),
    "half-page-twice": slot(lambda k, b, j: right_slot(k, b, j // k.P * k.P + j % k.P % (k.P // 2))),
    "half-page-lost": kept(lambda k, b, j: j % k.P < k.P // 2),
    "size-doubled": size(lambda k: 2 * k.P),
    "size-halved": size(lambda k: k.P // 2),
    "size-64": size(lambda k: 64),
    "size-1": size(lambda k: 1),
    "token-slots": slot(token_slots),
    "page-as-slot": slot(lambda k, b, j: None if at(k, b, j // k.P) is None else at(k, b, j // k.P) + j % k.P),
    "next-slot": {"address": lambda k, b, j: None if Kernel.address(k, b, j) is None
                  else Kernel.address(k, b, j) + k.D * k.item},
}


def bytes_of(first, row=lambda k: k.D * k.item):
    """Row j % P starts row(k) bytes after the last one of its page, which starts at byte first(k, id)."""

    def address(k, b, j):
        page = at(k, b, j // k.P)
        return None if page is None else first(k, page) + j % k.P * row(k)

    return {"address": address}


def word(x, bits, signed):
    """x in two's complement."""
    x %= 2**bits
    return x - 2**bits if signed and x >= 2 ** (bits - 1) else x


def elements(signed):
    return bytes_of(lambda k, page: word(page * k.stride // k.item, 32, signed) * k.item)


def in_bytes(signed):
    return bytes_of(lambda k, page: word(page * k.stride, 32, signed))


def padded(k):
    return math.ceil(k.D / 128) * 128 * k.item


ADDRESS = {
    "stride.pages": bytes_of(lambda k, page: page * k.page_bytes),
    "stride.pages-doubled": bytes_of(lambda k, page: page * 2 * k.page_bytes),
    "stride.value-width-of-pages": bytes_of(lambda k, page: page * k.P * k.V * k.item),
    "stride.value-width": bytes_of(lambda k, page: page * k.P * k.V * k.item, lambda k: k.V * k.item),
    "stride.value-width-in-page": bytes_of(lambda k, page: page * k.stride, lambda k: k.V * k.item),
    "stride.padded-rows": bytes_of(lambda k, page: page * k.P * padded(k), padded),
    "wrap.uint32-elements": elements(False),
    "wrap.int32-elements": elements(True),
    "wrap.uint32-bytes": in_bytes(False),
    "wrap.int32-bytes": in_bytes(True),
    "wrap.uint32-whole": {"address": lambda k, b, j: Kernel.address(k, b, j) % 2**32},
    "wrap.id-int16": bytes_of(lambda k, page: word(page, 16, True) * k.stride),
    "wrap.id-uint16": bytes_of(lambda k, page: word(page, 16, False) * k.stride),
    "wrap.id-float32": bytes_of(lambda k, page: int(np.float32(page)) * k.stride),
}


def length(of):
    return {"length": lambda k, b: max(of(k, b, k.lens[b]), 0)}


def never_written(which):
    return {"row": lambda k, b, j: np.zeros(k.D) if which(k, b, j) else Kernel.row(k, b, j)}


def split_slack(k, b, t, h):
    return [*right(k, b, t, h), *range(k.lens[b], math.ceil(k.lens[b] / 4) * 4)]


def count(of):
    """How many keys token t sees of request b: of(k, b, t, h, right number), at most its length."""

    def number(k, b, t, h):
        return max(0, min(of(k, b, t, h, Kernel.count(k, b, t, h)), k.lens[b]))

    return {"count": number}


LENGTH = {
    "last-of-several": count(lambda k, b, t, h, n: max(n - 1, min(n, 1))),
    "minus-one": length(lambda k, b, n: n - 1 if n else 0),
    "plus-one": length(lambda k, b, n: n + 1 if n else 0),
    "without-new": length(lambda k, b, n: n - k.T),
    "new-twice": length(lambda k, b, n: n + k.T if n else 0),
    "whole-pages": length(lambda k, b, n: n - n % k.P),
    "whole-tiles": length(lambda k, b, n: n - n % 64),
    "page-slack": length(lambda k, b, n: used(k, b) * k.P),
    "twice-less-one": length(lambda k, b, n: 2 * n - 1),
    "longest": length(lambda k, b, n: max(k.lens)),
    "shortest": length(lambda k, b, n: min(k.lens)),
    "of-request-0": length(lambda k, b, n: k.lens[0]),
    "of-next-request": length(lambda k, b, n: k.lens[(b + 1) % k.B]),
    "int64": length(lambda k, b, n: 0 if b % 2 else k.lens[b // 2]),
    "last-page-len-0": length(lambda k, b, n: (n - 1) // k.P * k.P + n % k.P if n else 0),
    "split-rest-lost": kept(lambda k, b, j: j < k.lens[b] // 4 * 4),
    "split-slack": keys(split_slack),
    "at-most-64": length(lambda k, b, n: min(n, 64)),
}


def pads(tile):
    """Lanes of zeros up to the next multiple of the tile, seen by every query token."""

    def attend(k, b, t, h):
        js = right(k, b, t, h)
        lanes = -k.lens[b] % tile(k)
        s = [k.score(b, t, h, j) for j in js] + [0.0] * lanes
        return k.softmax(b, t, h, s, [k.value(b, j) for j in js] + [np.zeros(k.V)] * lanes)

    return {"attend": attend}


def pads_of_rows(tile):
    """Lanes of zeros up to the next multiple of the tile after the last key that the query token sees."""

    def attend(k, b, t, h):
        js = right(k, b, t, h)
        lanes = -len(js) % tile
        s = [k.score(b, t, h, j) for j in js] + [0.0] * lanes
        return k.softmax(b, t, h, s, [k.value(b, j) for j in js] + [np.zeros(k.V)] * lanes)

    return {"attend": attend}


def masked(score):
    """Keys that are not seen have this score."""

    def attend(k, b, t, h):
        n = k.lens[b]
        s = [k.score(b, t, h, j) if j < k.count(b, t, h) else score for j in range(n)]
        return k.softmax(b, t, h, s, [k.value(b, j) for j in range(n)])

    return {"attend": attend}


def touched(where, value=True):
    """0 times the value, or NaN + (-inf), of the lanes past the length, up to the end of the page."""

    def attend(k, b, t, h):
        out, lse = Kernel.attend(k, b, t, h)
        if not k.count(b, t, h) and value:
            return out, lse
        for j in range(k.lens[b], used(k, b) * k.P):
            row = where(k, b, j)
            if value:
                out = out + 0.0 * row[: k.V]
            elif math.isnan(float(k.query(b, t, h) @ row)):
                return np.full(k.V, NAN), NAN
        return out, lse

    return {"attend": attend}


def behind(tile):
    return {"row": lambda k, b, j: Kernel.row(k, b, j if j < tile else j - tile)}


def joined(states):
    """The states (m, z, acc) of states(k, b, t, h) joined."""

    def attend(k, b, t, h):
        own = [s for s in states(k, b, t, h) if s[0] != -math.inf]
        if not own:
            return k.empty(b, t, h)
        m = max(s[0] for s in own)
        z = sum(math.exp(s[0] - m) * s[1] for s in own)
        return sum(math.exp(s[0] - m) * s[2] for s in own) / z, k.lse(m, z, 0)

    return {"attend": attend}


TAIL = {
    "pad.lanes-32": pads(lambda k: 32),
    "pad.lanes-64": pads(lambda k: 64),
    "pad.lanes-128": pads(lambda k: 128),
    "pad.lanes-256": pads(lambda k: 256),
    "pad.lanes-page": pads(lambda k: k.P),
    "pad.rows-32": pads_of_rows(32),
    "pad.rows-64": pads_of_rows(64),
    "pad.masked-as-zero": masked(0.0),
    "tail.nan-value": touched(Kernel.row),
    "tail.nan-score": touched(Kernel.row, value=False),
    "tail.slot-0": touched(lambda k, b, j: k.read(0)),
    "key.first-lost": kept(lambda k, b, j: j != 0),
    "key.second-lost": kept(lambda k, b, j: j != 1),
    "key.first-twice": twice(lambda k, b, j: j == 0),
    "key.last-twice": twice(lambda k, b, j: j == k.lens[b] - 1),
    "key.first-tile-lost": kept(lambda k, b, j: j >= 64),
    "key.whole-tile-lost-64": kept(lambda k, b, j: k.lens[b] % 64 or j < k.lens[b] - 64),
    "key.new-as-zero": never_written(lambda k, b, j: j >= k.lens[b] - k.T),
    "key.first-page-as-zero": never_written(lambda k, b, j: j < k.P),
    "key.last-page-as-zero": never_written(lambda k, b, j: j // k.P == used(k, b) - 1),
    "key.tile-edge-lost-64": kept(lambda k, b, j: j % 64 != 63),
    "key.tile-edge-twice-64": twice(lambda k, b, j: j and j % 64 == 0),
    "key.tile-edge-lost-128": kept(lambda k, b, j: j % 128 != 127),
    "key.tile-behind-64": behind(64),
    "state.zero": joined(lambda k, b, t, h: [(0.0, 1.0, np.zeros(k.V)), state(k, b, t, h, right(k, b, t, h))]),
    "state.carried": joined(lambda k, b, t, h: [state(k, i, t, h, right(k, i, t, h)) for i in range(b + 1)]),
}


CAUSAL = {
    "causal.none": count(lambda k, b, t, h, n: k.lens[b]),
    "causal.unwanted": count(lambda k, b, t, h, n: k.lens[b] - k.T + t + 1),
    "causal.top-left": count(lambda k, b, t, h, n: t + 1),
    "causal.strict": count(lambda k, b, t, h, n: n - 1),
    "causal.one-more": count(lambda k, b, t, h, n: n + 1),
    "causal.first-token": count(lambda k, b, t, h, n: k.lens[b] - k.T + 1),
    "causal.reversed": count(lambda k, b, t, h, n: k.lens[b] - t),
    "causal.page-granular": count(lambda k, b, t, h, n: math.ceil(n / k.P) * k.P),
    "causal.packed-mod": count(lambda k, b, t, h, n: k.lens[b] - k.T + (t * k.H + h) % k.T + 1),
    "causal.packed-rows": count(lambda k, b, t, h, n: k.lens[b] - k.T * k.H + t * k.H + h + 1),
    "causal.prefix-only": kept(lambda k, b, j: j < k.lens[b] - k.T),
    "causal.new-only": kept(lambda k, b, j: j >= k.lens[b] - k.T),
    "causal.itself-only": keys(lambda k, b, t, h: right(k, b, t, h)[-1:]),
    "causal.first-page-only": kept(lambda k, b, j: j < k.P),
    "window.16": keys(lambda k, b, t, h: right(k, b, t, h)[-16:]),
    "window.128": keys(lambda k, b, t, h: right(k, b, t, h)[-128:]),
    "mask.finite-10000": masked(-10000.0),
    "mask.finite-100": masked(-100.0),
}

WRONG = {
    **{f"paging.{name}": steps for name, steps in PAGING.items()},
    **ADDRESS,
    **{f"length.{name}": steps for name, steps in LENGTH.items()},
    **TAIL,
    **CAUSAL,
}
