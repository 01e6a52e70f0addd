# SPDX-License-Identifier: Apache-2.0
"""Every mutant is seen by a small case, and not seen by rows that cannot tell it from the truth."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from cases import attention, filled

from mla_oracle.cases.inputs import generate
from mla_oracle.mutants import Problem, applicable, bank, equivalences, find
from mla_oracle.mutants.effect import effect
from mla_oracle.mutants.lists import NEW
from mla_oracle.oracle import expected

GEOMETRY = "paged:geometry=deepseek-v3,heads=2,seed=9"
IDS = (
    f"{GEOMETRY},lens=40+300,tokens=2",
    "paged:geometry=glm-5.2,heads=2,lens=400,seed=9,tokens=2",
    "paged:heads=1,row=8,value=4,scale=0.7,lens=5000,block=512",
    "paged:heads=1,row=4,value=2,scale=0.7,lens=40000,block=512",
    "paged:heads=2,row=128,value=128,scale=0.1,lens=30+12,tokens=2",
    "absorbed:heads=4,nope=24,rope=8,value=16,rank=32,queries=3,cached=40",
    "naive:heads=2,nope=24,rope=8,value=16,rank=32,queries=2,cached=90",
    "merge:states=5,rows=6,heads=4,value=16",
    "merge:states=5,rows=6,heads=4,value=16,lse_base=2",
    "rope:heads=2,rope=16,pairing=interleaved,base=50000",
    "rope:geometry=deepseek-v3,positions=0+1+300+5000",
    "append:rank=12,rope=4,tokens=8",
)


@cache
def cases():
    """Hand-made cases, with their truths and what applies to each."""
    made = [case for _, case in attention()] + [generate(text) for text in IDS]
    made.append(filled(replace(generate(f"{GEOMETRY},lens=8+12,block=4"), head_dim_v=576)))
    return [(case, expected(case), Problem(case) if case.kind in ("paged", "absorbed", "naive") else None)
            for case in made]


def shown(mutant):
    """The largest effect of the mutant on a case, in out and in lse, and whether a number is where none should be."""
    for case, truth, problem in cases():
        if problem is None:
            if case.kind in mutant.kinds:
                yield case, effect(mutant.run(case), truth)
        elif mutant.lacks(problem) is None:
            yield case, effect(mutant.solve(problem), truth)


# Those of cases that are not plain show it in test_mutants_of_lists.py.
@pytest.mark.parametrize("mutant", [m for m in bank() if m.name.partition(".")[0] not in NEW], ids=lambda m: m.name)
def test_a_small_case_shows_it_beyond_a_thousandth(mutant):
    assert any(seen.out > 1e-3 or seen.lse > 1e-3 or seen.nonfinite for _, seen in shown(mutant))


@pytest.mark.parametrize("control", equivalences(), ids=lambda m: m.name)
def test_an_equivalence_changes_nothing_anywhere(control):
    effects = [seen for _, seen in shown(control)]
    assert len(effects) >= 5 and not any(seen.differs for seen in effects)


@pytest.mark.parametrize("kind", ["paged", "absorbed", "naive", "merge", "rope", "append"])
def test_every_kind_of_case_has_mutants(kind):
    assert sum(kind in mutant.kinds for mutant in bank()) >= 10


def results(name, case_id):
    case = generate(case_id) if isinstance(case_id, str) else case_id
    assert find(name).applies(case) is None
    return find(name).run(case), expected(case), case


SMALL = "paged:heads=3,row=20,value=12,scale=0.3,block=4"
LONG = "paged:heads=2,row=8,value=4,scale=0.7"


def untouched(name, case_id, rows, tensors=("out", "lse"), exact=False):
    """The rows [b] or [b, t] of these tensors are the truth, others are not."""
    wrong, truth, _ = results(name, case_id)
    limit = 0 if exact else 1e-12
    for tensor in tensors:
        error = np.abs(wrong[tensor][rows] - truth[tensor][rows])
        assert (error <= limit).all(), tensor
    seen = effect(wrong, truth)
    assert seen.out > 1e-3 or seen.lse > 1e-3 or seen.nonfinite


@pytest.mark.parametrize("name", [m.name for m in bank() if m.family in ("uniform temperature", "scale of one part")
                                  and m.applies(generate(f"{SMALL},lens=1+9")) is None and "bf16" not in m.name
                                  and "integer" not in m.name])
def test_a_row_of_one_key_hides_its_temperature(name):
    untouched(name, f"{SMALL},lens=1+9", 0, ("out",), exact=True)


@pytest.mark.parametrize("name", ["rope.pairing", "rope.doubled", "rope.table-layout", "rope.missing", "rope.reversed"])
def test_position_0_hides_a_wrong_angle(name):
    untouched(name, f"{SMALL},lens=1+9", 0)


VALUES = ["value.row-end", "value.reversed", "value.factor-2", "value.basis", "value.page-behind",
          "value.halves-swapped", "query.weights-next-head", "online.unnormalised"]


@pytest.mark.parametrize("name", VALUES)
def test_a_wrong_value_leaves_the_lse(name):
    case = f"{SMALL.replace('value=12', 'value=8')},lens=5+9"
    wrong, truth, _ = results(name, case)
    assert np.array_equal(wrong["lse"], truth["lse"]) or np.abs(wrong["lse"] - truth["lse"]).max() < 1e-12
    assert effect(wrong, truth).out > 1e-2


@pytest.mark.parametrize("mutant", [m for m in bank() if m.name.startswith("lse.")], ids=lambda m: m.name)
def test_a_wrong_lse_leaves_the_output(mutant):
    for case, truth, problem in cases():
        if problem is not None and mutant.lacks(problem) is None:
            assert effect({"out": mutant.solve(problem)["out"]}, {"out": truth["out"]}).rows == 0, case.name


@pytest.mark.parametrize(
    ("name", "lens"),
    [("value.lag", "8+30"), ("value.lag-rows-lost", "4+30"), ("window.16", "16+30"), ("length.at-most-64", "64+90"),
     ("key.tile-edge-lost-64", "63+90"), ("key.tile-behind-64", "64+90"), ("rope.position-bf16", "257+600")],
)
def test_requests_up_to_its_length_are_exact(name, lens):
    untouched(name, f"{LONG},lens={lens}", 0)


@pytest.mark.parametrize("name", ["causal.none", "causal.one-more", "causal.page-granular"])
def test_the_last_query_token_is_exact_without_a_causal_bound(name):
    untouched(name, f"{SMALL},lens=6+9,tokens=3", (slice(None), 2))


@pytest.mark.parametrize("name", ["query.first-token", "query.broadcast"])
def test_query_token_0_is_exact_when_all_take_its_query(name):
    untouched(name, f"{SMALL},lens=6+9,tokens=3", (slice(None), 0))


@pytest.mark.parametrize("name", ["rope.zero-rows", "query.heads-128", "query.request-0", "paging.table-of-request-0",
                                  "paging.start-offset", "state.carried", "length.of-request-0", "rope.key-flat"])
def test_request_0_is_exact(name):
    untouched(name, f"{SMALL},lens=7+9+3", 0)


def test_a_request_start_offset_is_exact_where_all_lengths_fill_their_pages():
    case = generate(f"{SMALL},lens=8+12+4")
    wrong, truth = find("paging.start-offset").solve(Problem(case)), expected(case)
    assert find("paging.start-offset").applies(case) is not None and not effect(wrong, truth).differs


@pytest.mark.parametrize("tile", [32, 64, 128])
def test_pad_lanes_shrink_the_row_by_z_over_z_plus_their_number(tile):
    wrong, truth, case = results(f"pad.lanes-{tile}", f"{SMALL},lens=7+50+128")
    z = np.exp(truth["lse"])  # [B, H]
    lanes = (-case.seq_lens % tile)[:, None]
    assert np.allclose(wrong["out"], truth["out"] * (z / (z + lanes))[..., None], rtol=1e-12)
    assert np.abs(wrong["out"][2] - truth["out"][2]).max() < 1e-14


def test_a_state_that_starts_at_one_adds_one_to_z():
    wrong, truth, _ = results("state.zero", f"{SMALL},lens=7+50")
    assert np.allclose(np.exp(wrong["lse"]), np.exp(truth["lse"]) + 1, rtol=1e-12)


SHOWN_BY_ONE_TILE = ("online.unnormalised", "online.divided-twice", "online.lse-stale")


@pytest.mark.parametrize("name", [m.name for m in bank() if m.name.startswith("online.")
                                  and m.name not in SHOWN_BY_ONE_TILE])
def test_one_tile_hides_a_wrong_recurrence(name):
    untouched(name, f"{SMALL},inputs=peaked,lens=4+60", 0)


@pytest.mark.parametrize("name", ["stride.pages", "wrap.uint32-elements", "wrap.uint32-bytes", "wrap.id-uint16"])
def test_low_pages_hide_strides_and_wraps(name):
    for case, _, problem in cases():
        if problem is not None and find(name).lacks(problem) is None:
            low = replace(case, page_ids=np.arange(len(case.kv_cache)), block_stride=case.kv_cache[0].nbytes,
                          block_table=np.searchsorted(np.sort(case.page_ids), case.block_table).astype(np.int32))
            sound = expected(low)
            assert not effect(find(name).solve(Problem(low)), sound).differs
            return
    raise AssertionError("no case has what it needs")


def test_nan_in_the_slack_is_what_turns_a_tail_nan():
    poisoned = generate(f"{SMALL},lens=13")
    sound = filled(poisoned)
    name = "tail.nan-value"
    assert np.isnan(find(name).run(poisoned)["out"]).all()
    assert not effect(find(name).run(sound), expected(sound)).differs


ODD = [
    "paged:heads=1,row=1,value=1,lens=5+0+2,block=1,scale=1",
    "paged:heads=1,row=4,value=1,lens=5+3,block=1,scale=1,tokens=4,causal=false",
    "paged:heads=17,row=130,value=109,lens=5+65,block=16,scale=1,tokens=5,pages=huge",
    "paged:heads=8,row=20,value=18,lens=65+1+0,block=2,scale=30,lse_base=2,inputs=rising,tokens=5,shards=3",
    "paged:heads=2,row=130,value=130,lens=64+3,block=3,scale=0.1,dtype=f16,shards=5,shard_layout=interleaved",
    "paged:heads=2,row=5,value=2,lens=0,block=4,scale=1,empty_lse=inf",
    "paged:heads=2,row=5,value=2,lens=,block=4,scale=1",
    "absorbed:heads=1,nope=1,rope=0,value=1,rank=1,queries=1,cached=1",
    "naive:heads=3,nope=5,rope=6,value=3,rank=9,queries=4,cached=5",
]


@pytest.mark.parametrize("case_id", ODD)
def test_odd_sizes_have_results_of_the_right_shapes(case_id):
    case = generate(case_id)
    truth, problem = expected(case), Problem(case)
    for mutant in (*bank(), *equivalences()):
        if mutant.lacks(problem) is None:
            got = mutant.solve(problem)
            assert {n: x.shape for n, x in got.items()} == {n: x.shape for n, x in truth.items()}, mutant.name
            assert not (mutant.control and effect(got, truth).differs), mutant.name


def test_applicable_is_what_lacks_nothing():
    case = generate(f"{SMALL},lens=7+9")
    assert set(applicable(case)) == {m for m in bank() if m.applies(case) is None}
    assert not any(m.name.startswith(("append.", "absorb.", "shard.", "causal.none")) for m in applicable(case))
