# SPDX-License-Identifier: Apache-2.0
"""The cases that a suite is chosen from: ids, richest first.

Each family of inputs hides what another shows, so every one stands here with lengths around the edges of a page, empty
requests first and in the middle, several query tokens, shuffled and far page ids, numbers or NaN in what is not read.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..cases import Case, PagedCase
from ..cases.recipes import PagedRecipe, parse_id
from ..geometry import Geometry

KINDS = ("paged", "naive", "absorbed", "merge", "rope", "append")
OTHERS = {
    "naive": ("queries=3,cached=9", "queries=5,cached=150"),
    "absorbed": ("queries=3,cached=9", "queries=5,cached=150"),
    "rope": ("heads=3",),
    "append": ("tokens=21",),
}
LONG = (4200, 2100, 1100, 600)


def probes(sizes: str, *, block: int = 64, max_tokens: int = 4200, kinds: tuple[str, ...] = ("paged",)) -> list[str]:
    """Ids of cases of at most `max_tokens` keys. `sizes`: "geometry=NAME,dtype=bf16", or sizes that an id has."""
    made: list[str] = []
    fields = dict(item.split("=", 1) for item in sizes.split(","))
    common: dict[str, str] = {name: fields[name] for name in ("geometry", "dtype", "seed") if name in fields}
    for kind in kinds:
        if kind == "paged":
            made += [_id(kind, fields, rest) for rest in _paged(block, max_tokens, _row(fields))]
        elif kind == "merge":
            made.append(_id(kind, {n: v for n, v in common.items() if n != "geometry"}, "states=4,rows=5"))
        elif "geometry" in fields:
            made += [_id(kind, common, rest) for rest in OTHERS[kind]]
    return made


def _id(kind: str, fields: dict[str, str], rest: str) -> str:
    """The id of these fields; those of `rest` come before."""
    given = fields | dict(item.split("=", 1) for item in rest.split(","))
    return str(parse_id(f"{kind}:" + ",".join(f"{name}={value}" for name, value in given.items())))


def _row(fields: dict[str, str]) -> int:
    return int(fields["row"]) if "row" in fields else Geometry.preset(fields["geometry"]).latent_dim


def _paged(block: int, most: int, row: int) -> Iterator[str]:
    """The fields of paged cases beside their sizes."""
    P = block

    def lens(*wanted: int) -> str:
        return "+".join(str(n) for n in _within(wanted, most))

    edges = (P + 1, 0, 1, 3 * P - 1, 2 * P, 2)
    yield f"block={P},lens={lens(*edges)},tokens=3,unread=numbers"
    yield f"block={P},lens={lens(*edges)},tokens=3"
    yield f"block={P},lens={lens(0, 2 * P + 5, P - 1, P, 1, 4 * P + 3)},unread=numbers"
    yield f"block={P},lens={lens(0, 2 * P + 5, P - 1, P, 1)},empty_lse=0"
    yield f"block={P},lens={lens(2 * P + 9, P + 2, 5, 0)},tokens=2,causal=false,lse_base=2,unread=numbers"
    for inputs in ("peaked", "tailed", "rising", "onehot", "position", "flat"):
        yield f"block={P},lens={lens(2 * P + 7, 0, 3, 3 * P)},tokens=2,inputs={inputs},unread=numbers"
        yield f"block={P},lens={lens(2 * P + 7, 0, 3, 3 * P)},inputs={inputs}"
    yield f"block={P},lens={lens(2 * P + 1, P, 7)},pages=huge,unread=numbers"
    yield f"block={P},lens={lens(2 * P + 1, P, 7)},pages=strided,unread=numbers"
    yield f"block={P},lens={lens(8, 5, 9, 12)},tokens=8,unread=numbers"
    yield f"block=1,lens={lens(9, 4, 1, 0, 70)},unread=numbers"
    yield f"block=128,lens={lens(300, 70, 128)},unread=numbers"
    yield f"block=512,lens={lens(530, 513, 65)},unread=numbers"
    for layout in ("contiguous", "interleaved"):
        yield f"block={P},lens={lens(2 * P + 9, 0, 2, P)},tokens=2,shards=3,shard_layout={layout},unread=numbers"
    for n in LONG:
        if n <= most:
            yield f"block={P},lens={n}+{min(70, most - n)},unread=numbers"
            yield f"block={P},lens={n}+{min(70, most - n)},inputs=peaked,unread=numbers"
    yield f"block={P},lens={lens(2 * P + 9, 40)},scale=20,dtype=f16,unread=numbers"
    yield f"block={P},lens={lens(P + 9, 40)},tokens=2,value={row},unread=numbers"
    yield f"block={P},lens={lens(1, 1, 2, 1)},scale=30000,unread=numbers"


def _within(wanted: tuple[int, ...], most: int) -> list[int]:
    """The lengths that fit, those that do not made shorter."""
    found: list[int] = []
    for n in wanted:
        found.append(min(n, max(most - sum(found), 0)) if n else 0)
    return found


def probes_like(case: Case) -> list[str]:
    """Small probes of the sizes of `case`, with a few heads."""
    if not isinstance(case, PagedCase):
        return []
    H, D = case.q.shape[-2:]
    heads = H if H <= 8 else 8
    sizes = f"heads={heads},row={D},value={case.head_dim_v},scale={case.softmax_scale!r}"
    if case.id is not None:
        recipe = parse_id(case.id)
        if recipe.geometry is not None and isinstance(recipe, PagedRecipe):
            own = {"row": recipe.row, "value": recipe.value, "scale": recipe.scale}
            given = [f"{name}={value}" for name, value in own.items() if value is not None]
            sizes = ",".join([f"geometry={recipe.geometry}", f"heads={heads}", *given])
    if case.extensions():
        from .extended import extended, names_like

        return extended(sizes, names_like(case), block=16)
    return probes(sizes, block=min(case.kv_cache.shape[1], 64), max_tokens=1200)
