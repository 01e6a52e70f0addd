# SPDX-License-Identifier: Apache-2.0
"""The one evaluator of plans, in f64: scores by one GEMM, weights part by part, values by one GEMM.

What a mutant's plan shares with the right one is taken from there: columns of its scores, all scores, the weights,
or the sums of values, whichever come from fields that are the same objects.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Array
from .joins import inverse
from .memory import Rows
from .plan import Parts, Plan

PLACE = frozenset(("lanes", "table", "block", "page_stride", "row_stride", "address", "keys"))
LATENT = PLACE | {"q_latent"}
ROPE = PLACE | {"q_rope", "turn_keys"}
SCORE = LATENT | ROPE
WEIGHT = SCORE | {"length", "causal", "scale", "sees", "score", "mask", "parts", "keeps_parts", "softcap"}
VALUE = WEIGHT | {"value_lanes", "value_address", "value_columns", "touches_masked"}
EVERY = VALUE | {"join", "extras"}


@dataclass
class State:
    """What evaluating a plan leaves; [T, H, n] over its lanes."""

    plan: Plan
    latent: Array  # q . key of the latent elements [T, H, n]
    rope: Array | None  # and of the rope elements
    s: Array  # scores, -inf where masked
    e: Array  # e^(s - m of the lane's part)
    parts: Parts | None
    m: Array  # maximum of each part [T, H, parts]
    d: Array  # sum of e of each part [T, H, parts]
    acc: list[Array]  # sum of e v of each part [T, H, V]; empty where parts are joined before values are read
    out: Array  # [T, H, V]
    lse: Array  # [T, H] in its unit

    @property
    def nbytes(self) -> int:
        arrays = (self.latent, self.rope, self.s, self.e, *self.acc, self.out)
        return sum(a.nbytes for a in arrays if a is not None)

    def partials(self) -> tuple[Array, Array]:
        """out [parts, T, H, V] and lse [parts, T, H] of the parts, without the extra ones."""
        with np.errstate(all="ignore"):
            out = [acc * inverse(self.d[..., i])[..., None] for i, acc in enumerate(self.acc)]
            lse = self.plan.log_sum(self.plan, self.m, self.d)
        return np.stack(out), np.moveaxis(np.where(self.d == 0, self.plan.empty_lse, lse), -1, 0)


def evaluate(plan: Plan, rows: Rows, base: State | None = None) -> State:
    """The state of `plan`; `rows` holds the request's own rows, `base` is the state of its right plan, if known."""
    changed = EVERY if base is None else {f for f in EVERY if getattr(plan, f) is not getattr(base.plan, f)}
    with np.errstate(all="ignore"):
        addresses = plan.address(plan, plan.lanes)
        width = plan.q_latent.shape[-1]
        if base is not None and not changed & LATENT:
            latent = base.latent
        else:
            known = None if base is None or plan.q_latent is not base.plan.q_latent else base.latent
            latent = _dot(plan.q_latent, rows, addresses, slice(0, width), known)
        rope = _rope(plan, rows, addresses, width, base) if base is None or changed & ROPE else base.rope
        if base is not None and not changed & WEIGHT:
            s, e, parts, m, d = base.s, base.e, base.parts, base.m, base.d
        else:
            s = plan.score(plan, latent if rope is None else latent + rope)
            s = plan.mask(s, plan.sees(plan))
            parts = None if plan.parts is None else plan.parts(plan)
            e, m, d = _weigh(s, parts)
        acc = _parts(plan, rows, addresses, s, e, parts) if base is None or changed & VALUE else base.acc
        out, lse = _finish(plan, rows, addresses, s, e, parts, m, d, acc)
    return State(plan, latent, rope, s, e, parts, m, d, acc, out, lse)


def _dot(q: Array, rows: Rows, addresses: Array, columns: slice, known: Array | None) -> Array:
    """q . key [T, H, n]; `known` has it for the request's own tokens."""
    T, H, width = q.shape
    if known is None:
        return (q.reshape(T * H, width) @ rows.read(addresses)[0][:, columns].T).reshape(T, H, len(addresses))
    n = len(addresses)
    if n <= len(rows.addresses) and np.array_equal(addresses, rows.addresses[:n]):
        return known[..., :n]
    lanes = rows.lanes(addresses)
    strange = np.flatnonzero(lanes < 0)
    scores = known[..., np.maximum(lanes, 0)] if known.shape[-1] else np.zeros((T, H, n))
    if len(strange):
        keys = rows.strange(addresses[strange])[:, columns]
        scores[..., strange] = (q.reshape(T * H, width) @ keys.T).reshape(T, H, len(strange))
    return scores


def _rope(plan: Plan, rows: Rows, addresses: Array, width: int, base: State | None) -> Array | None:
    q = plan.q_rope
    if q is None or q.shape[-1] == 0:
        return None
    columns = slice(width, width + q.shape[-1])
    if plan.turn_keys is not None:
        keys = plan.turn_keys(rows.read(addresses)[0][:, columns], plan.lanes)
        return (q.reshape(-1, q.shape[-1]) @ keys.T).reshape(*q.shape[:2], len(addresses))
    known = None if base is None or q is not base.plan.q_rope else base.rope
    return _dot(q, rows, addresses, columns, known)


def _weigh(s: Array, parts: Parts | None) -> tuple[Array, Array, Array]:
    """e^(s - m) [T, H, n], the maximum m and the sum of it for each part [T, H, parts]."""
    if parts is None:
        m = s.max(-1, keepdims=True, initial=-np.inf)
        e = s - np.where(m == -np.inf, 0, m)
        np.exp(e, out=e)
        return e, m, e.sum(-1, keepdims=True)
    order = np.argsort(parts.of_lane, kind="stable")
    first = np.searchsorted(parts.of_lane[order], np.arange(parts.total))
    full = np.diff(first, append=len(order)) > 0  # the parts that have lanes
    m, d = np.full((*s.shape[:2], parts.total), -np.inf), np.zeros((*s.shape[:2], parts.total))
    if not full.any():
        return np.zeros(s.shape), m, d
    m[..., full] = np.maximum.reduceat(s[..., order], first[full], -1)
    e = s - np.where(m == -np.inf, 0, m)[..., parts.of_lane]
    np.exp(e, out=e)
    d[..., full] = np.add.reduceat(e[..., order], first[full], -1)
    return e, m, d


def _parts(plan: Plan, rows: Rows, addresses: Array, s: Array, e: Array, parts: Parts | None) -> list[Array]:
    """The sum of e v of the one part, or of each where they are results."""
    if parts is None:
        return [_sum(e, s, *_values(plan, rows, addresses), plan.touches_masked)]
    if not plan.keeps_parts:
        return []
    values, finite = _values(plan, rows, addresses)
    lanes = [parts.of_lane == i for i in range(parts.total)]
    return [_sum(e[..., own], s[..., own], values[own], finite, plan.touches_masked) for own in lanes]


def _values(plan: Plan, rows: Rows, addresses: Array) -> tuple[Array, bool]:
    """What each lane adds to the output [n, V], and whether it is known to be finite."""
    if plan.value_lanes is not None or plan.value_address is not None:
        address = plan.value_address or plan.address
        addresses = address(plan, plan.lanes if plan.value_lanes is None else plan.value_lanes)
    read, finite = rows.read(addresses)
    return (read[:, : plan.head_dim_v] if plan.value_columns is None else read[:, plan.value_columns]), finite


def _sum(weights: Array, s: Array, values: Array, finite: bool, touches_masked: bool) -> Array:
    """sum w v [T, H, V] over the lanes. A lane without weight is not touched, or it is: 0 NaN is NaN."""
    T, H, n = weights.shape
    weights = weights.reshape(T * H, n)
    if finite:
        return (weights @ values).reshape(T, H, -1)
    lost = np.isnan(weights).any(1)  # rows that are NaN whatever the values are
    if lost.all():
        return np.full((T, H, values.shape[1]), np.nan)
    good = np.isfinite(values)
    bad = np.flatnonzero(~good.all(1))
    acc = weights @ np.where(good, values, 0)
    if len(bad):
        weight, value = weights[:, bad], values[bad]
        touched = np.ones(weight.shape, bool) if touches_masked else s.reshape(T * H, n)[:, bad] != -np.inf
        some = touched & (weight > 0)
        is_nan = _count(touched, np.isnan(value)) + _count(touched & (weight == 0), np.isinf(value))
        acc[_count(some, value == np.inf) > 0] += np.inf
        acc[_count(some, value == -np.inf) > 0] -= np.inf
        acc[is_nan > 0] = np.nan
    return acc.reshape(T, H, -1)


def _count(rows: Array, columns: Array) -> Array:
    return rows.astype(np.float32) @ columns.astype(np.float32)


def _finish(
    plan: Plan,
    rows: Rows,
    addresses: Array,
    s: Array,
    e: Array,
    parts: Parts | None,
    m: Array,
    d: Array,
    acc: list[Array],
) -> tuple[Array, Array]:
    """out [T, H, V] and lse [T, H]: the parts joined, empty rows as the plan says."""
    own = m.shape[-1]
    if plan.extras:
        m = np.concatenate([m, *(part.lse[..., None] for part in plan.extras)], -1)
        d = np.concatenate([d, *((part.lse > -np.inf)[..., None] * 1.0 for part in plan.extras)], -1)
    coef, top, z, lse = plan.join(m, d)
    if acc:
        out = sum(acc[i] * coef[..., i, None] for i in range(own))
    else:
        assert parts is not None
        weights = e * coef[..., parts.of_lane]
        out = _sum(weights, s, *_values(plan, rows, addresses), plan.touches_masked)
        out[np.isnan(coef).any(-1)] = np.nan
    for i, part in enumerate(plan.extras):
        factor = coef[..., own + i, None]
        out = out + np.where(factor == 0, 0, part.out) * factor
    empty = z == 0
    if plan.sinks is not None and plan.add_sinks is not None:
        out, z = plan.add_sinks(plan, np.asarray(out), top, z)
    if lse is None:
        lse = plan.log_sum(plan, top, z)
    out = np.where(empty[..., None], plan.empty_out, out * plan.out_factor)
    lse = np.where(empty, plan.empty_lse, lse)
    if plan.up is not None:
        out = np.matmul(out.swapaxes(0, 1), plan.up.swapaxes(1, 2)).swapaxes(0, 1)
    return out, lse
