# SPDX-License-Identifier: Apache-2.0
"""Honest kernels by what they declare: for every preset, and some more, numpy kernels that round that and no more.

    spec, cache = "flashmla", "bf16"
    name, kernel, inputs = DECLARED[spec].draw(rng, cache)

None is the kernel that declares nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

import honest
import numpy as np
from honest import online

TILES = (1, 7, 16, 24, 48, 64, 100, 128, 500)
HALVES = ("bf16", "f16")
EVERY = ("f32", *HALVES)


class Declared(NamedTuple):
    """`draw(rng, cache)` gives a name, a kernel and what it rounds q and rows to."""

    caches: tuple[str, ...]  # dtypes of the cases it is for
    outs: tuple[str, ...]  # dtypes of out it is for; "cache": as the cache
    draw: Callable


def _tile(rng, tiles=TILES):
    return int(rng.choice(tiles))


def _split(rng):
    return int(rng.choice([1, 1, 2, 3, 5, 11]))


def _tensor_cores(rng):
    """Sums of f32, which hardware may truncate."""
    return {name: [honest.plain, honest.truncated][rng.integers(2)] for name in ("scores", "sums")}


def nothing(rng, cache):
    """Weights of the cache's dtype or of f32, any order, any place where the row sum is taken."""
    p = str(rng.choice([cache, "f32"]))
    tile, split = _tile(rng), _split(rng)
    cores = {} if cache == "f32" else _tensor_cores(rng)
    name, kernel = [
        ("two passes", honest.two_pass(p)),
        ("two passes, sum of rounded", honest.two_pass(p, sum_rounded=True)),
        ("eager", honest.eager(p)),
        (f"tiles of {tile}", online(tile, p, split=split, **cores)),
        (f"tiles of {tile}, base 2", online(tile, p, base2=True, split=split, **cores)),
        (f"tiles of {tile}, backward", online(tile, p, backward=True, sum_rounded=True, **cores)),
        (f"tiles of {tile}, lazy", online(tile, p, base2=True, lazy=5.5, split=split, **cores)),
        ("sequential", honest.sequential),
    ][rng.integers(8)]
    return f"{name}, p {p}", kernel, None


def flashmla(rng, cache):
    split = _split(rng)
    return f"split {split}", online(64, cache, base2=True, split=split, **_tensor_cores(rng)), None


def flashinfer(sum_rounded):
    def draw(rng, cache):
        tile, split = _tile(rng), _split(rng)
        how = sum_rounded if sum_rounded is not None else bool(rng.integers(2))
        kernel = online(tile, cache, base2=True, split=split, sum_rounded=how, partials=cache, **_tensor_cores(rng))
        return f"tiles of {tile}, split {split}", kernel, None

    return draw


def triton(rng, cache):
    tile, split = _tile(rng, (16, 32, 64)), _split(rng)
    exp = {"base2": bool(rng.integers(2))}
    return f"tiles of {tile}, split {split}", online(tile, cache, split=split, **exp, **_tensor_cores(rng)), None


def sglang_cpu(rng, cache):
    tile, split = _tile(rng), _split(rng)
    return f"tiles of {tile}, split {split}", online(tile, cache, split=split, exp=honest.exp_polynomial), None


def llama_cpu(rng, cache):
    return "sequential", honest.half_accumulator, "f16"


def llama_cuda(rng, cache):
    tile, split = _tile(rng, (16, 32, 64)), _split(rng)
    how = {"p_scale": 0.1250177, "scores": honest.truncated, "sums": honest.half}
    return f"tiles of {tile}, split {split}", online(tile, "f16", base2=True, split=split, **how), "f16"


def loops(rng, cache):
    return "sequential", honest.sequential, None


def two_passes(rng, cache):
    return "two passes", honest.two_pass(), None


def fast(rng, cache):
    tile, split = _tile(rng), _split(rng)
    p = str(rng.choice(["f32", "bf16x2"]))
    return f"tiles of {tile}, split {split}", online(tile, p, exp=honest.exp_polynomial, split=split), None


def framework(rng, cache):
    return "eager", honest.eager(cache, scores=cache), None


def eight_bits(rng, cache):
    tile, split = _tile(rng), _split(rng)
    return f"tiles of {tile}, split {split}", online(tile, "e4m3", p_scale=256.0, base2=True, split=split), None


def tf32(rng, cache):
    tile = _tile(rng)
    return f"tiles of {tile}", online(tile, "tf32", base2=True, **_tensor_cores(rng)), "tf32"


def narrow_weights(p):
    def draw(rng, cache):
        tile, split = _tile(rng), _split(rng)
        return f"tiles of {tile}, split {split}", online(tile, p, split=split, sum_rounded=True), None

    return draw


def q_scaled(rng, cache):
    tile, split = _tile(rng), _split(rng)
    kernel = honest.q_scaled(online(tile, cache, base2=True, split=split, **_tensor_cores(rng)), cache)
    return f"tiles of {tile}, split {split}", kernel, None


def narrow_partials(rng, cache):
    tile = _tile(rng)
    return f"tiles of {tile}, split 4", online(tile, cache, split=4, partials="bf16"), None


DECLARED = {
    None: Declared(EVERY, ("f32", "cache"), nothing),
    "flashmla": Declared(HALVES, ("cache",), flashmla),
    "flashinfer-fa2": Declared(HALVES, ("cache",), flashinfer(True)),
    "flashinfer-fa3": Declared(HALVES, ("cache",), flashinfer(None)),
    "vllm-triton": Declared(HALVES, ("cache",), triton),
    "sglang-triton": Declared(HALVES, ("f32", "cache"), triton),
    "sglang-cpu": Declared(HALVES, ("cache",), sglang_cpu),
    "llama.cpp-cpu": Declared(("f32", "f16"), ("f32",), llama_cpu),
    "llama.cpp-cuda": Declared(("f32", "f16"), ("f32",), llama_cuda),
    "vllm.cpp": Declared(EVERY, ("f32", "cache"), loops),
    "memra": Declared(("f32",), ("f32",), two_passes),
    "strict": Declared(EVERY, ("f32",), loops),
    "fast": Declared(EVERY, ("f32", "cache"), fast),
    "torch-eager": Declared(EVERY, ("cache",), framework),
    "p=e4m3,p_scale=256,exp=exp2": Declared(HALVES, ("f32", "cache"), eight_bits),
    "query=tf32,cache=tf32,p=tf32,score_accumulator=mma,value_accumulator=mma": Declared(("f32",), ("f32",), tf32),
    "p=f16,row_sum=p": Declared(("f32",), ("f32",), narrow_weights("f16")),
    "partials=bf16,splits=4": Declared(EVERY, ("f32", "cache"), narrow_partials),
    "scaled=q": Declared(HALVES, ("f32", "cache"), q_scaled),
}


def stored(rng, spec, cache):
    """A dtype of out that `spec` is for."""
    out = str(np.asarray(DECLARED[spec].outs)[rng.integers(len(DECLARED[spec].outs))])
    return cache if out == "cache" else out
