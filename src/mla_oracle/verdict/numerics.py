# SPDX-License-Identifier: Apache-2.0
"""Numerics: what a kernel declares it rounds, and where. Presets of known kernels are in kernels.py.

    resolve("flashmla", case, {"out": "bf16", "lse": "f32"})        a preset
    resolve("p=e4m3,p_scale=256", case, {"out": "bf16"})            fields; what is not named is inferred
    resolve(None, case, {"out": "bf16"})                            all inferred from the dtypes of the case and results

A score is q . k * scale, a weight exp(score - base), and an output sum(weight * value) / sum(weight): a field for every
number on that way which a kernel may hold in fewer bits than f64. "any" and None leave a choice to the kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import dtypes
from ..canonical.caches import held_as
from ..cases import Case, DenseCase, PagedCase
from ..errors import InputError

SOFTCAP = 2.0**10  # up to which an absolute error of tanh is taken for honest
ROUNDED = ("f32", "bf16x2", "tf32", "bf16", "f16", "e4m3")  # bf16x2: the sum of two numbers of bf16
CHOICES: dict[str, tuple[str, ...]] = {
    "query": ROUNDED,
    "cache": ROUNDED,
    "scaled": ("scores", "q"),
    "score_accumulator": ("f32", "mma", "f16", "mma-f16"),
    "scores": ("f32", "bf16", "f16"),
    "tanh": ("f32", "sigmoid", "approx"),
    "p": ROUNDED,
    "p_base": ("max", "stale", "normalised", "any"),
    "row_sum": ("f32", "p", "any"),
    "value_accumulator": ("f32", "mma", "f16", "mma-f16"),
    "out": ("f64", "f32", "bf16", "f16"),
    "lse": ("f64", "f32", "bf16", "f16"),
    "partials": ("f32", "bf16", "f16"),
    "exp": ("exp", "exp2", "u20", "any"),
}


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """The roundings of one kernel. Every field is printed by `str` in the form `resolve` reads."""

    query: str  # the query as it is multiplied
    cache: str  # the latent row as it is multiplied, as key and as value; of a format, what its reader makes of it
    scaled: str  # what the softmax scale multiplies: scores, or q, which is rounded to `query` once more
    score_accumulator: str  # f32, f16: rounded to nearest, any order; mma: f32 truncated every 16 products; mma-f16
    scores: str  # the scores, before and after they are scaled, and after every step of a softcap and a bias
    tanh: str  # f32, approx: within 2^-22, 2^-11 of itself; sigmoid: within 2^-22 of 1, as 2 sigmoid(2 x) - 1
    p: str  # the weights as they are multiplied with the values
    p_scale: float  # the weight of the largest score, before it is rounded
    p_base: str  # weights are relative to a running maximum, to one renewed lazily (stale), or divided by their sum
    row_sum: str  # f32: of the weights before they are rounded to p; p: after
    value_accumulator: str  # as score_accumulator
    out: str
    lse: str
    splits: int | None  # runs of keys computed apart and merged by their LSE; None: any number
    partials: str  # the outputs of splits
    exp: str  # exp: within 2 ULP; exp2: of a score times log2(e), within 2^-22; u20: within 20 ULP
    tile: int | None  # keys between two looks at the maximum; None: any number
    origin: str = dataclasses.field(default="declared", compare=False)

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise InputError(f"numerics {name} is {getattr(self, name)!r}, expected {' or '.join(choices)}")
        for name in ("splits", "tile"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < 2**31:
                raise InputError(f"numerics {name} is {value}, expected 1 or more")
        if not 0 < self.p_scale <= 2.0**15:
            raise InputError(f"numerics p_scale is {self.p_scale}, expected a number above 0, at most 32768")

    def __str__(self) -> str:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "origin"}
        return ",".join(f"{name}={'any' if value is None else value}" for name, value in fields.items())


def infer(case: Case, results: Mapping[str, str]) -> Numerics:
    """What a kernel for `case` that returns results of these dtypes (by name) is taken to round, if it says nothing.

    It multiplies what the case stores and accumulates in f32, on tensor cores where its weights have 16 bits: as the
    cache has, or over rows of 8 bits as the query has, or as out has, if any. A query of more bits than the cache is
    rounded to meet it. The weights' base, their sum, the function exp, tiles and splits are free.

    The rows of a format are multiplied as its reader rounds them, where the query has that dtype or e4m3; else, and
    where the reader rounds nothing (the kernel folds the scale into others), as they are, which is told as f32.

    A tanh may be made of a sigmoid where that costs little, with softcaps up to 2^10 (those in use are 15 to 50):
    beyond, its rounding is larger than what a case can be judged by, and has to be declared.
    """
    stored = _stored(case)
    query, cache = (name if name in ROUNDED else "f32" for name in stored)
    packed = isinstance(case, PagedCase) and case.cache_format is not None
    if packed and query not in (cache, "e4m3"):
        cache = "f32"
    query = cache if query == "f32" and cache != "e4m3" else query
    out = results.get("out", "f32")
    halves = (cache, query if packed or cache == "e4m3" else out, out)
    p = next((name for name in halves if name in ("bf16", "f16")), "f32")
    sums = "f32" if p == "f32" else "mma"
    shards = isinstance(case, PagedCase) and case.shards > 1
    partials = results.get("partial_out", out) if shards else "f32"
    return Numerics(
        query=query,
        cache=cache,
        scaled="scores",
        score_accumulator=sums,
        scores="f32",
        tanh="sigmoid" if isinstance(case, PagedCase) and 0 < (case.softcap or 0) <= SOFTCAP else "f32",
        p=p,
        p_scale=1.0,
        p_base="any",
        row_sum="any",
        value_accumulator=sums,
        out=out,
        lse=results.get("lse", "f32"),
        splits=None,
        partials=partials if partials in CHOICES["partials"] else "f32",
        exp="any",
        tile=None,
        origin="inferred from the dtypes",
    )


def resolve(given: Numerics | str | Mapping[str, Any] | None, case: Case, results: Mapping[str, str]) -> Numerics:
    """The numerics `given` for `case`; fields that are not given are inferred. Raises InputError.

    A string is a preset, `field=value,...`, or a preset with fields after it. Results of fewer bits than the arrays
    that hold them were widened, as to f32 for numpy, and are judged as what they were; of more bits they cannot be.
    """
    if given is None:
        return infer(case, results)
    if isinstance(given, Numerics):
        return given
    if isinstance(given, str):
        given = parse(given)
    fields = {name: value for name, value in given.items() if name != "origin"}
    known = [f.name for f in dataclasses.fields(Numerics) if f.name != "origin"]
    for name in fields:
        if name not in known:
            raise InputError(f"numerics has {name!r}, expected {', '.join(known)}")
    inferred = infer(case, {**results, **_stored_as(fields, results)})
    own = {"out": inferred.out, "query": fields.get("query", inferred.query)}
    fields |= {name: own[value] for name, value in fields.items() if value in own}
    origin = given.get("origin", "declared " + ",".join(f"{name}={value}" for name, value in fields.items()))
    return dataclasses.replace(inferred, **fields, origin=f"{origin}, the rest inferred from the dtypes")


def _stored_as(fields: Mapping[str, Any], results: Mapping[str, str]) -> dict[str, str]:
    """The dtypes of results that `fields` give. Raises InputError where the array that is there has fewer bits."""
    from .noise import UNIT

    given = {name: fields[name] for name in ("out", "lse") if name in fields}
    for name, kind in given.items():
        if kind not in CHOICES[name]:
            raise InputError(f"numerics {name} is {kind!r}, expected {' or '.join(CHOICES[name])}")
        held = results.get(name, kind)
        if UNIT[held] > UNIT[kind]:
            raise InputError(f"numerics {name} is {kind}, but {name} holds {held}, expected {held} or none")
    return given


def parse(text: str) -> dict[str, Any]:
    """The fields that `text` names: a preset, `field=value,...`, or both. Raises InputError."""
    from .kernels import KERNELS

    fields: dict[str, Any] = {}
    said = []
    for item in text.split(","):
        name, equals, value = item.partition("=")
        if not equals:
            if name not in KERNELS:
                raise InputError(f"numerics is {name!r}, expected field=value or one of {', '.join(KERNELS)}")
            fields |= KERNELS[name].rounds
            said.append(f"preset {name}")
            continue
        if f"declared {name}" in (one.partition("=")[0] for one in said):
            raise InputError(f"numerics gives {name} twice, expected it once")
        said.append(f"declared {item}")
        fields[name] = _read(name, value)
    return {**fields, "origin": ", ".join(said)}


def _read(name: str, value: str) -> Any:
    if name in ("splits", "tile"):
        if value == "any":
            return None
        if not (value.isascii() and value.isdigit()) or len(value) > 9:
            raise InputError(f"numerics {name} is {value!r}, expected an integer or any")
        return int(value)
    if name == "p_scale":
        try:
            return float(value)
        except ValueError:
            raise InputError(f"numerics p_scale is {value!r}, expected a number") from None
    return value


def _stored(case: Case) -> tuple[str, str]:
    """The dtypes of the query and of the cached rows."""
    match case:
        case PagedCase():
            return dtypes.name_of(case.q.dtype), held_as(case)
        case DenseCase():
            return dtypes.name_of(case.q_nope.dtype), dtypes.name_of(case.c_kv.dtype)
    raise InputError(f"a {case.kind} case has no numerics, expected a paged, naive or absorbed one")
