# SPDX-License-Identifier: Apache-2.0
"""What a stage may miss the truth by: its RMS error (spread.py) times the upper end of |error| / RMS.

A row is the last axis. Of a row two numbers are held to a limit, in units of the RMS error: its root mean square and
its largest. With n elements of a row and N of a stage, and roundings that are independent,

    root mean square   1 + 4 / sqrt(2 n), or 1 / 0.4247 where one rounding that the row shares decides (a norm's root)
    largest            sqrt(2 ln N) + 1, the largest of N normal numbers, or the 1 / 0.4247 of one rounding

times budget.MARGIN. What attention itself rounds is the budget of an emulated kernel (budget.py), and the errors that
its inputs have beside it, if they were not dumped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..arrays import Array
from ..cases import Case, NaiveCase, PagedCase
from ..dense import absorb_query
from ..oracle import expected
from ..verdict import budget
from ..verdict.budget import MARGIN
from ..verdict.noise import LONE
from ..verdict.numerics import Numerics, resolve
from .spread import Spread
from .state import State


class Limit(NamedTuple):
    """Of a stage [*rows, n]: the scale of every element, and what of it a row and an element may miss, [*rows]."""

    scale: Array
    rms: Array
    largest: Array

    def units(self, actual: Array, truth: Array) -> Array:
        """[*rows] the error in units of the limit; infinite where what is exact differs or a value is not finite."""
        z = self.ratio(actual, truth)
        n = z.shape[-1]
        rms = np.sqrt(np.square(z).mean(axis=-1)) if n else np.zeros(z.shape[:-1])
        units: Array = np.maximum(rms / self.rms, z.max(axis=-1, initial=0) / self.largest)
        return units

    def ratio(self, actual: Array, truth: Array) -> Array:
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            error = np.where(actual == truth, 0.0, np.abs(actual - truth))
            z = np.where(error == 0, 0.0, error / self.scale)
        return np.where(np.isnan(z), np.inf, z)


def limit(scale: Array) -> Limit:
    """The limit of a stage with these RMS errors [*rows, n]."""
    n, N = max(scale.shape[-1], 1), max(scale.size, 2)
    rows = np.ones(scale.shape[:-1])
    return Limit(
        scale,
        MARGIN * max(LONE, 1 + 4 / math.sqrt(2 * n)) * rows,
        MARGIN * max(LONE, 1 + math.sqrt(2 * math.log(N))) * rows,
    )


def attention_limit(
    spread: Spread, name: str, dtype: str, dumped: Mapping[str, Array], numerics: Any
) -> tuple[Limit, Numerics]:
    """The limit of o_lat, lse or attn: an honest kernel's budget on what it was given, and the inputs' own errors.

    `dumped`: the stages of the dump in the dtypes that hold them. Raises InputError for unknown numerics.
    """
    state = spread.state
    carried = limit(spread.of(name, state[name])) if name != "lse" else None
    found: list[tuple[Array, Array, Array]] = []
    result = "lse" if name == "lse" else "out"
    declared = None
    for queries, case in _cases(spread, name, dumped):
        kinds = {"out": dtype} if result == "out" else {"out": spread.held, "lse": dtype}
        declared = resolve(numerics, case, kinds)
        truth = expected(case, precision="f64")
        own = budget.budget(case, declared, truth)
        of_out = own.out_scale, own.out_rms, own.out_max
        parts = (own.lse_scale, own.lse_max, own.lse_max) if result == "lse" else of_out
        shape = state[name][queries].shape
        rows = shape if result == "lse" else shape[:-1]
        found.append((parts[0].reshape(shape), parts[1].reshape(rows), parts[2].reshape(rows)))
    scale, rms, largest = (np.concatenate(parts) for parts in zip(*found, strict=True))
    assert declared is not None
    if result == "lse":
        more = spread.of("lse", state["lse"]) * MARGIN * (1 + math.sqrt(2 * math.log(max(scale.size, 2))))
        whole = np.hypot(scale * largest, more)[..., None]
        return Limit(whole, np.ones(scale.shape), np.ones(scale.shape)), declared
    if not carried or not carried.scale.any():
        return Limit(scale, rms, largest), declared
    whole = np.hypot(scale * largest[..., None], carried.scale * carried.largest[..., None])
    ratio = np.maximum(rms / largest, carried.rms / carried.largest)
    return Limit(whole, ratio, np.ones_like(ratio)), declared


def _cases(spread: Spread, name: str, dumped: Mapping[str, Array]) -> list[tuple[slice, Case]]:
    """What a kernel was given: of all queries at once, or where they chose their tokens of one after the other."""
    state, mask = spread.state, spread.state.mask
    held: dict[str, Array] = {
        stage: dumped[stage] if stage in dumped else dtypes.round_to(state[stage], spread.held)
        for stage in ("q_nope", "q_pe", "q_lat", "kv_cache")
        if stage in state.values
    }
    if (mask == state.seen).all():
        return [(slice(None), _case(state, name, held, slice(None), np.arange(mask.shape[1])))]
    T = len(mask)
    return [(slice(t, t + 1), _case(state, name, held, slice(t, t + 1), np.flatnonzero(mask[t]))) for t in range(T)]


def _case(state: State, name: str, held: Mapping[str, Array], queries: slice, tokens: Array) -> Case:
    g = state.geometry
    rows = held["kv_cache"][tokens]
    q_pe = held["q_pe"][queries]
    if name == "attn":
        q_nope = held["q_nope"][queries]
        if q_nope.dtype != q_pe.dtype:
            q_nope, q_pe = q_nope.astype(np.float32), q_pe.astype(np.float32)
        L = g.kv_lora_rank
        return NaiveCase(
            q_nope=q_nope,
            q_pe=q_pe,
            c_kv=rows[:, :L],
            k_pe=rows[:, L:],
            w_uk=state.weights["w_uk"].astype(np.float32),
            w_uv=state.weights["w_uv"].astype(np.float32),
            softmax_scale=g.softmax_scale,
        )
    if "q_lat" in held:
        q_lat = held["q_lat"][queries]
    else:
        q_lat = absorb_query(state["q_nope"], state.weights["w_uk"], precision="f64")[queries]
    q = np.concatenate([q_lat.astype(q_pe.dtype), q_pe], axis=-1)
    return PagedCase(
        q=q[None],
        kv_cache=rows[None],
        block_table=np.zeros((1, 1), np.int32),
        seq_lens=np.array([len(rows)], np.int32),
        softmax_scale=g.softmax_scale,
        head_dim_v=g.kv_lora_rank,
    )
