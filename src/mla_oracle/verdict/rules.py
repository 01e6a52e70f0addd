# SPDX-License-Identifier: Apache-2.0
"""Acceptance rules in use elsewhere, by name: told beside a verdict where they are asked for, never instead of it.

A rule takes actual g and truth w (f64) of one result and says whether it would accept, with the figure it looked at.
To add one, write a function and enter it in RULES with its source.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Array
from ..errors import InputError


class Outcome(NamedTuple):
    """What a rule says of one result."""

    accepts: bool
    figure: float  # in units of what the rule allows


class Rule(NamedTuple):
    """A rule, for out and for an LSE."""

    source: str
    out: Callable[[Array, Array], Outcome]
    lse: Callable[[Array, Array], Outcome] | None  # None: it does not look at the LSE


def _over(error: Any, allowed: Any) -> Array:
    """error / allowed; no error is within nothing allowed."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(error == 0, 0.0, error / allowed)


def _whole(tol: float) -> Callable[[Array, Array], Outcome]:
    """max |g - w| <= tol * max(max |w|, 1)"""

    def rule(g: Array, w: Array) -> Outcome:
        figure = _over(np.abs(g - w).max(initial=0), tol * max(float(np.abs(w).max(initial=0)), 1.0))
        return Outcome(bool(figure <= 1), float(figure))

    return rule


def _allclose(atol: float, rtol: float, share: float = 1.0) -> Callable[[Array, Array], Outcome]:
    """|g - w| <= atol + rtol |w| for at least `share` of the elements"""

    def rule(g: Array, w: Array) -> Outcome:
        over = _over(np.abs(g - w), atol + rtol * np.abs(w))
        figure = float(np.quantile(over, share, method="inverted_cdf")) if over.size else 0.0
        return Outcome(figure <= 1, figure)

    return rule


def _either(atol: float, rtol: float, cosine: float | None) -> Callable[[Array, Array], Outcome]:
    """|g - w| < atol or < rtol |w| for every element, and 1 - 2 g.w / (g.g + w.w) < cosine"""

    def rule(g: Array, w: Array) -> Outcome:
        figure = float((np.abs(g - w) / np.maximum(atol, rtol * np.abs(w))).max(initial=0))
        if cosine is not None and g.size:
            size = float((g * g + w * w).sum())
            turned = 1 - 2 * float((g * w).sum()) / size if size >= 1e-12 else 0.0
            figure = max(figure, turned / cosine)
        return Outcome(figure <= 1, figure)

    return rule


def _nmse(allowed: float) -> Callable[[Array, Array], Outcome]:
    """sum (g - w)^2 / sum w^2 <= allowed"""

    def rule(g: Array, w: Array) -> Outcome:
        error, size = float(np.square(g - w).sum()), float(np.square(w).sum())
        figure = 0.0 if error == 0 else error / (size * allowed) if size else np.inf
        return Outcome(figure <= 1, figure)

    return rule


RULES = {
    "seed": Rule("max |g - w| <= 2e-4 max(max |w|, 1)", _whole(2e-4), _whole(2e-4)),
    "allclose-1e-2": Rule("torch.allclose(atol=1e-2, rtol=1e-2): KernelBench", _allclose(1e-2, 1e-2), None),
    "allclose-1e-3": Rule("atol=1e-3, rtol=1e-3: FlashInfer tests/attention/test_deepseek_mla.py",
                          _allclose(1e-3, 1e-3), _allclose(1e-3, 1e-3)),
    "flashmla": Rule("abs 8e-4 or rel 2.01/128, cosine difference 5e-6; LSE abs 1e-6 or rel 8.01/65536: "
                     "FlashMLA tests/test_flash_mla_dense_decoding.py",
                     _either(8e-4, 2.01 / 128, 5e-6), _either(1e-6, 8.01 / 65536, None)),
    "nmse": Rule("NMSE <= 5e-4: llama.cpp tests/test-backend-ops.cpp, flash attention", _nmse(5e-4), None),
    "95-percent": Rule("95 % of the elements within atol=rtol=5e-2: FlashInfer xqa", _allclose(5e-2, 5e-2, 0.95), None),
    "gpu-mode": Rule("rtol 2e-2, atol 8e-3: gpu-mode reference-kernels", _allclose(8e-3, 2e-2), None),
    "vllm-backends": Rule("rtol 1e-2, atol 5e-1: vLLM test_mla_backends", _allclose(5e-1, 1e-2), None),
}


def own(tol: float | None = None, atol: float | None = None, rtol: float | None = None) -> dict[str, Rule]:
    """The rules "tol" and "allclose" that these numbers make. Raises InputError for one that is no tolerance."""
    for name, value in (("tol", tol), ("atol", atol), ("rtol", rtol)):
        if value is not None and not 0 <= value < math.inf:
            raise InputError(f"{name} is {value}, expected 0 or more")
    found = {}
    if tol is not None:
        found["tol"] = Rule(f"max |g - w| <= {tol:g} max(max |w|, 1)", _whole(tol), _whole(tol))
    if atol is not None or rtol is not None:
        each = _allclose(atol or 0.0, rtol or 0.0)
        found["allclose"] = Rule(f"|g - w| <= {atol or 0:g} + {rtol or 0:g} |w|", each, each)
    return found


def told(
    names: str | tuple[str, ...] | None,
    actual: Mapping[str, Array | None],
    truth: Mapping[str, Array],
    **tolerances: float | None,
) -> dict[str, Any]:
    """What the rules `names` ("all", or names joined by +) and those of `tolerances` (see `own`) say of a result.

    `actual`: arrays in f64; None: it was not of the shape of the truth, which no rule accepts. Raises InputError.
    """
    chosen = names.split("+") if isinstance(names, str) else names or ()
    chosen = tuple(RULES) if tuple(chosen) == ("all",) else tuple(chosen)
    for name in chosen:
        if name not in RULES:
            raise InputError(f"rule is {name!r}, expected all or {', '.join(RULES)}")
    found = {}
    for name, rule in {**own(**tolerances), **{name: RULES[name] for name in chosen}}.items():
        outcomes = {}
        for result, g in actual.items():
            judge = rule.lse if result.endswith("lse") else rule.out
            if judge is not None:
                outcomes[result] = _outcome(judge, g, truth[result])
        found[name] = {
            "rule": rule.source,
            "accepts": all(outcome.accepts for outcome in outcomes.values()),
            "figures": {result: outcome.figure for result, outcome in outcomes.items()},
        }
    return found


def _outcome(judge: Callable[[Array, Array], Outcome], g: Array | None, w: Array) -> Outcome:
    """What is not finite must be the same; the rest is the rule's."""
    if g is None:
        return Outcome(False, math.inf)
    finite = np.isfinite(g) & np.isfinite(w)
    alike = (g == w) | (np.isnan(g) & np.isnan(w))
    return judge(g[finite], w[finite]) if (finite | alike).all() else Outcome(False, math.inf)


def in_words(told: Mapping[str, Any]) -> list[str]:
    """A line for each rule."""
    return [f"rule {n} would {'accept' if said['accepts'] else 'reject'}: {said['rule']}" for n, said in told.items()]
