# SPDX-License-Identifier: Apache-2.0
"""Others' decode beside ours on the same pages, where they are installed: torch, Triton, FlashInfer, FlashMLA.

A peer that is absent, or fails, is told as such and decides nothing; so does `away`, how far its out is from ours:
the RMS of the difference over that of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from mla_oracle.gpu import forms, paged_mma
from mla_oracle.gpu.check import clock
from mla_oracle.gpu.check.part import Bench
from mla_oracle.gpu.check.report import Finding
from mla_oracle.gpu.device import Device

L, R, BLOCK, SCALE = 512, 64, 64, 0.0417
SIZES = (  # B, H, length
    (1, 128, 32768), (32, 16, 4096), (128, 16, 4096), (128, 64, 4096), (128, 128, 4096), (32, 128, 1024),
)  # fmt: skip
RESERVE = 3.0
PEERS = {"torch SDPA": "torch", "Triton": "triton", "FlashInfer": "flashinfer", "FlashMLA": "flash_mla"}
Decode = Callable[[int], Any]


def findings(bench: Bench) -> Iterator[Finding]:
    if bench.small:
        yield {"name": "peers", "ok": None, "reason": "left out: they need a GPU"}
        return
    absent = [peer for peer, module in PEERS.items() if find_spec(module) is None]
    yield from ({"name": peer, "ok": None, "reason": "absent"} for peer in absent)
    if "torch SDPA" in absent:
        return
    assert isinstance(bench.machine, Device)
    limits = bench.machine.attribute("L2_CACHE_SIZE"), bench.machine.attribute("MULTIPROCESSOR_COUNT")
    failed: set[str] = set()
    for sizes in SIZES:
        problem = Problem(bench.machine, *sizes, *limits)
        for name, make in MAKERS.items():
            if name in absent or name in failed:
                continue
            if bench.left < RESERVE:
                yield {"name": "peers", "ok": None, "reason": f"no time was left for {name} at {sizes}"}
                return
            try:
                yield _timed(bench, problem, name, make)
            except Exception as error:  # whatever a stranger raises: it is told, and the next one has its turn
                failed.add(name)
                line = " ".join(f"{type(error).__name__}: {error}".split())
                yield {"name": name, "ok": None, "reason": f"failed: {line[:200]}"}


class Problem:
    """Torch's tensors of a paged problem, as many of them as L2 does not hold: q, tables [copy], one pool of pages."""

    def __init__(
        self, device: Device | None, B: int, H: int, length: int, l2: int, multiprocessors: int, where: str = "cuda"
    ) -> None:
        import torch

        self.device, self.B, self.H, self.length, self.multiprocessors = device, B, H, length, multiprocessors
        blocks = length // BLOCK
        copies = max(1, -(-2 * l2 // (2 * B * length * (L + R))))
        self.cache = torch.empty(copies * B * blocks, BLOCK, L + R, dtype=torch.bfloat16, device=where).normal_()
        self.q = [torch.randn(B, H, L + R, device=where).to(torch.bfloat16) for _ in range(copies)]
        order = torch.randperm(copies * B * blocks, device=where).to(torch.int32).reshape(copies, B, blocks)
        self.tables = [order[copy].contiguous() for copy in range(copies)]
        self.lengths = torch.full((B,), length, dtype=torch.int32, device=where)

    def of(self, index: int) -> tuple[Any, Any]:
        copy = index % len(self.q)
        return self.q[copy], self.tables[copy]


def _timed(bench: Bench, problem: Problem, name: str, make: Callable[[Problem], Decode]) -> Finding:
    run = make(problem)
    ours = _numpy(problem, run_ours(problem)(0))
    away = _numpy(problem, run(0)).reshape(ours.shape) - ours
    taken = clock.microseconds(bench, run)
    B, H, n = problem.B, problem.H, problem.length
    return {
        "name": f"{name} B={B} H={H} n={n}",
        "ok": None,
        "away": float(np.sqrt((away**2).mean() / (ours**2).mean())),
        "microseconds": round(taken, 2),
        "tflops": 2e-6 * B * H * n * (2 * L + R) / taken,
        "gbs": 2e-3 * B * ((n + H) * (L + R) + 2 * H * L) / taken,
    }


def _numpy(problem: Problem, out: Any) -> Any:
    assert problem.device is not None
    problem.device.synchronize()
    return out.float().cpu().numpy() if hasattr(out, "cpu") else problem.device.download(out)


def run_ours(p: Problem) -> Decode:
    device = p.device
    assert device is not None
    cache, lengths = device.upload(p.cache), device.upload(p.lengths)
    inputs = [(device.upload(q[:, None]), device.upload(table)) for q, table in zip(p.q, p.tables, strict=True)]
    keys = paged_mma.split_keys(p.B, p.H, p.length, device.arch, p.multiprocessors, L + R)
    out, lse = device.empty((p.B, 1, p.H, L), np.float32), device.empty((p.B, 1, p.H), np.float32)

    def run(index: int) -> Any:
        q, table = inputs[index % len(inputs)]
        forms.decode_paged(
            device, q, cache, table, lengths, SCALE, True, 1.0, -np.inf, out, lse,
            longest=p.length, split_keys=keys,
        )  # fmt: skip
        return out

    return run


def torch_sdpa(p: Problem) -> Decode:
    """The rows gathered, then attention of one head with H queries: what is the same for all heads is read once."""
    import torch

    def run(index: int) -> Any:
        q, table = p.of(index)
        rows = p.cache[table.long()].view(p.B, 1, p.length, L + R)
        return torch.nn.functional.scaled_dot_product_attention(q[:, None], rows, rows[..., :L], scale=SCALE)

    return run


def triton(p: Problem) -> Decode:
    decode = import_module("mla_oracle.gpu.check.triton_decode").decode
    return lambda index: decode(*p.of(index), p.cache, p.lengths, SCALE, L, p.multiprocessors)


def flashinfer(p: Problem) -> Decode:
    import torch

    made = import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper
    rows = torch.arange(p.B + 1, dtype=torch.int32, device="cuda")
    wrappers = []
    for table in p.tables:
        wrapper = made(torch.empty(128 << 20, dtype=torch.int8, device="cuda"))
        pages = rows * (p.length // BLOCK)
        types = torch.bfloat16, torch.bfloat16
        wrapper.plan(rows, pages, table.flatten(), p.lengths, p.H, L, R, BLOCK, False, SCALE, *types)
        wrappers.append(wrapper)
    latent, rope = p.cache[..., :L], p.cache[..., L:]

    def run(index: int) -> Any:
        q, _ = p.of(index)
        return wrappers[index % len(wrappers)].run(q[..., :L], q[..., L:], latent, rope)

    return run


def flash_mla(p: Problem) -> Decode:
    """By either of its interfaces: the plan made beforehand, or within the first call."""
    module = import_module("flash_mla")
    try:
        plan = module.get_mla_metadata(p.lengths, p.H, 1)
    except TypeError:
        plan = module.get_mla_metadata()
    cache = p.cache[:, :, None]

    def run(index: int) -> Any:
        q, table = p.of(index)
        out, _ = module.flash_mla_with_kvcache(
            q[:, None], cache, table, p.lengths, L, *plan, softmax_scale=SCALE, causal=False
        )
        return out

    return run


MAKERS: dict[str, Callable[[Problem], Decode]] = {
    "ours": run_ours,
    "torch SDPA": torch_sdpa,
    "Triton": triton,
    "FlashInfer": flashinfer,
    "FlashMLA": flash_mla,
}
