# SPDX-License-Identifier: Apache-2.0
"""The steps of a plan over a list of keys: where a place lies, its score, its bias, sinks; and lists cut and joined."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..arrays import Array
from .plan import MISSING, Keys, Plan


def list_address(p: Plan, lanes: Array) -> Array:
    """The address of each place of the list, MISSING outside."""
    assert p.keys is not None
    held = (lanes >= 0) & (lanes < len(p.keys.address))
    if not len(p.keys.address):
        return np.full(len(lanes), MISSING)
    return np.where(held, p.keys.address[np.where(held, lanes, 0)], MISSING)


def lane_bias(p: Plan) -> Array:
    """[H, n] the bias of each lane, 0 outside the list."""
    assert p.keys is not None
    held = (p.lanes >= 0) & (p.lanes < p.keys.bias.shape[1])
    if not p.keys.bias.shape[1]:
        return np.zeros((len(p.keys.bias), len(p.lanes)))
    return np.where(held, p.keys.bias[:, np.where(held, p.lanes, 0)], 0.0)


def capped(p: Plan, s: Array) -> Array:
    return s if not p.softcap else p.softcap * np.tanh(s / p.softcap)


def biased(p: Plan, dots: Array) -> Array:
    """q . key [T, H, n] -> scores: scaled, capped, biased."""
    found: Array = capped(p, dots * p.scale) + lane_bias(p)
    return found


def in_denominator(p: Plan, out: Array, m: Array, z: Array) -> tuple[Array, Array]:
    """out and z with e^sink in the denominator; z alone where the LSE does not count it."""
    assert p.sinks is not None
    share = 1 / (1 + np.exp(p.sinks - (m + np.log(z))))
    return out * share[..., None], z + np.exp(p.sinks - m) if p.sinks_in_lse else z


def joined(*parts: Keys) -> Keys:
    """Lists one after the other."""
    return Keys(*(np.concatenate(arrays, -1) for arrays in zip(*parts, strict=True)))


def relisted(p: Plan, keys: Keys) -> Plan:
    """The plan over another list."""
    return replace(p, keys=keys, lanes=np.arange(len(keys.address)), length=len(keys.address))


def extra_keys(p: Plan) -> Keys:
    """The keys of the extra cache in the plan's list."""
    return taken(p, p.keys.source == 1 if p.keys is not None else np.zeros(0, bool))


def taken(p: Plan, which: Array) -> Keys:
    """Some of the keys [M] of the plan's list, by mask or index."""
    assert p.keys is not None
    return Keys(*(array[..., which] for array in p.keys))
