# SPDX-License-Identifier: Apache-2.0
"""MLA layers of Hugging Face transformers, every submodule hooked: what goes in, and what each stage made of it.

    layer = dump(Layer("deepseek_v3", "yarn", {"rope_parameters": YARN}), dtype="bf16")
    layer.calls[1].inputs           hidden_states, positions, and what was cached before
    layer.calls[1].stages           by the names of mla_oracle.layer.STAGES, as the model stored them
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from hooked_mla import FAMILIES, SMALL, STEPS, Layer, fill, torch, transformers

from mla_oracle.arrays import as_array

DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16}
# What a layer with an indexer needs on top: more tokens are seen than are chosen.
INDEXED = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 4}
POOLED = {"index_kpool": 2, "index_topk": 4}


@dataclass
class Call:
    inputs: dict[str, Any]
    stages: dict[str, Any]


@dataclass
class Dumped:
    config: dict[str, Any]
    weights: dict[str, Any]  # by the names of the checkpoint, without the prefix
    calls: list[Call]


def arrays(tensor: torch.Tensor) -> np.ndarray:
    return np.array(as_array("a tensor", tensor.detach().contiguous()))


@functools.cache
def dump(layer: Layer, *, dtype: str, core: str = "eager", start: int = 0) -> Dumped:
    """Run `layer` over a prefill and two more calls; its first token is at position `start`."""
    sizes = {**SMALL, **FAMILIES[layer.model_type], **layer.settings}
    config = transformers.AutoConfig.for_model(layer.model_type, **sizes)
    model = transformers.AutoModel.from_config(config, attn_implementation=core, dtype=DTYPES[dtype]).eval()
    draw = torch.Generator().manual_seed(20)
    for name, weight in model.named_parameters():
        fill(name, weight, draw)
    attention = next(module for module in model.modules() if hasattr(module, "kv_b_proj"))
    weights = {name: arrays(weight) for name, weight in attention.named_parameters()}
    cache = transformers.DynamicCache(config=config)
    calls, past = [], {}
    positions = torch.arange(start, start + sum(STEPS))
    for new in positions.split(STEPS):
        hidden = torch.randn(1, len(new), config.hidden_size, generator=draw, dtype=torch.float64)
        with torch.no_grad(), _Hooks(attention, config, cache) as hooks:
            model(inputs_embeds=hidden.to(DTYPES[dtype]), position_ids=new[None], cache=cache)
        inputs, stages = hooks.read()
        inputs |= {"positions": new.numpy(), **past}
        latent = config.kv_lora_rank
        past = {"past_c_kv": stages["kv_cache"][:, :latent], "past_k_pe": stages["kv_cache"][:, latent:]}
        for key in ("index_k", "index_gate"):
            if key in stages:
                before = [inputs[f"past_{key}"]] if f"past_{key}" in inputs else []
                past[f"past_{key}"] = np.concatenate([*before, stages[key]])
        calls.append(Call(inputs, stages))
    return Dumped(config.to_dict(), weights, calls)


class _Hooks(ExitStack):
    """Catches what passes through one attention module."""

    def __init__(self, attention: Any, config: Any, cache: Any) -> None:
        super().__init__()
        self.attention, self.config, self.cache = attention, config, cache
        self.seen: dict[str, Any] = {}

    def __enter__(self) -> _Hooks:
        super().__enter__()
        functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
        get_interface = functions.get_interface

        def catching_interface(implementation: str, default: Any) -> Any:
            core = get_interface(implementation, default)

            def catching_core(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
                found = core(module, query, key, value, *args, **kwargs)
                if module is self.attention:
                    self.seen |= {"query": query[0], "key": key[0], "value": value[0]}
                    if found[1] is not None:
                        self.seen["p"] = found[1][0]
                return found

            return catching_core

        self.enter_context(mock.patch.object(functions, "get_interface", catching_interface))
        self._keep(self.attention.register_forward_pre_hook(self._hidden, with_kwargs=True))
        after = {
            "q_a_proj": "q_a", "q_a_layernorm": "q_a_norm", "q_b_proj": "q", "q_proj": "q",
            "kv_a_proj_with_mqa": "kv_a", "kv_a_layernorm": "kv_a_norm", "o_proj": "out",
        }  # fmt: skip
        for name, stage in after.items():
            module = getattr(self.attention, name, None)
            if module is not None:
                self._keep(module.register_forward_hook(self._after(stage)))
        self._keep(self.attention.kv_b_proj.register_forward_pre_hook(self._before("latents")))
        self._keep(self.attention.o_proj.register_forward_pre_hook(self._before("attn")))
        indexer = getattr(self.attention, "indexer", None)
        if indexer is not None:
            self._keep(indexer.register_forward_hook(self._after("topk")))
            self._keep(indexer.weights_proj.register_forward_hook(self._after("weights_proj")))
            update = self.cache.update_indexer

            def catching_update(keys: Any, layer: int) -> Any:
                self.seen["index_new"] = keys[0]
                return update(keys, layer)

            self.enter_context(mock.patch.object(self.cache, "update_indexer", catching_update))
        return self

    def _keep(self, handle: Any) -> None:
        self.callback(handle.remove)

    def _hidden(self, module: Any, args: Any, kwargs: Any) -> None:
        self.seen["hidden_states"] = (args[0] if args else kwargs["hidden_states"])[0]

    def _before(self, name: str) -> Any:
        return lambda module, args: self.seen.__setitem__(name, args[0][0])

    def _after(self, name: str) -> Any:
        return lambda module, args, output: self.seen.__setitem__(name, output[0])

    def read(self) -> tuple[dict[str, Any], dict[str, Any]]:
        seen, config = self.seen, self.config
        heads, nope, latent = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
        stages = {name: seen[name] for name in ("q_a", "q_a_norm", "kv_a", "kv_a_norm", "out") if name in seen}
        stages["q"] = seen["q"].unflatten(-1, (heads, -1))
        query, key = seen["query"].transpose(0, 1), seen["key"].transpose(0, 1)  # [t, H, P + R]
        rows = torch.cat([seen["latents"].reshape(-1, latent), key[:, 0, nope:]], dim=-1)
        new = len(seen["hidden_states"])
        stages |= {
            "q_nope": query[..., :nope],
            "q_pe": query[..., nope:],
            "c_kv": rows[-new:, :latent],
            "k_pe": rows[-new:, latent:],
            "kv_cache": rows,
            "k_nope": key[..., :nope],
            "v": seen["value"].transpose(0, 1),
            "attn": seen["attn"].unflatten(-1, (heads, -1)),
        }
        if "p" in seen:
            stages["p"] = seen["p"].transpose(0, 1)
        if "topk" in seen:
            d = config.index_head_dim
            stages["topk"] = seen["topk"].long()
            stages["index_weights"] = seen["weights_proj"].float() * config.index_n_heads**-0.5
            stages["index_k"] = seen["index_new"][:, :d]  # [k | gate | valid] where they are pooled
            if seen["index_new"].shape[1] > d:
                stages["index_gate"] = seen["index_new"][:, d : 2 * d]
        inputs = {"hidden_states": arrays(seen["hidden_states"])}
        return inputs, {name: arrays(tensor) for name, tensor in stages.items()}


