# SPDX-License-Identifier: Apache-2.0
"""Acceptance rules in use elsewhere, by name: told beside a verdict where they are asked for, never instead of it.

A rule takes actual g and truth w (f64) of one result and says whether it would accept, with the figure it looked at.
To add one, write a function and enter it in RULES with its source.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .arrays import Array
from .errors import InputError


class Outcome(NamedTuple):
    """What a rule says of one result."""

    accepts: bool
    figure: float  # in units of what the rule allows


class Rule(NamedTuple):
    """A rule, for out and for an LSE."""

    source: str
    out: Callable[[Array, Array], Outcome]
    lse: Callable[[Array, Array], Outcome] | None  # None: it does not look at the LSE


def _whole(tol: float) -> Callable[[Array, Array], Outcome]:
    """max |g - w| <= tol * max(max |w|, 1)"""

    def rule(g: Array, w: Array) -> Outcome:
        figure = float(np.abs(g - w).max(initial=0)) / (tol * max(float(np.abs(w).max(initial=0)), 1.0))
        return Outcome(figure <= 1, figure)

    return rule


def _allclose(atol: float, rtol: float, share: float = 1.0) -> Callable[[Array, Array], Outcome]:
    """|g - w| <= atol + rtol |w| for at least `share` of the elements"""

    def rule(g: Array, w: Array) -> Outcome:
        over = np.abs(g - w) / (atol + rtol * np.abs(w))
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


def told(names: str | tuple[str, ...], actual: dict[str, Array], truth: dict[str, Array]) -> dict[str, Any]:
    """What the rules `names` ("all", or names joined by +) say of actual and truth (f64) of out and lse."""
    asked = tuple(names.split("+")) if isinstance(names, str) else names
    found = {}
    for name in RULES if asked == ("all",) else asked:
        if name not in RULES:
            raise InputError(f"rule is {name!r}, expected all or {', '.join(RULES)}")
        rule = RULES[name]
        outcomes = {}
        for result, judge in (("out", rule.out), ("lse", rule.lse)):
            if judge is not None and result in actual:
                g, w = actual[result], truth[result]
                finite = np.isfinite(g) & np.isfinite(w)
                alike = (g == w) | (np.isnan(g) & np.isnan(w))
                outcomes[result] = judge(g[finite], w[finite])
                if not (finite | alike).all():
                    outcomes[result] = Outcome(False, float("inf"))
        found[name] = {
            "rule": rule.source,
            "accepts": all(outcome.accepts for outcome in outcomes.values()),
            "figures": {result: outcome.figure for result, outcome in outcomes.items()},
        }
    return found
