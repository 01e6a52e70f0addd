# SPDX-License-Identifier: Apache-2.0
"""The verdict on a layer's stages as an engine dumped them: the first that leaves its budget, and at which query.

Every stage is computed in f64 from the stages before it as the engine dumped them, so that an error is told where it is
made and nowhere after. Of what was not dumped ours takes the place, and the budget allows for its roundings. A stage of
f32 whose every number is one of a narrower format is taken to be stored in that.

Rotated rows may have their pairs parted: an engine may rotate adjacent pairs by parting them first, and q and k
then agree as they are. Which it is, the first rotated stage says, unless the case does; the others must be alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from .. import dtypes
from ..arrays import Array, as_array, dtype_name
from ..checks import WIDE_FLOATS, choice, widen
from ..errors import InputError
from ..geometry import show
from ..noise import UNIT
from . import indexer
from .limits import Limit, attention_limit, limit
from .spread import Spread
from .stages import INPUTS, STAGES, State, stages_of

ATTENTION = ("lse", "o_lat", "attn")
# What nothing else is computed from: only if dumped.
LEAVES = ("k_nope", "v", "q_lat", "scores", "lse", "p", "o_lat")
# What engines keep in f32 whatever they store else, and what holds no numbers: these do not tell what others are held in.
WIDE = ("scores", "lse", "p", "index_weights", "index_scores", "topk")
OF_ROPE = {"q_pe": "rope", "k_pe": "rope", "kv_cache": "rope", "index_q": "index_rope", "index_k": "index_rope"}
LN2 = float(np.log(2))


@dataclass(frozen=True)
class Finding:
    """What was measured of one stage. `worst` is the element that decides; `row` the first query over the budget."""

    stage: str
    passed: bool
    dtype: str  # that holds it
    units: float | None  # the largest error over its budget
    rows_over: int
    rows: int
    reason: str = ""
    row: int | None = None
    position: int | None = None
    worst: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerVerdict:
    """Pass or fail, the first stage that fails and its first query, and what was found of every stage of the dump."""

    passed: bool
    reason: str
    first: str | None
    row: int | None
    position: int | None
    stages: list[Finding]
    missing: list[str]
    conventions: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        fields = asdict(self)
        for finding in fields["stages"]:
            finding["verdict"] = "pass" if finding.pop("passed") else "fail"
        return {"verdict": "pass" if fields.pop("passed") else "fail", **fields}


def check_stages(
    state: State,
    dump: Mapping[str, object],
    *,
    held: str | None = None,
    rope_layout: str | None = None,
    lse_base: str = "e",
    numerics: Any = None,
    stored: Mapping[str, str] | None = None,
) -> LayerVerdict:
    """The verdict on `dump`, stages by their names, of the layer that `state` (stages.prepare, f64) was prepared for.

    `held`: the dtype of stages that are not dumped; None: the coarsest of those that are, or of the hidden states. `rope_layout`: how rotated
    rows of adjacent pairs are stored, interleaved or neox (pairs parted); None: either. `numerics`: what the attention
    rounds, see numerics.resolve. `stored`: the dtypes of the weights in their file. Raises InputError.
    """
    stages = stages_of(state.config)
    given = {name: _taken(name, value, stages, state) for name, value in dump.items()}
    if not given:
        raise InputError(f"the dump holds no stage, expected one or more of {', '.join(stages)}")
    choice("lse_base", lse_base, ("e", "2"))
    if held is None:
        own = [array for name, array in given.items() if name not in WIDE] or [_narrowest(state["hidden_states"])]
        held = max((dtypes.name_of(array.dtype) for array in own), key=UNIT.__getitem__)
        held = "f32" if not any(name not in WIDE for name in given) and held == "f64" else held
    choice("held", held, WIDE_FLOATS)
    if rope_layout is not None:
        choice("rope_layout", rope_layout, ("interleaved", "neox"))
    settled = {"rope": rope_layout is not None, "index_rope": False}
    state.parted["rope"] = rope_layout == "neox"
    spread = Spread(state, held, dict(stored or {}), {})
    judge = _Judge(state, spread, given, numerics, lse_base)
    findings = []
    for name, stage in stages.items():
        if name in LEAVES and name not in given:
            continue
        kind = OF_ROPE.get(name)
        finding = judge.judge(name)
        if kind is not None and name in given:
            if not settled[kind] and not finding.passed and _parts(state, name):
                judge.part(kind, True, name)
                other = judge.judge(name)
                if other.passed:
                    finding = other
                else:
                    judge.part(kind, False, name)
                    judge.judge(name)
            settled[kind] = True
        judge.settle(name)
        if name in given:
            findings.append(finding)
    failed = [finding for finding in findings if not finding.passed]
    first = failed[0] if failed else None
    return LayerVerdict(
        passed=first is None,
        reason=_reason(findings, first),
        first=None if first is None else first.stage,
        row=None if first is None else first.row,
        position=None if first is None else first.position,
        stages=findings,
        missing=[name for name in stages if name not in given],
        conventions={
            "held": held,
            "angles": state.angles,
            "norm_eps": state.config.norm_eps,
            "rope_layout": _layout(state),
            "numerics": judge.declared,
        },
    )


def _parts(state: State, name: str) -> bool:
    """Whether rows of this stage may have their pairs parted."""
    if name.startswith("index"):
        return state.indexer.pairing == "interleaved"
    return state.geometry.rope_interleave and state.geometry.qk_rope_head_dim > 2


def _layout(state: State) -> str:
    return "interleaved" if state.geometry.rope_interleave and not state.parted["rope"] else "neox"


def _reason(findings: list[Finding], first: Finding | None) -> str:
    if first is None:
        largest = max(findings, key=lambda finding: finding.units or 0.0)
        return f"{len(findings)} stages are within their budgets (at most {largest.units or 0.0:.3g} of it, {largest.stage})"
    others = [finding.stage for finding in findings if not finding.passed and finding is not first]
    after = f"; after it {', '.join(others)}" if others else ""
    return f"{first.stage} is the first stage that leaves its budget: {first.reason}{after}"


def _taken(name: str, value: object, stages: Mapping[str, Any], state: State) -> Array:
    """A stage of the dump with the axes of STAGES, in the dtype that holds it; heads may be joined, a 1 lead."""
    if name not in STAGES:
        raise InputError(f"the dump holds {name}, expected stages: {', '.join(stages)}")
    if name not in stages:
        raise InputError(f"the dump holds {name}, expected {', '.join(stages)}: the layer has no such stage")
    array = as_array(name, value)
    kind = dtype_name(name, array)
    expected = shape_of(state, name)
    if name == "topk":
        if kind not in ("i64", "i32"):
            raise InputError(f"{name} is {kind}, expected i64 or i32")
        if array.ndim == 3 and len(array) == 1:
            array = array[0]
        if array.ndim != 2 or len(array) != expected[0]:
            raise InputError(f"{name} is {list(array.shape)}, expected [{expected[0]}, k]")
        return array.astype(np.int64)
    if kind not in WIDE_FLOATS:
        raise InputError(f"{name} is {kind}, expected {' or '.join(WIDE_FLOATS)}")
    rows = array.shape[1:] if array.ndim > 1 and array.shape[0] == 1 and array.shape[1:2] == expected[:1] else array.shape
    joined = (expected[0], int(np.prod(expected[1:])))
    if tuple(rows) not in (expected, joined):
        letters = ", ".join(STAGES[name].axes.split())
        raise InputError(f"{name} is {list(array.shape)}, expected {list(expected)}: [{letters}]")
    return _narrowest(np.ascontiguousarray(array).reshape(expected))


def shape_of(state: State, name: str) -> tuple[int, ...]:
    """The shape of a stage, before anything is computed."""
    g, c = state.geometry, state.config
    tokens = len(state["past_c_kv"]) + len(state["hidden_states"])
    n = c.indexer.num_heads if c.indexer is not None else 0
    size = (c.indexer.kpool or 1) if c.indexer is not None else 1
    sizes = {
        "T": len(state["hidden_states"]), "N": tokens, "H": g.num_heads, "P": g.qk_nope_head_dim, "V": g.v_head_dim,
        "R": g.qk_rope_head_dim, "L": g.kv_lora_rank, "L+R": g.latent_dim, "P+R": g.qk_head_dim, "C": g.hidden_size,
        "Q": g.q_lora_rank, "n": n, "d": c.indexer.head_dim if c.indexer is not None else 0, "keys": tokens // size, "k": 0,
    }  # fmt: skip
    return tuple(int(sizes[letter] or 0) for letter in STAGES[name].axes.split())


def _narrowest(array: Array) -> Array:
    """`array` in the narrowest of its own format, bf16 and f16 that holds every number of it."""
    if dtypes.name_of(array.dtype) in ("bf16", "f16") or not array.size:
        return array
    for name in ("bf16", "f16"):
        narrow = dtypes.round_to(array, name)
        if np.array_equal(narrow.astype(array.dtype), array, equal_nan=True):
            return narrow
    return array


class _Judge:
    def __init__(self, state: State, spread: Spread, given: Mapping[str, Array], numerics: Any, lse_base: str) -> None:
        self.state, self.spread, self.given, self.numerics = state, spread, given, numerics
        self.unit = 1.0 if lse_base == "e" else 1 / LN2
        self.declared: str | None = None

    def judge(self, name: str) -> Finding:
        """What is found of a stage, which is computed; ours stays in its place until `settle`."""
        state = self.state
        state.values.pop(name, None)
        truth = self._computed(name)
        state.values[name] = truth
        if name not in self.given:
            return Finding(name, True, self.spread.held, None, 0, 0)
        if name == "topk":
            return self._chosen(truth)
        actual = widen(self.given[name], np.float64)
        dtype = dtypes.name_of(self.given[name].dtype)
        if name == "lse":
            truth, actual = truth[..., None], actual[..., None] / self.unit
        hidden = np.isneginf(truth) if name in ("scores", "index_scores") else np.zeros(1, bool)
        if hidden.any():
            bad = hidden & ~(actual < -1e4)
            truth, actual = np.where(hidden, 0.0, truth), np.where(hidden, np.where(bad, np.inf, 0.0), actual)
        limits = self._limit(name, truth, dtype)
        if hidden.any():
            limits = limits._replace(scale=np.where(hidden, 1.0, limits.scale))
        return self._finding(name, actual, truth, limits, dtype)

    def part(self, kind: str, parted: bool, name: str) -> None:
        """Part the pairs of rotated rows, or do not; what of them stands before `name` and was not dumped is ours."""
        self.state.parted[kind] = parted
        for before in itertools.takewhile(lambda stage: stage != name, OF_ROPE):
            if OF_ROPE[before] == kind and before not in self.given:
                self.judge(before)
                self.settle(before)

    def settle(self, name: str) -> None:
        """Put what the engine dumped in the place of ours, or ours with its errors."""
        state = self.state
        if name in self.given:
            if name == "topk":
                return
            state.values[name] = widen(self.given[name], np.float64)
        elif name != "topk":
            truth = state[name]
            own = self.spread.of(name, truth) if name not in LEAVES else 0.0
            copies = name == "kv_cache"
            self.spread.errors[name] = np.asarray(own) if copies else np.hypot(own, self._rounding(name, truth))

    def _rounding(self, name: str, truth: Array) -> Array:
        held = "f32" if name in ("index_scores", "index_weights") else self.spread.held
        return self.spread.rounding(np.where(np.isfinite(truth), truth, 0.0), held)

    def _computed(self, name: str) -> Array:
        if name == "attn" and "o_lat" in self.given:
            found: Array = np.einsum("thl,hvl->thv", self.state["o_lat"], self.state.weights["w_uv"], optimize=True)
            return found
        return STAGES[name].compute(self.state)

    def _limit(self, name: str, truth: Array, dtype: str) -> Limit:
        if name == "attn" and "o_lat" in self.given:
            w2 = np.square(self.state.weights["w_uv"])
            inner = np.einsum("thl,hvl->thv", np.square(self.state["o_lat"]), w2, optimize=True)
            own = np.sqrt(self.spread.contracted(inner, None, "w_uv", truth))
        elif name in ATTENTION:
            found, declared = attention_limit(self.spread, name, dtype, self.given, self.numerics)
            self.declared = f"{declared.origin}: {declared}"
            return found
        else:
            own = self.spread.of(name, truth)
        return limit(np.hypot(own, self.spread.rounding(np.where(np.isfinite(truth), truth, 0.0), dtype)))

    def _finding(self, name: str, actual: Array, truth: Array, limits: Limit, dtype: str) -> Finding:
        if not truth.size:
            return Finding(name, True, dtype, 0.0, 0, len(truth))
        units = limits.units(actual, truth)
        of_rows = units.reshape(len(units), -1).max(axis=1, initial=0)
        over = np.flatnonzero(of_rows > 1)
        row = int(over[0]) if over.size else int(of_rows.argmax())
        z = limits.ratio(actual, truth)[row]
        head = tuple(int(i) for i in np.unravel_index(int(units[row].argmax()), units[row].shape))
        index = (row, *head, int(z[head].argmax()))
        allowed = float(limits.scale[index] * limits.largest[index[:-1]])
        if name == "lse":
            index_shown = index[:-1]
        else:
            index_shown = index
        worst = {
            "index": list(index_shown),
            "actual": _number(actual[index]),
            "expected": _number(truth[index]),
            "allowed": float(f"{allowed:.3g}"),
        }
        largest = float(f"{of_rows.max(initial=0):.3g}")
        said = (
            f"{name}{list(index_shown)} is {actual[index]:.9g} where {truth[index]:.9g} is expected, {of_rows[row]:.3g} times"
            f" its budget, {self._where(name, row)} ({over.size} of {len(of_rows)} rows)"
        )
        position = self._position(name, row) if over.size else None
        return Finding(
            name, not over.size, dtype, largest, int(over.size), len(of_rows), said if over.size else "",
            row if over.size else None, position, worst,
        )  # fmt: skip

    def _position(self, name: str, row: int) -> int | None:
        if name == "index_keys" and self.state.indexer.kpool is not None:
            return None
        first = len(self.state["past_c_kv"]) if STAGES[name].axes.split()[0] in ("N", "keys") else 0
        return int(self.state["positions"][row - first]) if row >= first else None

    def _where(self, name: str, row: int) -> str:
        position = self._position(name, row)
        if position is None:
            return f"in row {row}, which was cached before" if name != "index_keys" else f"in key {row}"
        axis = STAGES[name].axes.split()[0]
        return f"at query {row}, position {position}" if axis == "T" else f"in row {row}, position {position}"

    def _chosen(self, truth: Array) -> Finding:
        """Whether the tokens that the engine chose have the largest scores, up to what scores may be off by."""
        state, topk = self.state, self.given["topk"]
        count = state.seen.shape[1]
        bad = np.argwhere((topk < -1) | (topk >= count))
        if len(bad):
            t, i = (int(x) for x in bad[0])
            raise InputError(f"topk[{t}, {i}] is {topk[t, i]}, expected -1 or a token below {count}")
        theirs = indexer.selected(topk, count) & state.seen  # what a query does not see is masked
        ours = indexer.selected(truth, count) & state.seen
        state.values["topk"] = topk
        scores = state["index_scores"]
        size = state.indexer.kpool or 1
        off = self.spread.errors.get("index_scores")
        if off is None:
            off = np.zeros_like(scores)
        off = off * limit(off[..., None]).largest
        wrong, worst = [], {}
        for t in range(len(ours)):
            if theirs[t].sum() != ours[t].sum():
                reason = f"{int(theirs[t].sum())} tokens are chosen where {int(ours[t].sum())} are expected"
            else:
                extra, lacking = (np.flatnonzero(a & ~b) for a, b in ((theirs[t], ours[t]), (ours[t], theirs[t])))
                if not extra.size:
                    continue
                whole = scores.shape[1] * size
                if (extra >= whole).any() or (lacking >= whole).any():
                    reason = f"token {extra[0]} is chosen and {lacking[0]} is not"
                else:
                    low = extra[np.argmin(scores[t, extra // size])]
                    high = lacking[np.argmax(scores[t, lacking // size])]
                    a, b = scores[t, low // size], scores[t, high // size]
                    if b - a <= off[t, low // size] + off[t, high // size]:
                        continue
                    reason = f"token {low} of score {a:.6g} is chosen and token {high} of score {b:.6g} is not"
            if not wrong:
                worst = {"reason": reason}
            wrong.append(t)
        row = wrong[0] if wrong else None
        said = f"{worst['reason']}, {self._where('topk', row)} ({len(wrong)} of {len(ours)} rows)" if row is not None else ""
        position = None if row is None else int(state["positions"][row])
        units = float("inf") if wrong else 0.0
        return Finding("topk", not wrong, "i64", units, len(wrong), len(ours), said, row, position, worst)


def _number(x: Any) -> float:
    return float(x)


__all__ = ["INPUTS", "Finding", "LayerVerdict", "check_stages", "shape_of", "show"]
