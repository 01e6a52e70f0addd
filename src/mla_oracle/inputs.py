# SPDX-License-Identifier: Apache-2.0
"""Recipe -> case: the arrays of a generated problem, the same on every machine.

Numbers come from a counter-based generator keyed by (seed, name of the tensor), except for the two that reproduce
published tests: "xorshift" (dense forms) and "lcg" (paged). Slots nobody may read hold NaN, table entries past a
request's length an id that exists nowhere, unless `unread` says numbers.

Families of paged inputs, for unit-normal rows k and queries q:
    normal    as they are                       peaked    q x 8: one key takes nearly all the weight
    flat      q = 0: lse = log(visible)         position  flat, and every value is a code of its position
    onehot    head h reads one element of k     tailed    q and k cubed: rare large scores
    rising    the score grows with every token, so that each moves the maximum (as far as the dtype tells them apart)
"""

from __future__ import annotations

import math
import os

import numpy as np

from . import _generators, dtypes
from .arrays import Array
from .cases import AbsorbedCase, AppendCase, Case, MergeCase, NaiveCase, PagedCase, RopeCase
from .errors import InputError
from .placement import SPARE_ENTRIES, count_pages, place_pages
from .recipes import AppendRecipe, DenseRecipe, MergeRecipe, PagedRecipe, Recipe, RopeRecipe, parse_id

# Half of this machine's memory: the numbers and their stored dtype.
MAX_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def generate(recipe: Recipe | str) -> Case:
    """The case that `recipe`, or the id of one, stands for. Raises InputError."""
    recipe = parse_id(str(recipe))
    match recipe:
        case DenseRecipe():
            return _dense(recipe)
        case PagedRecipe():
            return _paged(recipe)
        case MergeRecipe():
            return _merge(recipe)
        case RopeRecipe():
            return _rope(recipe)
        case AppendRecipe():
            return _append(recipe)
    raise TypeError(f"no such recipe: {recipe!r}")


def normal(seed: int, name: str, *shape: int) -> Array:
    """Unit normals (sums of twelve 16-bit uniforms, within +-6), f32, for the tensor `name`."""
    out = _empty(*shape)
    _generators.normal(_key(seed, name), out.reshape(-1))
    return out


def permutation(seed: int, name: str, n: int) -> Array:
    """A permutation of range(n)."""
    words = np.empty(n, np.uint64)
    _generators.words(_key(seed, name), 0, words)
    return np.argsort(words, kind="stable")


def _key(seed: int, name: str) -> int:
    import hashlib

    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def _empty(*shape: int) -> Array:
    if math.prod(shape) * 4 > MAX_BYTES:
        raise InputError(f"a tensor of {list(shape)} f32 is too large to generate, expected at most {MAX_BYTES} bytes")
    return np.empty(shape, np.float32)


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
            tensors[name] = _empty(*shape)
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


def _paged(recipe: PagedRecipe) -> PagedCase:
    H = recipe.size("heads", lambda g: g.num_heads)
    D = recipe.size("row", lambda g: g.latent_dim)
    V = recipe.size("value", lambda g: g.kv_lora_rank)
    geometry = recipe.preset()
    scale = recipe.scale
    if scale is None:
        if geometry is None:
            raise InputError(f"case id {str(recipe)!r} has neither scale nor geometry, expected one of them")
        scale = geometry.softmax_scale
    if V > D:
        raise InputError(f"case id {str(recipe)!r} has value={V}, expected at most row={D}")

    lens = np.array(recipe.lens, np.int32)
    kv = _empty(count_pages(lens, recipe.block, recipe.pages), recipe.block, D)
    pages = place_pages(lens, recipe.block, recipe.pages, lambda n: permutation(recipe.seed, "pages", n))
    T = recipe.tokens or 1
    if recipe.inputs == "lcg":
        q = _empty(len(lens), T, H, D)
        _generators.lcg(recipe.seed & 0xFFFFFFFF, kv.reshape(-1))
        _generators.lcg((recipe.seed + 7919) & 0xFFFFFFFF, q.reshape(-1))
    else:
        q, rows = _paged_rows(recipe, lens, T, H, D, V, scale)
        kv[:] = np.nan
        kv.reshape(-1, D)[pages.row_of_token] = rows
    kv.reshape(-1, D)[pages.unread_rows] = np.nan
    if recipe.unread == "numbers":
        unread = np.isnan(kv.reshape(-1, D)).all(axis=1)
        kv.reshape(-1, D)[unread] = normal(recipe.seed, "unread", int(unread.sum()), D)

    kv = dtypes.round_to(kv, recipe.dtype)
    q = dtypes.round_to(q, recipe.dtype)
    page_bytes = recipe.block * D * kv.itemsize
    ids, num_blocks, stride = pages.apart(page_bytes, recipe.pages)
    return PagedCase(
        id=str(recipe),
        q=q if recipe.tokens else q[:, 0],
        kv_cache=kv,
        block_table=pages.table(ids, spare=0 if recipe.unread == "nan" else SPARE_ENTRIES),
        seq_lens=lens,
        page_ids=ids,
        num_blocks=num_blocks,
        block_stride=stride,
        softmax_scale=scale,
        head_dim_v=V,
        causal=recipe.causal,
        lse_base=recipe.lse_base,
        empty_lse=recipe.empty_lse,
        shards=recipe.shards,
        shard_layout=recipe.shard_layout,
    )


def _paged_rows(
    recipe: PagedRecipe, lens: Array, T: int, H: int, D: int, V: int, scale: float
) -> tuple[Array, Array]:
    """q [B, T, H, D] and the rows of every token in order [sum(lens), D]."""
    q = normal(recipe.seed, "q", len(lens), T, H, D)
    rows = normal(recipe.seed, "kv_cache", int(lens.sum()), D)
    position = np.concatenate([np.arange(n) for n in lens] or [np.arange(0)]).astype(np.float32)
    match recipe.inputs:
        case "peaked":
            q *= 8
        case "flat":
            q[:] = 0
        case "position":
            q[:] = 0
            rows[:, :V] = (position[:, None] + np.arange(V, dtype=np.float32)) % 251 / 16
        case "onehot":
            q[:] = 0
            head = np.arange(H)
            q[:, :, head, head * 37 % D] = 4 / scale
        case "tailed":
            q, rows = q**3 / 4, rows**3 / 4
        case "rising":
            # One direction shared by every query; its coordinate grows by 1/2 in score with every token.
            q[:] = 0
            q[..., D - 1] = 1 / scale
            rows[:, D - 1] = position / 2
    return q, rows


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
