# SPDX-License-Identifier: Apache-2.0
"""The judge of one stage of a dump: its truth from the stages before it, its limit, and what is found of it.

    judge = Judge(sequence, spread, given, numerics, lse_base)
    finding = judge.judge("q_a")          our own value is then in the state
    judge.settle("q_a")                   and now what the engine dumped, or ours with its errors

Stages are judged in the order of the layer, each settled before the next one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import dtypes
from ..arrays import Array
from ..checks import widen
from .blind import mistakes, of_other_scores
from .choice import check_tokens, differences
from .indexer import choose, selected
from .layout import OF_ROPE
from .limits import Limit, attention_limit, limit
from .pages import as_they_are
from .sequences import Sequence
from .spread import Spread
from .stages import STAGES
from .verdict import Finding

ATTENTION = ("lse", "o_lat", "attn")
# What the eps of a norm may be, which engines read differently.
EPS = (1e-6, 1e-5, 0.0)
LN2 = float(np.log(2))


class Judge:
    """Of one sequence of a layer and its part of a dump; `given` are its stages in the dtypes that hold them."""

    def __init__(
        self, sequence: Sequence, spread: Spread, given: Mapping[str, Array], numerics: Any, lse_base: str
    ) -> None:
        self.sequence, self.state = sequence, sequence.state
        self.spread, self.given, self.numerics = spread, given, numerics
        self.unit = 1.0 if lse_base == "e" else 1 / LN2
        self.declared: str | None = None
        self.of_o_lat = "o_lat" in given  # what attn is computed from

    def judge(self, name: str) -> Finding:
        """What is found of a stage, which is computed; ours stays in its place until `settle`."""
        found = self._judged(name)
        if name != "attn" or found.passed or not self.of_o_lat:
            return found
        return self._beside_o_lat(found)

    def _beside_o_lat(self, found: Finding) -> Finding:
        """What is found of an attn that is not w_uv times the o_lat of the dump: whether it was made without that.

        As in the naive form, or where a kernel that gives attn alone has an o_lat computed beside it.
        """
        self.of_o_lat = False
        other = self._judged("attn")
        if (other.rows_over, other.units or 0.0) >= (found.rows_over, found.units or 0.0):
            return found
        if not other.passed or "v" in self.given:
            return other
        said = f"attn is not made of the o_lat dumped, from which it is off by {found.units:.3g} times its budget"
        return dataclasses.replace(other, blind="; ".join(filter(None, (said, other.blind))))

    def _judged(self, name: str) -> Finding:
        state = self.state
        state.values.pop(name, None)
        truth = self._computed(name)
        state.values[name] = truth
        if name not in self.given:
            return Finding(name, True, self.spread.held, None, 0, 0)
        if name == "topk":
            return self._choice(truth)
        actual = widen(self.given[name], np.float64)
        dtype = dtypes.name_of(self.given[name].dtype)
        if name == "lse":
            truth, actual = truth[..., None], actual[..., None] / self.unit
        told = actual, truth
        hidden = np.isneginf(truth) if name in ("scores", "index_scores") else np.zeros(1, bool)
        if hidden.any():
            bad = hidden & ~(actual <= -1e4)
            truth, actual = np.where(hidden, 0.0, truth), np.where(hidden, np.where(bad, np.inf, 0.0), actual)
        exact = name == "kv_cache" and state.store is not None and state.store.dtype is not None
        limits = self._limit(name, truth, "f32" if exact else dtype)
        if hidden.any():
            limits = limits._replace(scale=np.where(hidden, 1.0, limits.scale))
        found = self._finding(name, limits.units(actual, truth), limits.ratio(actual, truth), told, limits, dtype)
        said = []
        for mistake, wrong in mistakes(state, self.given, name) if found.passed else ():
            wrong = wrong[..., None] if name == "lse" else wrong
            rows = self._unseen(name, limits, np.where(hidden, truth, wrong), truth)
            said += [f"{name} would be within its budget {mistake}, {rows}"] if rows else []
        return dataclasses.replace(found, blind="; ".join(said))

    def part(self, kind: str, parted: bool, name: str) -> None:
        """Part the pairs of rotated rows, or do not; what of them stands before `name` and was not dumped is ours."""
        self.state.parted[kind] = parted
        for before in itertools.takewhile(lambda stage: stage != name, OF_ROPE):
            if OF_ROPE[before] == kind and before not in self.given:
                self.judge(before)
                self.settle(before)

    def explained(self, finding: Finding) -> Finding:
        """A norm that fails, and with which eps it would not."""
        own, said = self.state.config, ""
        for eps in EPS:
            self.state.config = dataclasses.replace(own, norm_eps=eps)
            if self.judge(finding.stage).passed:
                said = f"; with norm_eps {eps:g} in the place of {own.norm_eps:g} it is within its budget"
        self.state.config = own
        self.judge(finding.stage)
        return dataclasses.replace(finding, reason=finding.reason + said)

    def settle(self, name: str) -> None:
        """Put what the engine dumped in the place of ours, or ours with its errors."""
        state = self.state
        if name in self.given:
            if name == "topk":
                return
            state.values[name] = widen(self.given[name], np.float64)
            if name == "kv_cache" and state.store is not None:
                state.pages = as_they_are(state.places, state[name], state.store.block_size)
        elif name != "topk":
            truth = state[name]
            own = np.asarray(self.spread.of("unseen" if name == "attn" else name, truth))
            copies = name == "kv_cache" or (name == "index_keys" and state.indexer.kpool is None)
            # What has no error is a copy of what has none: storing it rounds nothing.
            rounding = 0.0 if copies else np.where(own > 0, self._rounding(name, truth), 0.0)
            self.spread.errors[name] = np.hypot(own, rounding)

    def _rounding(self, name: str, truth: Array) -> Array:
        held = "f32" if name in ("index_scores", "index_weights") else self.spread.held
        return self.spread.rounding(np.where(np.isfinite(truth), truth, 0.0), held)

    def _computed(self, name: str) -> Array:
        if name == "attn" and self.of_o_lat:
            found: Array = np.einsum("thl,hvl->thv", self.state["o_lat"], self.state.weights["w_uv"], optimize=True)
            return found
        return STAGES[name].compute(self.state)

    def _limit(self, name: str, truth: Array, dtype: str) -> Limit:
        if name == "attn" and self.of_o_lat:
            w2 = np.square(self.state.weights["w_uv"])
            inner = np.einsum("thl,hvl->thv", np.square(self.state["o_lat"]), w2, optimize=True)
            own = np.sqrt(self.spread.contracted(inner, None, "w_uv", truth, w2.shape[-1]))
        elif name in ATTENTION:
            found, declared = attention_limit(self.spread, name, dtype, self.given, self.numerics)
            self.declared = f"{declared.origin}: {declared}"
            return found
        else:
            own = self.spread.of(name, truth)
        return limit(np.hypot(own, self.spread.rounding(np.where(np.isfinite(truth), truth, 0.0), dtype)))

    def _finding(
        self, name: str, units: Array, ratio: Array, told: tuple[Array, Array], limits: Limit, dtype: str
    ) -> Finding:
        """What `units` of rows and the `ratio` of elements to their scales say, where `told` is actual and expected."""
        actual, truth = told
        if not truth.size:
            return Finding(name, True, dtype, 0.0, 0, len(truth))
        of_rows = units.reshape(len(units), -1).max(axis=1, initial=0)
        over = np.flatnonzero(of_rows > 1)
        row = int(over[0]) if over.size else int(of_rows.argmax())
        z = ratio[row]
        head = tuple(int(i) for i in np.unravel_index(int(units[row].argmax()), units[row].shape))
        index = (row, *head, int(z[head].argmax()))
        allowed = float(limits.scale[index] * limits.largest[index[:-1]])
        first = self._first(name)
        shown = [row + first, *(index[1:-1] if name == "lse" else index[1:])]
        values = {"actual": float(actual[index]), "expected": float(truth[index]), "allowed": float(f"{allowed:.3g}")}
        largest = float(f"{of_rows.max(initial=0):.3g}")
        said = (
            f"{name}{shown} is {actual[index]:.9g} where {truth[index]:.9g} is expected, {of_rows[row]:.3g} times its"
            f" budget, {self._where(name, row)} ({over.size} of {len(of_rows)} rows)"
        )
        position = self._position(name, row) if over.size else None
        return Finding(
            name, not over.size, dtype, largest, int(over.size), len(of_rows), said if over.size else "",
            row + first if over.size else None, position, {"index": shown, **values}, self.sequence.number,
        )  # fmt: skip

    def _unseen(self, name: str, limits: Limit, wrong: Array, truth: Array) -> str:
        """At which rows a wrong stage would be within its limits, in words; rows that were cached before apart."""
        first = len(self.state["past_c_kv"]) if STAGES[name].axes.split()[0] == "N" else 0
        within = (limits.units(wrong, truth).reshape(len(truth), -1).max(axis=1, initial=0) <= 1)[first:]
        if not within.any():
            return ""
        return f"{self._where(name, first + int(within.argmax()))} ({within.sum()} of {len(within)} rows)"

    def _position(self, name: str, row: int) -> int | None:
        if name == "index_keys" and self.state.indexer.kpool is not None:
            return None
        first = len(self.state["past_c_kv"]) if STAGES[name].axes.split()[0] in ("N", "keys") else 0
        return int(self.state["positions"][row - first]) if row >= first else None

    def _first(self, name: str) -> int:
        """Where the sequence's part of a stage begins."""
        return self.sequence.first[STAGES[name].axes.split()[0]]

    def _where(self, name: str, row: int) -> str:
        position, shown = self._position(name, row), row + self._first(name)
        of = f" of sequence {self.sequence.number}" if self.sequence.among > 1 else ""
        if position is None:
            return f"in row {shown}{of}, which was cached before" if name != "index_keys" else f"in key {shown}{of}"
        axis = STAGES[name].axes.split()[0]
        return f"{'at query' if axis == 'T' else 'in row'} {shown}, position {position}{of}"

    def _choice(self, ours: Array) -> Finding:
        topk = self.given["topk"]
        seen = self.state.seen
        first = self._first("topk")
        check_tokens(topk, seen.shape[1], first)
        wrong = differences(self.spread, topk, ours)
        if (selected(topk, seen.shape[1]) & seen).any(axis=1).all():  # else a query would attend to nothing
            self.state.values["topk"] = topk
        if not wrong:
            said = self._blind_choice(ours)
            return Finding("topk", True, "i64", 0.0, 0, len(ours), sequence=self.sequence.number, blind=said)
        row = min(wrong)
        said = f"{wrong[row]}, {self._where('topk', row)} ({len(wrong)} of {len(ours)} rows)"
        position = self._position("topk", row)
        return Finding(
            "topk", False, "i64", np.inf, len(wrong), len(ours), said, row + first, position,
            sequence=self.sequence.number,
        )  # fmt: skip

    def _blind_choice(self, ours: Array) -> str:
        """What a right choice does not tell, where the scores that it was made of are not dumped."""
        if "index_scores" in self.given or self.state.indexer.kpool is not None:
            return ""
        mistake, scores = of_other_scores(self.state)
        other = choose(self.state.indexer, scores, self.state.seen)
        return "" if differences(self.spread, other, ours) else f"topk would be right {mistake}"
