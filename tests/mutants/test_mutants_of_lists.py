# SPDX-License-Identifier: Apache-2.0
"""Mutants of cases that are not plain give what a kernel in plain loops with their bug gives, and show it."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
import wrong_lists
from list_loops import Lists, wrong

from mla_oracle import expected, formats, generate
from mla_oracle.cases import PagedCase
from mla_oracle.formats.misread import KINDS, misread
from mla_oracle.mutants import bank, find
from mla_oracle.mutants.effect import effect
from mla_oracle.mutants.lists import NEW
from mla_oracle.mutants.problem import problem_of
from mla_oracle.suites.extended import SETS, extended
from mla_oracle.verdict.locate import in_row_axes

SIZES = "heads=4,row=12,value=8,scale=0.5,dtype=f32"
FORMATS = {name: ids[0] for name, ids in SETS.items() if name in formats.NAMES}
PLAIN = tuple(name for name in SETS if name not in (*formats.NAMES, "sparse-fp8", "v4"))
LISTED = [m for m in bank() if m.name.partition(".")[0] in NEW]
LOOPED = [m for m in LISTED if not m.name.startswith("format.")]
MISREAD = [m for m in LISTED if m.name.startswith("format.")]


@pytest.fixture(scope="module")
def problems():
    short = (case_id.replace("130+0+1+63+90", "70+0+1+9+14").replace("200+70,topk=140", "90+7,topk=80")
             for case_id in extended(SIZES, PLAIN, block=4))  # fmt: skip
    return [prepared(generate(case_id)) for case_id in short]


def prepared(case):
    case, truth = in_row_axes(case, expected(case, precision="f64"))
    return case, problem_of(case), truth


def rows(case, results):
    n, H = int(np.prod(case.q.shape[:-2])), case.q.shape[-2]
    return {name: array.reshape(n, H, *array.shape[case.q.ndim - 1 :]) for name, array in results.items()}


def same(case, got, want):
    for name, array in rows(case, got).items():
        with np.errstate(invalid="ignore"):
            good = np.abs(array - want[name]) <= 1e-9 * np.maximum(np.abs(want[name]), 1)
        good |= (array == want[name]) | (np.isnan(array) & np.isnan(want[name]))
        assert good.all(), (case.name, name, np.argwhere(~good)[0], array[~good][0], want[name][~good][0])


def test_every_new_mutant_of_paged_cases_has_a_kernel_in_loops():
    assert {m.name for m in LOOPED} == set(wrong_lists.WRONG)
    assert len(LISTED) > 150


def test_right_plans_and_the_loops_give_the_truth(problems):
    for case, problem, truth in problems:
        got = problem.shape(problem.evaluate(problem.plan(b) for b in range(problem.B)))
        same(case, got, rows(case, truth))
        same(case, got, Lists(case).run())


@pytest.mark.parametrize("mutant", LOOPED, ids=lambda m: m.name)
def test_a_mutant_is_the_kernel_with_its_bug(problems, mutant):
    shown = 0
    for case, problem, truth in problems:
        if mutant.lacks(problem) is not None:
            continue
        got = mutant.solve(problem)
        if effect(got, truth).differs:
            shown += 1
            same(case, got, wrong(case, **wrong_lists.WRONG[mutant.name]).run())
        if shown == 2:
            break
    assert shown, "no case shows it"


def stored(name, small=1.0, writer=None):
    """A case in the format `name`; `small` makes its rows so."""
    if small == 1.0:
        return generate(extended("heads=2,row=576,value=512,scale=0.06,dtype=f32", (name,), block=4)[0])
    rng = np.random.default_rng(1)
    D = formats.get(name).width
    kept = (small * rng.standard_normal((4, 4, D))).astype(np.float32)
    return PagedCase(
        q=rng.standard_normal((2, 2, D)).astype(ml_dtypes.bfloat16), softmax_scale=0.06 / small, head_dim_v=512,
        block_table=np.array([[1, 2], [3, 0]], np.int32), seq_lens=np.array([5, 7], np.int32), cache_format=name,
        **formats.quantize(name, kept, writer=writer),
    )  # fmt: skip


@pytest.mark.parametrize("mutant", MISREAD, ids=lambda m: m.name)
def test_a_misread_format_is_read_so_in_every_row(mutant):
    how = mutant.name.partition(".")[2].replace("value-scale", "scale").replace("key-scale", "scale")
    name = KINDS[how][1][0]
    case = stored(name, 1e-3, "vllm") if how == "scale-clamped" else stored(name)
    if mutant.applies(case) is not None and how in ("scales-unpermuted", "outer-scale-missing"):
        raise AssertionError(mutant.applies(case))
    _, problem, truth = prepared(case)
    assert mutant.lacks(problem) is None
    tensors = {n: x for n in ("kv_cache", "kpe_cache", "kv_scale", "kpe_scale", "ckv_scale")
               if (x := getattr(case, n)) is not None}  # fmt: skip
    blocks, size, _ = formats.check(name, tensors)
    b, o = (x.ravel() for x in np.indices((blocks, size)))
    kernel = Lists(case)
    right = kernel.caches[0][2]
    other = misread(how, name, tensors, b, o, block_size=size).astype(np.float64)[:, None]
    kernel.caches[0] = (blocks, size, other if not mutant.name.startswith("format.value") else right)
    values = right if mutant.name.startswith("format.key") else other
    kernel.value_row = lambda n, key, g: values[key[2], g]
    got = mutant.solve(problem)
    assert effect(got, truth).differs
    same(case, got, kernel.run())


def test_mutants_of_pages_and_requests_are_of_plain_cases(problems):
    case, problem, _ = problems[0]
    for name in ("paging.identity", "causal.none", "query.request-0", "length.minus-one", "window.16"):
        assert find(name).lacks(problem) == "is of plain cases"
    plain = problem_of(dataclasses.replace(case, topk_indices=None, topk_length=None))
    assert not plain.listed and find("topk.dense").lacks(plain) is not None


def test_a_composition_of_a_list_and_a_temperature_is_both(problems):
    case, problem, truth = next(p for p in problems if find("topk.length-ignored").lacks(p[1]) is None)
    both = find("topk.length-ignored + temperature.half").solve(problem)
    steps = wrong_lists.WRONG["topk.length-ignored"] | {"scale": lambda k: 0.5 * Lists.scale(k)}
    same(case, both, wrong(case, **steps).run())
    assert effect(both, truth).differs


@pytest.mark.parametrize("name", ["key.first-lost", "merge.equal", "online.acc-not-rescaled", "value.next-row"])
def test_a_mutant_of_keys_is_one_of_places_in_a_list(problems, name):
    case, problem, _ = next(p for p in problems if p[0].topk_indices is not None and p[0].causal)
    assert find(name).lacks(problem) is None
    if name == "key.first-lost":
        steps = {"main": lambda k, n: Lists.main(k, n)[1:]}
        same(case, find(name).solve(problem), wrong(case, **steps).run())
