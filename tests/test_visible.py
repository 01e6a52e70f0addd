# SPDX-License-Identifier: Apache-2.0
"""The keys of all queries at once are those of each request in turn, whatever the strides of what lists them."""

import dataclasses

import numpy as np
import pytest
from canonical_cases import BF16, make, topk

from mla_oracle import canonical

OPTIONS = {
    "selection": {},
    "lengths": {"topk_length": np.array([30, 3, 17], np.int32)},
    "causal": {"causal": True},
    "window": {"window_left": 9, "window_right": 2, "window_first": 3},
    "mask": {"bias": np.where(np.arange(140).reshape(1, 2, 70) % 3, 0, -np.inf).astype(np.float32).repeat(3, 0)},
}


def problem_of(name, selected, extra):
    case = make(dtype=BF16)
    fields = dict(OPTIONS[name])
    if selected:
        fields["topk_indices"] = topk(case, 30)
    else:
        fields.pop("topk_length", None)
    if extra:
        other = make(block=4, lens=(9, 20, 3), dtype=BF16, seed=3)
        fields |= {"extra_kv_cache": other.kv_cache, "extra_topk_indices": topk(other, 8)}
        fields |= {"extra_block_table": other.block_table, "extra_seq_lens": other.seq_lens}
    return dataclasses.replace(case, **fields)


def slots(case):
    problem = canonical.checked(case, "f32")
    caches = [cache for cache in (problem.main, problem.extra) if cache is not None]
    return problem, problem.seen.lists([np.array([[0, cache.block_size, 1]]) for cache in caches])


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("selected", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_all_at_once_and_each_in_turn(name, selected, extra):
    case = problem_of(name, selected, extra)
    problem, found = slots(case)
    row = 0
    for b, seen in enumerate(problem.seen):
        assert (np.diff(seen.starts) == found.counts[row : row + len(seen.starts) - 1]).all()
        for t in range(len(seen.starts) - 1):
            keys = slice(*seen.starts[t : t + 2])
            assert (found.at[0, row, : found.counts[row]] == seen.slot[keys]).all()
            assert (seen.source[keys] == (np.arange(found.counts[row]) >= found.main[row])).all()
            main = seen.source[keys] == 0
            column, offset = np.divmod(seen.position[keys][main], problem.main.block_size)
            assert (case.block_table[b, column] * problem.main.block_size + offset == seen.slot[keys][main]).all()
            row += 1
    assert row == len(found.counts) and 0 < problem.seen.pairs() == found.counts.sum()


@pytest.mark.parametrize("name", OPTIONS)
def test_strides_change_nothing(name):
    case = problem_of(name, True, True)
    fields = ("block_table", "topk_indices", "extra_block_table", "extra_topk_indices")
    strided = {field: np.repeat(getattr(case, field), 2, axis=-1)[..., ::2] for field in fields}
    turned = {field: np.asfortranarray(getattr(case, field)) for field in fields}
    _, expected = slots(case)
    for other in (strided, turned, {"topk_indices": case.topk_indices.astype(np.int64)}):
        _, found = slots(dataclasses.replace(case, **other))
        for n, count in enumerate(expected.counts):
            assert (found.at[0, n, :count] == expected.at[0, n, :count]).all()
        assert (found.counts == expected.counts).all() and (found.main == expected.main).all()
