# SPDX-License-Identifier: Apache-2.0
"""MLA layers of Hugging Face transformers, run on the CPU with random weights, and what goes through them.

    run = record(Layer("deepseek_v3", YARN), dtype="f64", core="sdpa")
    run.steps[0].q_nope             what entered the attention core in the prefill
    run.steps[1].out                what left it in the decode step after it

A one-layer model runs a prefill and two decode steps over its own cache: positions, mask, rope, norms and cache
are all its own. To add a family, add a line to FAMILIES.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
from numpy.typing import NDArray

from mla_oracle import Geometry

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

Array = NDArray[Any]

DTYPES = {"f32": torch.float32, "f64": torch.float64}
STEPS = (7, 1, 3)  # new tokens of each call: a prefill, a decode step, several query tokens at once

DEEPSEEK_SIZES = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512}
GLM_SIZES = {"qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "kv_lora_rank": 512}
SMALL = {
    "hidden_size": 48,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "vocab_size": 8,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
# model_type -> what its config needs on top; the last two rotate nothing.
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {},
    "deepseek_v3": {},
    "deepseek_v32": {},
    "glm4_moe_lite": {},
    "glm_moe_dsa": {},
    "longcat_flash": {"num_hidden_layers": 2, "head_dim": 8},
    "minicpm3": {},
    "mistral4": {"max_position_embeddings": 2**20},
    "youtu": {},
    "kimi_linear": {"layer_types": ["full_attention"]},
    "glm5_next_text": {"layer_types": ["indexed_attention"], "qk_rope_head_dim": 0},
}
# DeepSeek-V3's own, and one that scales the rotated rows too.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
YARN_AMPLIFIED = YARN | {"mscale_all_dim": 0.707}


@dataclass(frozen=True)
class Layer:
    """An attention layer of the family `model_type`; `settings` are pairs of config keys and values."""

    model_type: str
    name: str = "small"
    settings: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.model_type}-{self.name}"


@dataclass
class Step:
    """What one call put through the layer, in the dtype of the model."""

    positions: Array  # [t_q]
    q_pe_before: Array  # [t_q, H, R], not yet rotated
    k_pe_before: Array  # [t_q, R], of the new tokens, not yet rotated
    q_nope: Array  # [t_q, H, P]
    q_pe: Array  # [t_q, H, R]
    c_kv: Array  # [t_kv, L], after its norm, cached tokens first
    k_pe: Array  # [t_kv, R]
    out: Array  # [t_q, H, V], before o_proj


@dataclass
class Run:
    """A layer, and its steps."""

    geometry: Geometry
    config: dict[str, Any]
    scaling: float
    w_uk: Array  # [H, P, L]
    w_uv: Array  # [H, V, L]
    steps: list[Step]


@functools.cache
def record(layer: Layer, *, dtype: str, core: str, start: int = 0) -> Run:
    """Run `layer` in `dtype` with the attention core "eager" or "sdpa"; its first token is at position `start`."""
    sizes = {**SMALL, **FAMILIES[layer.model_type], **layer.settings}
    config = transformers.AutoConfig.for_model(layer.model_type, **sizes)
    model = transformers.AutoModel.from_config(config, attn_implementation=core, dtype=DTYPES[dtype]).eval()
    draw = torch.Generator().manual_seed(20)
    for name, weight in model.named_parameters():
        fill(name, weight, draw)
    attention = next(module for module in model.modules() if hasattr(module, "kv_b_proj"))
    heads, nope, value = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim

    steps = []
    cache = transformers.DynamicCache(config=config)
    positions = torch.arange(start, start + sum(STEPS))
    for new in positions.split(STEPS):
        hidden = torch.randn(1, len(new), config.hidden_size, generator=draw, dtype=torch.float64)
        with torch.no_grad(), _hooked(attention) as seen:
            model(inputs_embeds=hidden.to(DTYPES[dtype]), position_ids=new[None], cache=cache)
        query, key = seen["query"], seen["key"]  # [H, t, P + R]
        q_before = seen["q"].unflatten(-1, (heads, -1))  # [t_q, H, P + R]
        steps.append(
            Step(
                positions=new.numpy(),
                q_pe_before=q_before[..., nope:].numpy(),
                k_pe_before=seen["kv"][:, config.kv_lora_rank :].numpy(),
                q_nope=query[..., :nope].transpose(0, 1).numpy(),
                q_pe=query[..., nope:].transpose(0, 1).numpy(),
                c_kv=seen["c_kv"].reshape(-1, config.kv_lora_rank).numpy(),
                k_pe=key[0, :, nope:].numpy(),
                out=seen["out"].unflatten(-1, (heads, -1)).numpy(),
            )
        )
    w_uk, w_uv = attention.kv_b_proj.weight.detach().unflatten(0, (heads, -1)).split([nope, value], dim=1)
    geometry = Geometry.from_hf_config(config.to_dict())
    return Run(geometry, config.to_dict(), attention.scaling, w_uk.numpy(), w_uv.numpy(), steps)


def fill(name: str, weight: torch.nn.Parameter, draw: torch.Generator) -> None:
    """Norms near 1, projections that keep the size of their input; queries three times larger: a peaked softmax."""
    values = torch.randn(weight.shape, generator=draw, dtype=torch.float64)
    if weight.ndim == 1:
        values = 1 + values / 5
    else:
        values *= (3 if "q_b_proj" in name or "q_proj" in name else 1) / weight.shape[-1] ** 0.5
    weight.data.copy_(values)


@contextmanager
def _hooked(attention: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Catch what passes: q and kv (projected), c_kv, query and key (of the core), out; the batch axis dropped."""
    seen: dict[str, torch.Tensor] = {}
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    get_interface = functions.get_interface

    def catching_interface(implementation: str, default: Any) -> Any:
        core = get_interface(implementation, default)

        def catching_core(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if module is attention:
                seen.update(query=query[0], key=key[0])
            return core(module, query, key, *args, **kwargs)

        return catching_core

    def before(name: str) -> Any:
        return lambda module, args: seen.__setitem__(name, args[0][0])

    def after(name: str) -> Any:
        return lambda module, args, output: seen.__setitem__(name, output[0])

    q_proj = getattr(attention, "q_proj", None) or attention.q_b_proj
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(functions, "get_interface", catching_interface))
        for handle in (
            q_proj.register_forward_hook(after("q")),
            attention.kv_a_proj_with_mqa.register_forward_hook(after("kv")),
            attention.kv_b_proj.register_forward_pre_hook(before("c_kv")),
            attention.o_proj.register_forward_pre_hook(before("out")),
        ):
            stack.callback(handle.remove)
        yield seen
