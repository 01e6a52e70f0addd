# SPDX-License-Identifier: Apache-2.0
"""Recipe -> case: the arrays of a generated problem, the same on every machine; paged ones in paged_inputs.py.

Numbers come from a counter-based generator (draws.py), except for the two that reproduce published tests: "xorshift"
(dense forms) and "lcg" (paged).
"""

from __future__ import annotations

import numpy as np

from .. import _generators, dtypes
from ..arrays import Array
from ..errors import InputError
from . import AbsorbedCase, AppendCase, Case, MergeCase, NaiveCase, RopeCase
from .draws import empty, normal, permutation
from .paged_inputs import paged
from .recipes import AppendRecipe, DenseRecipe, MergeRecipe, PagedRecipe, Recipe, RopeRecipe, parse_id


def generate(recipe: Recipe | str) -> Case:
    """The case that `recipe`, or the id of one, stands for. Raises InputError."""
    recipe = parse_id(str(recipe))
    match recipe:
        case DenseRecipe():
            return _dense(recipe)
        case PagedRecipe():
            return paged(recipe)
        case MergeRecipe():
            return _merge(recipe)
        case RopeRecipe():
            return _rope(recipe)
        case AppendRecipe():
            return _append(recipe)
    raise TypeError(f"no such recipe: {recipe!r}")


def _dense(recipe: DenseRecipe) -> Case:
    H = recipe.size("heads", lambda g: g.num_heads)
    P = recipe.size("nope", lambda g: g.qk_nope_head_dim)
    R = recipe.size("rope", lambda g: g.qk_rope_head_dim)
    V = recipe.size("value", lambda g: g.v_head_dim)
    L = recipe.size("rank", lambda g: g.kv_lora_rank)
    t_q, t_kv = recipe.queries, recipe.cached
    if t_q > t_kv:
        raise InputError(f"case id {str(recipe)!r} has queries={t_q}, expected at most cached={t_kv}")
    shapes = {
        "q_nope": (t_q, H, P),
        "q_pe": (t_q, H, R),
        "c_kv": (t_kv, L),
        "k_pe": (t_kv, R),
        "w_uk": (H, P, L),
        "w_uv": (H, V, L),
    }
    weight_scale = np.float32(1) / np.sqrt(np.float32(L))
    tensors = {}
    state = recipe.seed | 1
    for name, shape in shapes.items():
        scale = float(weight_scale) if name.startswith("w_") else 1.0
        if recipe.inputs == "xorshift":
            tensors[name] = empty(*shape)
            state = _generators.xorshift(state, scale, tensors[name].reshape(-1))
        else:
            tensors[name] = normal(recipe.seed, name, *shape) * np.float32(scale)
    geometry = recipe.preset()
    softmax_scale = recipe.scale
    if softmax_scale is None and geometry is not None and geometry.softmax_mscale != 1:
        softmax_scale = geometry.softmax_scale
    cls = NaiveCase if recipe.kind == "naive" else AbsorbedCase
    stored = {name: dtypes.round_to(tensor, recipe.dtype) for name, tensor in tensors.items()}
    return cls(id=str(recipe), softmax_scale=softmax_scale, **stored)


def _merge(recipe: MergeRecipe) -> MergeCase:
    shape = (recipe.states, recipe.rows, recipe.heads)
    partial_out = normal(recipe.seed, "partial_out", *shape, recipe.value)
    partial_lse = normal(recipe.seed, "partial_lse", *shape) * 4
    # Every row has empty states by turns, the first row nothing else; an empty state's out may not be read.
    empty = (np.arange(recipe.states)[:, None] + np.arange(recipe.rows)) % 3 == 2
    empty[:, 0] = True
    partial_lse[empty] = recipe.empty_lse
    partial_out[empty] = np.nan
    return MergeCase(
        id=str(recipe),
        partial_out=dtypes.round_to(partial_out, recipe.dtype),
        partial_lse=partial_lse,
        lse_base=recipe.lse_base,
        empty_lse=recipe.empty_lse,
    )


def _rope(recipe: RopeRecipe) -> RopeCase:
    geometry = recipe.preset()
    width = recipe.size("rope", lambda g: g.qk_rope_head_dim)
    pairing, base, yarn = recipe.pairing, recipe.base, None
    if geometry is not None:
        pairing = pairing or ("interleaved" if geometry.rope_interleave else "neox")
        base = base or geometry.rope_theta
        yarn = geometry.yarn.to_json() if geometry.yarn is not None else None
    if pairing is None or base is None:
        missing = "pairing" if pairing is None else "base"
        raise InputError(f"case id {str(recipe)!r} has no {missing}, expected it or a geometry that has one")
    positions = np.array(recipe.positions, np.int64)
    x = normal(recipe.seed, "x", len(positions), recipe.heads, width)
    return RopeCase(
        id=str(recipe),
        x=dtypes.round_to(x, recipe.dtype),
        positions=positions,
        pairing=pairing,
        base=base,
        angles=recipe.angles,
        yarn=yarn,
    )


def _append(recipe: AppendRecipe) -> AppendCase:
    L = recipe.size("rank", lambda g: g.kv_lora_rank)
    R = recipe.size("rope", lambda g: g.qk_rope_head_dim)

    def stored(name: str, *shape: int) -> Array:
        return dtypes.round_to(normal(recipe.seed, name, *shape), recipe.dtype)

    kv_cache = stored("kv_cache", recipe.blocks, recipe.block, L + R)
    slots = permutation(recipe.seed, "slot_mapping", recipe.blocks * recipe.block)
    slots = slots[: recipe.tokens].astype(np.int64)
    slots[2::3] = -1
    return AppendCase(
        id=str(recipe),
        kv_cache=kv_cache,
        c_kv=stored("c_kv", recipe.tokens, L),
        k_pe=stored("k_pe", recipe.tokens, R),
        slot_mapping=slots,
    )
