# SPDX-License-Identifier: Apache-2.0
"""Prove this installation: the published bits, and the truth against closed forms."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .arrays import Array
from .cases import golden
from .cases.inputs import generate
from .oracle import expected


def selftest(say: Callable[[str], None]) -> dict[str, Any]:
    """Run every proof, `say` a line for each, and return {"passed", "proofs": how many, "failed": [names]}."""
    count, failed = 0, []
    for name, holds in _proofs():
        say(f"{'ok  ' if holds else 'FAIL'} {name}")
        count += 1
        if not holds:
            failed.append(name)
    say(f"{count - len(failed)} of {count} proofs hold")
    return {"passed": not failed, "proofs": count, "failed": failed}


def digest(*arrays: Array) -> str:
    """sha256 of the arrays' bytes, one after the other: its first 16 hex digits."""
    sha = hashlib.sha256()
    for array in arrays:
        sha.update(array.tobytes())
    return sha.hexdigest()[:16]


def _proofs() -> Iterator[tuple[str, bool]]:
    for case_id, inputs, *outs in golden.DENSE:
        for kind, bits in zip(("naive", "absorbed"), outs, strict=True):
            case = generate(f"{kind}:{case_id}")
            out = expected(case, precision="f32")["out"]
            yield f"published bits of {case.id}", (digest(*case.tensors().values()), digest(out)) == (inputs, bits)
    for case_id, *published in golden.PAGED:
        case = generate(f"paged:{case_id}")
        state = expected(case, precision="f32")
        arrays = (case.tensors()["q"], state["out"], state["lse"])
        yield f"published bits of {case.id}", [digest(array) for array in arrays] == published

    # q = 0: every visible token weighs the same, so the LSE counts them and the output is their mean.
    case = generate("paged:heads=3,row=40,value=32,lens=0+1+63+64+65,block=16,tokens=2,scale=0.5,inputs=flat")
    state = expected(case, precision="f64")
    seen = np.maximum(case.tensors()["seq_lens"][:, None] + np.array([-1, 0]), 0)
    with np.errstate(divide="ignore"):
        yield "lse of a zero query is log(visible tokens)", bool(
            np.allclose(state["lse"], np.log(seen)[..., None], rtol=4 * 2.0**-53, atol=0)
        )
    huge = generate("paged:heads=2,row=40,value=32,lens=7+130,block=16,scale=0.5,pages=huge")
    plain = generate("paged:heads=2,row=40,value=32,lens=7+130,block=16,scale=0.5")
    yield "the place of a page changes no bit", digest(*expected(huge).values()) == digest(*expected(plain).values())
    whole = generate("paged:heads=2,row=40,value=32,lens=7+130,block=16,scale=0.5,shards=3,shard_layout=interleaved")
    merged, single = expected(whole)["out"], expected(plain)["out"]
    yield "merged shards equal the whole", float(np.abs(merged - single).max()) <= 64 * 2.0**-53 * math.sqrt(130)
