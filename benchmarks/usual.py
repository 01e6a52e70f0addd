# SPDX-License-Identifier: Apache-2.0
"""The usual inputs of each rule of mla_oracle.verdict.rules, where it comes from: distribution, lengths, dtype, layout.

    for setting in USUAL["flashmla"].settings(): setting.case

The shapes are theirs but for heads and batch, of which a few stand for many. What nobody may read holds what their test
leaves there. Sources are the test files; numbers are drawn by numpy, from a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np

from mla_oracle.cases import PagedCase
from mla_oracle.cases.inputs import generate

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
Draw = Callable[..., np.ndarray]


class Setting(NamedTuple):
    """One case; `out` is the dtype a kernel returns, `project` what the test makes of it before it compares."""

    case: PagedCase
    out: str
    project: np.ndarray | None = None  # [H, V, P]

    def seen(self, name: str, x: np.ndarray) -> np.ndarray:
        """What is compared, f64, of a result."""
        if name != "out" or self.project is None:
            return x
        return np.einsum("bthv,hvp->bthp", x, self.project)


class Usual(NamedTuple):
    """`rule` and `inputs` in words, and the source of the inputs."""

    rule: str
    inputs: str
    source: str
    settings: Callable[[], Iterator[Setting]]


def paged(
    lens: tuple[int, ...], heads: int, tokens: int, scale: float, draw: Draw, *, dtype: str, block: int = 64,
    shuffled: bool = False, unread: float | None = np.nan, spare: int = 0, causal: bool = True, lse_base: str = "e",
    q: np.ndarray | None = None, D: int = 576, V: int = 512, seed: int = 1,
) -> PagedCase:  # fmt: skip
    """A case whose q and rows are draw(rng, shape). `unread`: what slots past a length hold; None: drawn as others.

    `spare`: what the table holds past a length.
    """
    rng = np.random.default_rng(seed)
    pages = [-(-n // block) for n in lens]
    ids = rng.permutation(sum(pages)) if shuffled else np.arange(sum(pages))
    table = np.full((len(lens), max(pages)), spare, np.int32)
    cache = draw(rng, (sum(pages), block, D)).astype(np.float32)
    for b, first in enumerate(np.cumsum([0, *pages[:-1]])):
        table[b, : pages[b]] = ids[first : first + pages[b]]
        if unread is not None and lens[b] % block:
            cache[table[b, pages[b] - 1], lens[b] % block :] = unread
    query = draw(rng, (len(lens), tokens, heads, D)).astype(np.float32) if q is None else q
    return PagedCase(
        q=query.astype(DTYPES[dtype]), kv_cache=cache.astype(DTYPES[dtype]), block_table=table,
        seq_lens=np.array(lens, np.int32), softmax_scale=scale, head_dim_v=V, causal=causal, lse_base=lse_base,
    )  # fmt: skip


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape)


def tenth(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.clip(rng.standard_normal(shape) / 10, -1, 1)


def unit(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.random(shape)


def both_signs(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.uniform(-1, 1, shape)


def eight_bits(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def of_vllm_cpp() -> Iterator[Setting]:
    for lens, heads, seed in (("1+15+16+17+255+256+257+300", 16, 23), ("1+33+200", 16, 71)):
        yield Setting(generate(
            f"paged:heads={heads},row=576,value=512,block=16,scale=0.06623442471027374,inputs=lcg,pages=descending,"
            f"lens={lens},seed={seed},tokens=1"
        ), "f32")  # fmt: skip


def of_kernelbench() -> Iterator[Setting]:
    yield Setting(paged((512, 512), 4, 4, 576**-0.5, unit, dtype="f32", causal=False), "f32")


def of_flashinfer() -> Iterator[Setting]:
    how = {"dtype": "f16", "lse_base": "2"}
    yield Setting(paged((1, 33, 514), 16, 1, 192**-0.5, normal, block=1, **how), "f16")
    yield Setting(paged((11, 79, 2743), 16, 3, 192**-0.5, normal, block=1, **how), "f16")
    yield Setting(paged((75, 197), 16, 7, 192**-0.5, normal, block=16, unread=np.nan, **how), "f16")
    yield Setting(paged((75, 197), 16, 7, 192**-0.5, normal, block=32, causal=False, **how), "f16")


def of_flashmla() -> Iterator[Setting]:
    how = {"dtype": "bf16", "spare": 2147480000}
    yield Setting(paged((20, 140), 9, 1, 576**-0.5, tenth, **how), "bf16")
    yield Setting(paged((4096, 3811), 9, 2, 576**-0.5, tenth, **how), "bf16")
    yield Setting(paged((2048, 0, 4096, 0), 9, 1, 576**-0.5, tenth, causal=False, **how), "bf16")


def of_llama_cpp() -> Iterator[Setting]:
    for n, tokens in ((113, 1), (512, 3), (1024, 32)):
        how = {"dtype": "f16", "block": n, "causal": False}
        yield Setting(paged((n,), 4, tokens, 576**-0.5, both_signs, **how), "f32")


def of_xqa() -> Iterator[Setting]:
    for block, scale in ((32, 1.0), (64, 0.5)):
        how = {"dtype": "bf16", "block": block, "shuffled": True, "unread": None}
        yield Setting(paged((513, 77, 1024), 16, 1, scale * 192**-0.5, eight_bits, **how), "bf16")


def of_gpu_mode() -> Iterator[Setting]:
    yield Setting(paged((1024,) * 2, 16, 4, 576**-0.5, normal, dtype="bf16", block=1), "bf16")
    yield Setting(paged((8192,), 16, 1, 576**-0.5, normal, dtype="bf16", block=1), "bf16")


def of_vllm() -> Iterator[Setting]:
    """The query absorbed, the output projected, by weights of unit normals."""
    rng = np.random.default_rng(42)
    H = 16
    w_uk, w_uv = rng.standard_normal((H, 128, 512)), rng.standard_normal((H, 512, 128))
    for lens, tokens in (((32, 40), 1), ((128, 256, 512, 1024), 1), ((128, 512, 1024), 4)):
        nope = np.einsum("bthp,hpl->bthl", rng.standard_normal((len(lens), tokens, H, 128)), w_uk)
        q = np.concatenate([nope, rng.standard_normal((len(lens), tokens, H, 64))], -1)
        how = {"dtype": "bf16", "block": 16, "shuffled": True, "unread": 0.0}
        yield Setting(paged(lens, H, tokens, 576**-0.5, normal, q=q, **how), "bf16", w_uv)


USUAL = {
    "seed": Usual("2e-4 of the largest (vllm.cpp)", "uniform ±1, 1 to 300 keys, f32",
                  "vllm.cpp tests/vt/test_ops_mla_attn.cpp, MakeCase", of_vllm_cpp),
    "allclose-1e-2": Usual("1e-2, 1e-2 (KernelBench)", "uniform 0 to 1, 512 keys, f32",
                           "KernelBench level1/97_ScaledDotProductAttention.py", of_kernelbench),
    "allclose-1e-3": Usual("1e-3, 1e-3 (FlashInfer MLA)", "normal, 1 to 2743 keys, f16, pages in order",
                           "FlashInfer tests/attention/test_deepseek_mla.py", of_flashinfer),
    "flashmla": Usual("8e-4 or 1.6 %, cosine 5e-6, LSE (FlashMLA)", "normal / 10, 20 to 4096 keys, bf16",
                      "FlashMLA tests/test_flash_mla_dense_decoding.py", of_flashmla),
    "nmse": Usual("NMSE 5e-4 (llama.cpp)", "uniform ±1, 113 to 1024 keys, f16, not paged",
                  "llama.cpp tests/test-backend-ops.cpp, test_flash_attn_ext", of_llama_cpp),
    "95-percent": Usual("95 % within 5e-2 (FlashInfer XQA)", "normal of fp8, 77 to 1024 keys",
                        "FlashInfer tests/attention/test_xqa_mla_batch_decode.py", of_xqa),
    "gpu-mode": Usual("2e-2, 8e-3 (gpu-mode)", "normal, 1024 and 8192 keys, bf16, not paged",
                      "gpu-mode reference-kernels problems/amd_202602/mixed-mla/reference.py", of_gpu_mode),
    "vllm-backends": Usual("1e-2, 5e-1 (vLLM backends)", "normal, absorbed and projected, 32 to 1024 keys, bf16",
                           "vLLM tests/v1/attention/test_mla_backends.py", of_vllm),
}  # fmt: skip
