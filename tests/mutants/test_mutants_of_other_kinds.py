# SPDX-License-Identifier: Apache-2.0
"""Mutants of merge, rope, append, absorbed and naive cases, and those that need a geometry, against plain formulas."""

import cmath
import math
from dataclasses import replace

import numpy as np
import pytest
import wrong_joins
import wrong_keys
import wrong_rows
import wrong_scores
from cases import filled
from loops import Kernel, wrong

from mla_oracle import Yarn
from mla_oracle.cases import AbsorbedCase, AppendCase, MergeCase
from mla_oracle.cases.inputs import generate
from mla_oracle.mutants import (
    Problem,
    bank,
    causal,
    columns,
    find,
    keys,
    lengths,
    ranges,
    recurrence,
    rope,
    scores,
    tail,
    temperature,
    values,
)
from mla_oracle.mutants.mutant import turned as turned_case
from mla_oracle.mutants.problem import absorb
from mla_oracle.oracle import expected

MERGED = [m for m in bank() if "merge" in m.kinds]


class Row:
    """A row of a merge case as wrong_joins.States has it."""

    def __init__(self, out, lse):
        self.full = [i for i, x in enumerate(lse) if x > -math.inf]
        self.lse, self.m = list(lse), list(lse)
        self.z = [1.0 if x > -math.inf else 0.0 for x in lse]
        self.out = self.acc = [o if z else 0 * o for o, z in zip(np.nan_to_num(out), self.z, strict=True)]


@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("mutant", MERGED, ids=lambda m: m.name)
def test_a_merge_of_states_is_wrong_as_that_of_splits_is(monkeypatch, mutant, base):
    case = generate(f"merge:states=4,rows=3,heads=2,value=5,lse_base={base}")
    unit = 1.0 if base == "e" else math.log(2)
    lse = case.partial_lse.astype(float) * unit

    class Merge(Kernel):
        def __init__(self):
            self.T, self.V, self.unit, self.H, self.case = 1, 5, 1 / unit, 2, case

        def attend(self, b, t, h):  # a right merge, which the mutant's own replaces
            return wrong_joins.merge(lambda s: wrong_joins.softmax(s.lse))["attend"](self, b, t, h)

    out = case.partial_out.astype(float)
    monkeypatch.setattr(wrong_joins, "States", lambda k, b, t, h: Row(out[:, b, h], lse[:, b, h]))
    monkeypatch.setattr(Kernel, "attend", Merge.attend)
    kernel = type("Wrong", (Merge,), wrong_joins.WRONG[mutant.name])()
    got = mutant.run(case)
    for b, h in np.ndindex(3, 2):
        with np.errstate(all="ignore"):
            want, own = kernel.attend(b, 0, h)
        assert np.allclose(got["out"][b, h], want, rtol=1e-9, atol=1e-12, equal_nan=True)
        assert np.allclose(got["lse"][b, h], own, rtol=1e-9, equal_nan=True)


def test_states_with_numbers_of_very_different_size_show_the_base():
    for z in ([2.0, 8.0], [1.0, 1e6]):
        case = MergeCase(partial_out=np.eye(2), partial_lse=np.log(z))
        w = np.array(z) ** (1 / math.log(2))
        assert np.allclose(find("merge.base-2-as-e").run(case)["out"], w / w.sum())
        w = np.array(z) ** math.log(2)
        assert np.allclose(find("merge.e-as-base-2").run(case)["out"], w / w.sum())
    shares = find("merge.base-2-as-e").run(MergeCase(partial_out=np.eye(2), partial_lse=np.log([2.0, 8.0])))["out"]
    assert shares.round(3).tolist() == [0.119, 0.881]


def turned(x, position, pairing, theta):
    n = len(x) // 2
    y = np.array(x, float)
    for i in range(n):
        a, b = (2 * i, 2 * i + 1) if pairing == "interleaved" else (i, i + n)
        z = complex(x[a], x[b]) * cmath.exp(1j * position * theta[i])
        y[a], y[b] = z.real, z.imag
    return y


OTHER = {"interleaved": "neox", "neox": "interleaved"}
ROPES = {
    "rope.pairing": lambda x, p, pairing, base: turned(x, p, OTHER[pairing], thetas(base, len(x))),
    "rope.doubled": lambda x, p, pairing, base: turned(x, 2 * p, pairing, thetas(base, len(x))),
    "rope.missing": lambda x, p, pairing, base: x,
    "rope.reversed": lambda x, p, pairing, base: turned(x, -p, pairing, thetas(base, len(x))),
    "rope.plus-one-q": lambda x, p, pairing, base: turned(x, p + 1, pairing, thetas(base, len(x))),
    "rope.minus-one-q": lambda x, p, pairing, base: turned(x, p - 1, pairing, thetas(base, len(x))),
    "rope.base-10000": lambda x, p, pairing, base: turned(x, p, pairing, thetas(1e4, len(x))),
    "rope.exponent": lambda x, p, pairing, base: turned(x, p, pairing, [base ** (-i / len(x)) for i in range(len(x))]),
    "rope.half": lambda x, p, pairing, base: np.concatenate(
        [turned(x[: len(x) // 2], p, pairing, thetas(base, len(x) // 2)), x[len(x) // 2 :]]),
}


def thetas(base, n):
    return [base ** (-2 * i / n) for i in range(n // 2)]


@pytest.mark.parametrize("pairing", ["interleaved", "neox"])
@pytest.mark.parametrize("name", sorted(ROPES))
def test_rows_of_a_rope_case_are_turned_the_wrong_way(name, pairing):
    case = generate(f"rope:heads=2,rope=16,pairing={pairing},base=50000,positions=0+1+30+4096")
    got = find(name).run(case)["out"]
    for i, position in enumerate(case.positions):
        for h in range(2):
            want = ROPES[name](case.x[i, h].astype(float), int(position), pairing, 50000.0)
            assert np.allclose(got[i, h], want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("changes", [
    {},
    {"pairing": "neox"},
    {"yarn": Yarn(factor=40, original_max_position_embeddings=64, mscale=0.707, mscale_all_dim=1).to_json()},
    {"rotary_dim": 10},
    {"rotary_dim": 7, "pairing": "neox"},
], ids=str)
def test_the_right_turn_of_a_rope_case_is_the_truth(changes):
    case = replace(generate("rope:heads=2,rope=16,pairing=interleaved,base=50000,positions=0+1+30+4096"), **changes)
    got = turned_case(case, lambda rotation, x, positions: rotation.turn(x, positions))
    assert np.allclose(got, expected(case)["out"], rtol=0, atol=1e-9)


def test_a_table_in_the_other_layout_is_no_rotation_and_keeps_position_0():
    case = generate("rope:heads=1,rope=16,pairing=interleaved,base=50000,positions=0+300")
    got = find("rope.table-layout").run(case)["out"][:, 0]
    x = case.x[:, 0].astype(float)
    theta = thetas(50000.0, 16)
    assert np.array_equal(got[0], x[0])
    for i in range(8):
        first, second = 300 * theta[2 * i % 8], 300 * theta[(2 * i + 1) % 8]
        assert got[1, 2 * i] == pytest.approx(x[1, 2 * i] * math.cos(first) - x[1, 2 * i + 1] * math.sin(first))
        assert got[1, 2 * i + 1] == pytest.approx(x[1, 2 * i + 1] * math.cos(second) + x[1, 2 * i] * math.sin(second))
    assert abs(np.linalg.norm(got[1]) / np.linalg.norm(x[1]) - 1) > 1e-2


def test_a_geometry_gives_the_rotation_its_base_pairing_and_ramp():
    case = generate("paged:geometry=deepseek-v3,heads=1,lens=300,block=32")
    known = Problem(case).rotation
    assert (known.base, known.interleaved, known.yarn.factor, known.assumed) == (1e4, True, 40, False)
    x = np.random.default_rng(1).standard_normal((3, 1, 64))
    from mla_oracle import Geometry, rope_interleaved

    at = np.array([1, 77, 4097])
    want = rope_interleaved(x, at, base=1e4, yarn=Geometry.preset("deepseek-v3").yarn, precision="f64", angles="closed")
    assert np.allclose(known.turn(x, at[:, None].astype(float)), want, atol=1e-9)


@pytest.mark.parametrize("name", ["rope.base-10000", "rope.base-10000-k"])
def test_a_wrong_base_is_that_of_a_geometry_with_another(name):
    case = generate("paged:geometry=glm-5.2,heads=2,lens=40,block=16")
    right = thetas(8e6, 64)

    def turn_query(k, b, t, h):
        p = k.position(b, t)
        q = Kernel.query(k, b, t, h)
        return np.concatenate([q[:512], k.turn(k.turn(q[512:], -p, theta=right), p, theta=thetas(1e4, 64))])

    def turn_key(k, b, j):
        row = Kernel.row(k, b, j)
        return np.concatenate([row[:512], k.turn(k.turn(row[512:], -j, theta=right), j, theta=thetas(1e4, 64))])

    steps = {"key": turn_key} if name.endswith("-k") else {"key": turn_key, "query": turn_query}
    want, got = wrong(case, **steps).run(), find(name).run(case)
    assert np.allclose(got["out"], want["out"], rtol=0, atol=1e-9) and np.allclose(got["lse"], want["lse"], rtol=1e-9)


def test_scales_of_a_geometry_are_those_of_its_widths():
    case = generate("paged:geometry=deepseek-v2-lite,heads=2,lens=40,block=16")
    for name, scale in {
        "temperature.nope-width": 1 / math.sqrt(128),
        "temperature.row-width": 1 / math.sqrt(576),
        "temperature.no-mscale": 1 / math.sqrt(192),
        "temperature.mscale-v2": (0.1 * math.log(40) + 1) ** 2 / math.sqrt(192),
    }.items():
        want = expected(replace(case, softmax_scale=scale))
        assert np.allclose(find(name).run(case)["out"], want["out"], rtol=0, atol=1e-12), name


def test_an_output_whose_value_has_rope_elements_is_turned_back():
    case = filled(replace(generate("paged:geometry=deepseek-v3,heads=2,lens=8+12,block=4"), head_dim_v=576))
    got, truth = find("rope.output-turned").run(case), expected(case)
    kernel = Kernel(case)
    kernel.R = 64
    for b, h in np.ndindex(2, 2):
        back = kernel.turn(truth["out"][b, h, 512:], -(case.seq_lens[b] - 1))
        assert np.allclose(got["out"][b, h], [*truth["out"][b, h, :512], *back], atol=1e-12)


def dense(seed=4):
    return generate(f"absorbed:heads=3,nope=6,rope=4,value=6,rank=6,queries=2,cached=9,seed={seed}")


DENSE = {
    "absorb.uk-of-head-0": lambda c: replace(c, w_uk=np.stack([c.w_uk[0]] * 3)),
    "absorb.uk-next-head": lambda c: replace(c, w_uk=c.w_uk[[1, 2, 0]]),
    "absorb.uk-transposed": lambda c: replace(c, w_uk=np.stack([w.T for w in c.w_uk])),
    "absorb.uk-power-of-two": lambda c: replace(c, q_nope=c.q_nope * (np.arange(6) < 4)),
    "absorb.uv-of-head-0": lambda c: replace(c, w_uv=np.stack([c.w_uv[0]] * 3)),
    "absorb.uv-next-head": lambda c: replace(c, w_uv=c.w_uv[[1, 2, 0]]),
    "absorb.uk-head-offset": lambda c: replace(c, w_uk=np.stack([c.w_uk.ravel()[6 * h : 6 * h + 36].reshape(6, 6)
                                                                for h in range(3)])),
    "absorb.uv-head-offset": lambda c: replace(c, w_uv=np.stack([c.w_uv.ravel()[6 * h : 6 * h + 36].reshape(6, 6)
                                                                for h in range(3)])),
    "absorb.uv-transposed": lambda c: replace(c, w_uv=np.stack([w.T for w in c.w_uv])),
    "temperature.double": lambda c: replace(c, softmax_scale=2 / math.sqrt(10)),
    "query.head-shift": lambda c: replace(c, w_uv=c.w_uv, q_nope=c.q_nope, w_uk=c.w_uk),
    "length.minus-one": lambda c: replace(c, c_kv=c.c_kv[:-1], k_pe=c.k_pe[:-1]),
    "rope.dropped": lambda c: replace(c, q_pe=0 * c.q_pe, softmax_scale=1 / math.sqrt(10)),
}


@pytest.mark.parametrize("name", sorted(DENSE))
def test_a_dense_mutant_is_the_right_answer_to_a_changed_case(name):
    case = dense()
    want = expected(DENSE[name](case))["out"]
    if name == "query.head-shift":
        latent = absorb(case.q_nope.astype(float), case.w_uk.astype(float))[:, [1, 2, 0]]
        paged_like = replace(case, q_nope=latent, w_uk=np.stack([np.eye(6)] * 3), q_pe=case.q_pe[:, [1, 2, 0]],
                             softmax_scale=1 / math.sqrt(10))
        want = expected(paged_like)["out"]
    assert np.allclose(find(name).run(case)["out"], want, rtol=0, atol=1e-12)


def test_a_weight_split_by_kind_where_it_holds_heads_one_after_the_other():
    case = dense()
    together = np.concatenate([np.concatenate([case.w_uk[h], case.w_uv[h]]) for h in range(3)])  # [H (P + V), L]
    want = expected(AbsorbedCase(q_nope=case.q_nope, q_pe=case.q_pe, c_kv=case.c_kv, k_pe=case.k_pe,
                                 w_uk=together[:18].reshape(3, 6, 6), w_uv=together[18:].reshape(3, 6, 6)))["out"]
    assert np.allclose(find("absorb.split").run(case)["out"], want, rtol=0, atol=1e-12)


def append_case():
    rng = np.random.default_rng(2)
    return AppendCase(
        kv_cache=rng.standard_normal((3, 4, 5)).astype(np.float32),
        c_kv=rng.standard_normal((6, 3)).astype(np.float32),
        k_pe=rng.standard_normal((6, 2)).astype(np.float32),
        slot_mapping=np.array([7, -1, 2, 9, -1, 0]),
    )


WRITES = {  # slots, and which row goes to each
    "append.skipped-to-slot-0": ([7, 0, 2, 9, 0, 0], range(6)),
    "append.skipped-to-last-slot": ([7, 11, 2, 9, 11, 0], range(6)),
    "append.padding-written": ([7, 7, 2, 9, 9, 0], range(6)),
    "append.next-slot": ([8, -1, 3, 10, -1, 1], range(6)),
    "append.first-slots": ([0, 1, 2, 3, 4, 5], range(6)),
    "append.page-slot-swapped": ([3 * 3 + 1, -1, 2 * 3 + 0, 1 * 3 + 2, -1, 0], range(6)),
    "append.last-lost": ([7, -1, 2, 9, -1], range(6)),
    "append.nothing": ([], range(6)),
    "append.row-before": ([7, -1, 2, 9, -1, 0], [5, 0, 1, 2, 3, 4]),
    "append.next-row": ([7, -1, 2, 9, -1, 0], [1, 2, 3, 4, 5, 0]),
}


@pytest.mark.parametrize("name", sorted(WRITES))
def test_a_writer_puts_rows_into_the_wrong_slots(name):
    case = append_case()
    want = case.kv_cache.copy()
    slots, rows = WRITES[name]
    for slot, row in zip(slots, rows, strict=False):
        if slot >= 0:
            want[slot // 4, slot % 4] = [*case.c_kv[row], *case.k_pe[row]]
    assert np.array_equal(find(name).run(case)["kv_cache"], want)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("append.rope-first", lambda c, i, old: [*c.k_pe[i], *c.c_kv[i]]),
        ("append.rope-lost", lambda c, i, old: [*c.c_kv[i], *old[3:]]),
        ("append.latent-lost", lambda c, i, old: [*old[:3], *c.k_pe[i]]),
        ("append.rope-of-row-0", lambda c, i, old: [*c.c_kv[i], *c.k_pe[0]]),
    ],
)
def test_a_writer_puts_the_wrong_row_into_the_slots(name, row):
    case = append_case()
    want = case.kv_cache.copy()
    for i, slot in enumerate(case.slot_mapping):
        if slot >= 0:
            want[slot // 4, slot % 4] = row(case, i, case.kv_cache[slot // 4, slot % 4])
    got = find(name).run(case)["kv_cache"]
    assert np.array_equal(got, want) and got.dtype == case.kv_cache.dtype


@pytest.mark.parametrize(("made", "steps"), [
    (temperature.factor(1.3), wrong_scores.scale(lambda k, s: 1.3 * s)),
    (rope.shifted(5, "k"), wrong_scores.sides("x", lambda k, x, p: k.turn(x, p + 5))["rope.x-k"]),
    (rope.base(300.0, "both"), wrong_scores.sides("x", wrong_scores.base(300.0))["rope.x"]),
    (causal.window(3), {"keys": lambda k, b, t, h: Kernel.keys(k, b, t, h)[-3:]}),
    (causal.masked_at(-2.0), wrong_keys.masked(-2.0)),
    (lengths.shift(-3), {"length": lambda k, b: max(k.lens[b] - 3, 0)}),
    (lengths.at_most(6), {"length": lambda k, b: min(k.lens[b], 6)}),
    (tail.pads(5), wrong_keys.pads(lambda k: 5)),
    (keys.every(3, True), wrong_keys.kept(lambda k, b, j: j % 3 != 2)),
    (keys.behind(5), wrong_keys.behind(5)),
    (values.ahead(3), wrong_rows.token(lambda k, b, j: j + 3 if j + 3 < k.lens[b] else -1)),
    (columns.factor(1.4), wrong_rows.columns(lambda k, o: 1.4 * o)),
    (scores.soft_cap(0.5), wrong_scores.score(lambda k, s, *_: 0.5 * math.tanh(2 * s))),
    (scores.clipped(0.2), wrong_scores.score(lambda k, s, *_: min(s, 0.2))),
    (recurrence.lazy(3.0), wrong_joins.online(wrong_joins.e, lambda d, o: math.exp(d) if -d > 3 else 1.0)),
    (ranges.floored(0.5), wrong_scores.above(0.5)),
], ids=lambda value: getattr(value, "name", ""))
def test_a_mutant_is_made_with_any_constant(made, steps):
    case = filled(generate("paged:heads=2,row=20,value=12,scale=0.3,lens=9+7,block=4,tokens=2"))
    want, got, truth = wrong(case, **steps).run(), made.run(case), expected(case)
    assert np.allclose(got["out"], want["out"], rtol=0, atol=1e-12)
    assert np.allclose(got["lse"], want["lse"], rtol=0, atol=1e-12)
    assert np.abs(got["out"] - truth["out"]).max() > 1e-3
    assert made.parameters


LOOPS = {**wrong_scores.WRONG, **wrong_rows.WRONG, **wrong_keys.WRONG, **wrong_joins.WRONG}


@pytest.mark.parametrize("names", [
    ("temperature.double", "rope.pairing-k"),
    ("paging.first-page", "temperature.half"),
    ("rope.dropped", "length.plus-one"),
    ("causal.none", "lse.base-2"),
    ("value.row-end", "query.head-shift"),
    ("length.minus-one", "merge.equal"),
    ("key.first-lost", "value.factor-0.75"),
    ("online.acc-not-rescaled", "temperature.inverted"),
], ids=" + ".join)
def test_a_composition_is_both_bugs_at_once_in_either_order(names):
    case = filled(generate("paged:heads=2,row=20,value=12,scale=0.3,lens=9+7,block=4,tokens=2"))
    want = wrong(case, **LOOPS[names[0]], **LOOPS[names[1]]).run()
    for order in (names, names[::-1]):
        got = find(" + ".join(order)).run(case)
        assert np.allclose(got["out"], want["out"], rtol=1e-9, atol=1e-12), order
        assert np.allclose(got["lse"], want["lse"], rtol=1e-9, atol=1e-12), order


def test_tiles_of_128_heads_take_the_queries_of_every_second_row():
    case = generate("paged:heads=64,row=8,value=4,scale=0.5,lens=5+6+7,tokens=2")
    rows = case.q.reshape(6, 64, 8)
    moved = np.stack([rows[2 * r] if r < 3 else rows[0] for r in range(6)]).reshape(case.q.shape)
    got, want = find("query.heads-128").run(case), expected(replace(case, q=moved))
    known = np.arange(6).reshape(3, 2) < 3
    assert np.allclose(got["out"][known], want["out"][known], rtol=0, atol=1e-12)
    assert np.isnan(got["out"][~known]).all()
