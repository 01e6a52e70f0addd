# SPDX-License-Identifier: Apache-2.0
"""Other projects' rules, on numbers where the answer is plain."""

import numpy as np
import pytest

from mla_oracle.errors import InputError
from mla_oracle.verdict.rules import RULES, told

W = np.linspace(-2, 2, 1000)


def accepts(name, g, w=W, **lse):
    return told(name, {"out": g, **{k: v[0] for k, v in lse.items()}}, {"out": w, **{k: v[1] for k, v in lse.items()}})[
        name
    ]["accepts"]


@pytest.mark.parametrize("name", RULES)
def test_the_truth_is_accepted_and_zeros_of_some_size_are_not(name: str) -> None:
    assert accepts(name, W)
    assert not accepts(name, 0 * W)


@pytest.mark.parametrize(
    ("name", "just", "over"),
    [
        ("seed", W + 3.9e-4, W + 4.1e-4),
        ("allclose-1e-2", W + 0.0099, W + 0.0101),
        ("allclose-1e-3", W + 0.00099, W + 0.00101),
        ("nmse", W * (1 + 0.0223), W * (1 + 0.0225)),
        ("gpu-mode", W + 0.0079, W + 0.0081),
        ("vllm-backends", W + 0.499, W + 0.501),
        ("95-percent", np.where(W < -1.804, 9, W), np.where(W < -1.79, 9, W)),
        ("flashmla", W * (1 + 0.0031), W * (1 + 0.0033)),
    ],
)
def test_where_a_rule_draws_its_line(name: str, just, over) -> None:
    assert accepts(name, just) and not accepts(name, over)


def test_small_outputs_pass_whatever_they_are() -> None:
    small = 1e-3 * W
    for name in ("allclose-1e-2", "vllm-backends", "gpu-mode"):
        assert accepts(name, 0 * small, small)
    assert not accepts("nmse", 0 * small, small)


def test_the_lse_counts_where_a_rule_looks_at_it() -> None:
    lse = np.array([8.0, -np.inf])
    off = np.array([8.01, -np.inf])
    assert accepts("nmse", W, lse=(off, lse))
    assert not accepts("flashmla", W, lse=(off, lse))
    assert not accepts("flashmla", W, lse=(np.array([8.0, np.inf]), lse))
    assert accepts("flashmla", W, lse=(lse, lse))


def test_nan_is_never_accepted() -> None:
    g = W.copy()
    g[5] = np.nan
    assert not any(rule["accepts"] for rule in told("all", {"out": g}, {"out": W}).values())


def test_names_are_checked_and_joined() -> None:
    assert list(told("nmse+seed", {"out": W}, {"out": W})) == ["nmse", "seed"]
    assert list(told("all", {"out": W}, {"out": W})) == list(RULES)
    with pytest.raises(InputError, match="rule is 'cosine', expected all or seed"):
        told("cosine", {"out": W}, {"out": W})
