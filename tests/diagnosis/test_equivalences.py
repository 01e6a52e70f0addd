# SPDX-License-Identifier: Apache-2.0
"""What is no bug: other common orders, other associations, other junk. Beside each, the bug next to it, which is named.

The kernels are numpy in f32 (public_kernels.Paged): what they round is their own.
"""

from dataclasses import replace

import numpy as np
import pytest
from public_kernels import Paged, each

from mla_oracle.cases.inputs import generate
from mla_oracle.diagnosis import diagnose
from mla_oracle.oracle import expected
from mla_oracle.verdict.compare import check

ID = "paged:heads=3,row=48,value=32,lens=65+0+1+130+7,tokens=2,block=16,scale=0.3,unread={}"
CASE = generate(ID.format("numbers"))
POISONED = generate(ID.format("nan"))


def f32(p, b, t, h, q=None, k=None):
    """(scores [n], values [n, V]) of one row, f32."""
    q = p.q[b, t, h] if q is None else q
    k = p.rows(b)[: p.seen(b, t)] if k is None else k
    return (k.astype(np.float32) @ q.astype(np.float32)) * np.float32(p.scale), k[:, : p.V].astype(np.float32)


def finished(p, m, z, acc):
    return (acc / z, m + np.log(z)) if z else (np.zeros(p.V), -np.inf)


def plain(p, s, v):
    m = s.max(initial=-np.inf)
    w = np.exp(s - m)
    return finished(p, m, w.sum(dtype=np.float32), w @ v)


def reordered(query_too):
    """Rope elements from pairs to halves, of the keys and (or not) of the query."""

    def row(p, b, t, h):
        order = np.r_[: p.V, p.V : p.D : 2, p.V + 1 : p.D : 2]
        q, k = p.q[b, t, h], p.rows(b)[: p.seen(b, t)]
        return plain(p, *f32(p, b, t, h, q[order] if query_too else q, k[:, order]))

    return row


def turned_on(query_too):
    """Every position counted from 7, of the keys and (or not) of the query."""

    def row(p, b, t, h):
        q, k = p.q[b, t, h], p.rows(b)[: p.seen(b, t)]
        return plain(p, *f32(p, b, t, h, p.turned(q, 7) if query_too else q, p.turned(k, np.full(len(k), 7))))

    return row


def split(rescaled):
    """Splits of 32 keys, in f32, merged from the last to the first; or from the first, each added as it is."""

    def row(p, b, t, h):
        s, v = f32(p, b, t, h)
        m, z, acc = -np.inf, np.float32(0), np.zeros(p.V, np.float32)
        for first in range(0, len(s), 32)[:: -1 if rescaled else 1]:
            part = slice(first, first + 32)
            top = max(m, s[part].max())
            old = np.float32(np.exp(m - top)) if rescaled else np.float32(1)
            w = np.exp(s[part] - top)
            m, z, acc = top, z * old + w.sum(dtype=np.float32), acc * old + w @ v[part]
        return finished(p, m, z, acc)

    return row


def backwards(every_key):
    """One key at a time from the last to the first; or to the second."""

    def row(p, b, t, h):
        s, v = f32(p, b, t, h)
        m, z, acc = -np.inf, np.float32(0), np.zeros(p.V, np.float32)
        for j in range(len(s))[::-1] if every_key or len(s) < 2 else range(1, len(s))[::-1]:
            top = max(m, s[j])
            old, w = np.exp(m - top), np.exp(s[j] - top)
            m, z, acc = top, z * old + w, acc * old + w * v[j]
        return finished(p, m, z, acc)

    return row


def folded(log2e):
    """The scale times log2 e in q, weights 2^s; or without the log2 e."""

    def row(p, b, t, h):
        factor = p.scale * (1.4426950408889634 if log2e else 1)
        s, v = f32(p, b, t, h, p.q[b, t, h] * (factor / p.scale))
        m = s.max(initial=-np.inf)
        w = np.exp2(s - m)
        out, _ = finished(p, m, w.sum(), w @ v)
        return out, (m + np.log2(w.sum())) * np.log(2) if len(s) else -np.inf

    return row


EQUIVALENT = {
    "rope elements of q and k in another common order": (reordered, "rope pairing"),
    "all positions counted from 7": (turned_on, "wrong position"),
    "splits merged from the last to the first": (split, "missing rescale"),
    "keys from the last to the first": (backwards, "key lost or repeated"),
    "exp2 of scores in base 2": (folded, "uniform temperature"),
}


@pytest.fixture(scope="module")
def truth():
    return expected(CASE)


def verdict(case, results, truth):
    return diagnose(case, results["out"], results["lse"], truth=truth, separate=False)


@pytest.mark.parametrize("name", EQUIVALENT)
def test_an_equivalent_kernel_is_accepted_and_nothing_is_named(name, truth):
    kernel, _ = EQUIVALENT[name]
    results = each(kernel(True))(CASE)
    assert check(CASE, results, truth).passed
    found = verdict(CASE, results, truth)
    assert (found.named, found.facts, found.classes) == (False, [], [])


@pytest.mark.parametrize("name", EQUIVALENT)
def test_the_bug_next_to_it_is_rejected_and_named(name, truth):
    kernel, family = EQUIVALENT[name]
    results = each(kernel(False))(CASE)
    assert not check(CASE, results, truth).passed
    found = verdict(CASE, results, truth)
    assert found.named and found.classes[0].family == family, found.summary


def unread(case):
    """bool [pages, block]: slots that no query reads."""
    never = np.ones(case.kv_cache.shape[:2], bool)
    for b, n in enumerate(case.seq_lens):
        j = np.arange(n)
        never[case.block_table[b, j // never.shape[1]], j % never.shape[1]] = False
    return never


def with_junk(case, value, entry):
    """The case with other numbers in every slot nobody reads, and other ids in every table entry nobody reads."""
    cache, table = case.kv_cache.copy(), case.block_table.copy()
    cache[unread(case)] = value
    for b, n in enumerate(case.seq_lens):
        table[b, -(-int(n) // cache.shape[1]) :] = entry
    return replace(case, kv_cache=cache, block_table=table)


@pytest.mark.parametrize("value, entry", [(np.nan, 0), (np.inf, 2**31 - 1), (3e38, -1), (-7.0, 1)])
def test_what_lies_where_nobody_reads_changes_no_bit_of_a_verdict(value, entry, truth):
    assert unread(CASE).sum() > 20
    junk = with_junk(CASE, value, entry)
    other = expected(junk)
    assert all(np.array_equal(truth[name], other[name]) for name in truth)
    results = each(lambda p, b, t, h: plain(p, *f32(p, b, t, h)))(CASE)
    one, two = (check(case, results, right) for case, right in ((CASE, truth), (junk, other)))
    assert one.passed and two.passed and one.figures == two.figures


def test_a_kernel_that_multiplies_junk_by_zero_is_rejected_and_named():
    def row(p, b, t, h):
        out, lse = plain(p, *f32(p, b, t, h))
        n = p.lens[b] if p.seen(b, t) else 0
        return out + sum(0 * p.row(b, j)[: p.V] for j in range(n, -(-n // p.block) * p.block)), lse

    results = each(row)(POISONED)
    found = verdict(POISONED, results, expected(POISONED))
    assert found.named and found.classes[0].family == "0·NaN tail", found.summary
    sound = expected(CASE)
    assert check(CASE, each(row)(CASE), sound).passed  # where junk is numbers it cannot be seen


def test_a_request_alone_is_what_it_is_in_its_batch(truth):
    alone = replace(CASE, q=CASE.q[3:4], block_table=CASE.block_table[3:4], seq_lens=CASE.seq_lens[3:4])
    own = expected(alone)
    assert all(np.array_equal(own[name][0], truth[name][3]) for name in own)
    assert Paged(alone).seen(0, 0) == 129
