# SPDX-License-Identifier: Apache-2.0
"""What a Hugging Face config.json says about the geometry.

The sizes stand in the file. Two things do not: they are in each architecture's modelling code, and here in
the table ARCHITECTURES. To add an architecture, add a line there, and a config to tests/test_hf_config.py.

    pairing    which elements rope rotates together, and whether the key `rope_interleave` has a say
    rotation   whether there is any (NoPE), and its base where the file gives none

Where the file says something its architecture ignores, or engines would read it differently, it is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import InputError, UnsupportedError
from . import Geometry, Yarn, show, yarn_mscale
from .config_section import Entry, Section


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What the modelling code of one `model_type` does; checked in transformers 5.24."""

    interleave: bool = True
    reads_interleave: bool = False
    rotates: bool = True
    rope_theta: float = 1e4
    longrope: bool = False
    scales_latents: bool = False
    derives_v_head_dim: bool = False


DEEPSEEK_V3 = Architecture(reads_interleave=True)
ARCHITECTURES = {
    # transformers ignored mscale_all_dim here until pull request 47435; DeepSeek's own code never did.
    "deepseek_v2": Architecture(),
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": Architecture(),
    "kimi_k2": DEEPSEEK_V3,
    "youtu": DEEPSEEK_V3,
    "axk1": DEEPSEEK_V3,
    "sarvam_mla": DEEPSEEK_V3,
    "glm4_moe_lite": DEEPSEEK_V3,
    "glm_moe_dsa": Architecture(),
    "glm5_next": Architecture(rotates=False),
    "glm5_next_text": Architecture(rotates=False),
    "kimi_linear": Architecture(rotates=False),
    "longcat_flash": Architecture(rope_theta=1e7, scales_latents=True),
    "minicpm3": Architecture(interleave=False, longrope=True, derives_v_head_dim=True),
    # A config.json means what transformers makes of it: since pull request 47435, DeepSeek's softmax scale. Engines
    # that read Mistral's own params.json (`apply_scale: false`; sglang 26203) use the plain 1/sqrt(128), 2.2 times
    # smaller: for those, pass softmax_scale.
    "mistral4": DEEPSEEK_V3,
}

ROPE_KEYS = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor"),
    *("factor", "original_max_position_embeddings", "max_position_embeddings", "beta_fast", "beta_slow"),
    *("mscale", "mscale_all_dim", "attention_factor", "apply_yarn_scaling", "truncate"),
    *("llama_4_scaling_beta", "short_factor", "long_factor"),
)


def read_geometry(config: str | PathLike[str] | Mapping[str, Any]) -> Geometry:
    """See `Geometry.from_hf_config`."""
    content = text_section(config if isinstance(config, Mapping) else load(config))
    name, model_type = content.take("model_type").name, content["model_type"].value
    if not isinstance(model_type, str):
        raise InputError(f"{name} is {show(model_type)}, expected a string")
    if model_type not in ARCHITECTURES:
        raise UnsupportedError(f"{name} is {show(model_type)}, expected {', '.join(ARCHITECTURES)}")
    architecture = ARCHITECTURES[model_type]

    hidden_size = content.integer("hidden_size")
    q_lora_rank = None if content.take("q_lora_rank").value is None else content.integer("q_lora_rank")
    sizes: dict[str, Any] = {
        "num_heads": content.integer("num_attention_heads"),
        "qk_nope_head_dim": content.integer("qk_nope_head_dim"),
        "qk_rope_head_dim": content.integer("qk_rope_head_dim", least=0),
        "kv_lora_rank": content.integer("kv_lora_rank"),
    }
    if architecture.derives_v_head_dim and not content.given("v_head_dim"):
        if hidden_size % sizes["num_heads"]:
            name = content["hidden_size"].name
            raise InputError(f"{name} is {hidden_size}, expected a multiple of {sizes['num_heads']} heads")
        sizes["v_head_dim"] = hidden_size // sizes["num_heads"]
    else:
        sizes["v_head_dim"] = content.integer("v_head_dim")
    qk_head_dim = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]
    if content.given("qk_head_dim") and content.integer("qk_head_dim") != qk_head_dim:
        entry = content["qk_head_dim"]
        raise InputError(f"{entry.name} is {entry.value}, expected nope + rope, {qk_head_dim}")

    content.expect("mla_use_nope", not architecture.rotates, model_type)
    scales: dict[str, Any] = {}
    for key, rank in (("mla_scale_q_lora", q_lora_rank), ("mla_scale_kv_lora", sizes["kv_lora_rank"])):
        content.expect(key, architecture.scales_latents, model_type)
        if architecture.scales_latents:
            if rank is None:
                name = content["q_lora_rank"].name
                raise InputError(f"{name} is None, expected an integer with {model_type}")
            scales[key] = math.sqrt(hidden_size / rank)
    rope = _rope(content, architecture, model_type, sizes) if architecture.rotates else {}
    return Geometry(**sizes, **scales, **rope, hidden_size=hidden_size, q_lora_rank=q_lora_rank)


def text_section(config: Mapping[str, Any]) -> Section:
    """The text model of a config: what is nested in `text_config`, or the whole."""
    content = Section(config)
    if not content.given("text_config"):
        return content
    text = content["text_config"].value
    if not isinstance(text, Mapping):
        raise InputError(f"text_config is {show(text)}, expected an object")
    return Section(text, "text_config.")


def load(config: str | PathLike[str]) -> Mapping[str, Any]:
    """The content of a config.json: its path, or its folder. Raises InputError."""
    try:
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        content = json.loads(path.read_bytes())
    except TypeError:
        raise InputError(f"config is {show(config)}, expected a path or a dict") from None
    except OSError as error:
        raise InputError(f"config {str(path)!r} cannot be read: {error.strerror}") from None
    except RecursionError:
        raise InputError(f"config {str(path)!r} is nested too deeply, expected a config.json") from None
    except ValueError as error:
        raise InputError(f"config {str(config)!r} is not JSON: {show(str(error))}") from None
    if not isinstance(content, dict):
        raise InputError(f"config {str(path)!r} holds {show(content)}, expected an object")
    return content


def _rope(
    content: Section, architecture: Architecture, model_type: str, sizes: Mapping[str, int]
) -> dict[str, Any]:
    """The rope fields of Geometry."""
    interleave = architecture.interleave
    if architecture.reads_interleave:
        interleave = content.flag("rope_interleave", interleave)
    else:
        content.expect("rope_interleave", interleave, model_type)

    rope = _merged_rope(content)
    kind = rope.get("rope_type", Entry("rope_type", "default"))
    if not isinstance(kind.value, str):
        raise InputError(f"{kind.name} is {show(kind.value)}, expected a string")
    is_yarn = kind.value in ("yarn", "deepseek_yarn")
    is_longrope = kind.value == "longrope" and architecture.longrope
    if not (is_yarn or is_longrope or kind.value == "default"):
        known = "default, yarn or longrope" if architecture.longrope else "default or yarn"
        raise UnsupportedError(f"{kind.name} is {show(kind.value)}, expected {known} with {model_type}")

    width = sizes["qk_rope_head_dim"]
    if width == 0:
        if kind.value != "default":
            raise UnsupportedError(f"{kind.name} is {show(kind.value)}, expected default: no rope elements")
        return {"rope_interleave": interleave}
    # Some files give rope's share of the head, which is all of what is kept for rope.
    share = width / (sizes["qk_nope_head_dim"] + width)
    partial = rope.number("partial_rotary_factor", 1.0, above=0)
    if partial != 1 and not math.isclose(partial, share):
        name = rope["partial_rotary_factor"].name
        raise UnsupportedError(f"{name} is {partial:g}, expected 1 or {share:g}")
    beta = rope.number("llama_4_scaling_beta", 0.0, least=0)
    if beta and not (is_yarn and model_type == "mistral4"):
        name = rope["llama_4_scaling_beta"].name
        raise UnsupportedError(f"{name} is {beta:g}, expected 0 except in mistral4's yarn")
    if is_longrope:
        if rope.number("mscale_all_dim", 0.0, least=0):
            raise UnsupportedError(f"{rope['mscale_all_dim'].name} is given, expected 0 with longrope")
        return {"rope_interleave": interleave, "longrope": True}
    return {
        "rope_interleave": interleave,
        "rope_theta": rope.number("rope_theta", architecture.rope_theta, above=1 if is_yarn else 0),
        "yarn": _yarn(rope) if is_yarn else None,
        "llama_4_scaling_beta": beta,
    }


def _merged_rope(content: Section) -> Section:
    """The rope settings in `rope_scaling`, in `rope_parameters` and at the top, with `type` as `rope_type`.

    A null is no setting. A setting given twice must be given alike.
    """
    top = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    found = [(key, content[key]) for key in top if key in content]
    merged = Section({}, "rope_parameters." if content.given("rope_parameters") else "rope_scaling.")
    for where in ("rope_scaling", "rope_parameters"):
        if not content.given(where):
            continue
        name, values = content[where].name, content[where].value
        if not isinstance(values, Mapping):
            raise InputError(f"{name} is {show(values)}, expected an object or null")
        group = {key: entry for key, entry in Section(values, f"{name}.").items() if entry.value is not None}
        for key in group:
            if key not in ROPE_KEYS:
                raise UnsupportedError(f"{name} has {show(key)}, expected only {', '.join(ROPE_KEYS)}")
        untyped = group.keys().isdisjoint(("type", "rope_type"))
        if untyped and group.keys() - {*top, "max_position_embeddings"}:
            raise InputError(f"{name}.rope_type is missing")
        found += [("rope_type" if key == "type" else key, entry) for key, entry in group.items()]
    for key, entry in found:
        if entry.value is not None:
            other = merged.setdefault(key, entry)
            if other is not entry and other.value != entry.value:
                raise InputError(f"{entry.name} is {show(entry.value)}, {other.name} {show(other.value)}")
    return merged


def _yarn(rope: Section) -> Yarn:
    factor = rope.number("factor", least=1)
    mscale = rope.number("mscale", 1.0, least=0)
    all_dim = rope.number("mscale_all_dim", 0.0, least=0)
    # What cosines and sines are multiplied by: in DeepSeek's code, and in transformers.
    deepseek = yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    transformers = deepseek if "mscale" in rope and mscale and all_dim else yarn_mscale(factor, 1)
    transformers = rope.number("attention_factor", transformers, above=0)
    stated = not rope.keys().isdisjoint(("mscale", "mscale_all_dim"))
    if "attention_factor" in rope and transformers == 1 and not stated:
        mscale = 0.0
    elif not math.isclose(deepseek, transformers, rel_tol=1e-6):
        raise UnsupportedError(
            f"{rope.prefix}mscale and mscale_all_dim make the rotation's amplitude {deepseek:.7g} in"
            f" DeepSeek's code and {transformers:.7g} in transformers, expected one amplitude"
        )
    if all_dim and not rope.flag("apply_yarn_scaling", True):
        if mscale != all_dim:
            name = rope["mscale_all_dim"].name
            raise UnsupportedError(f"{name} is {all_dim:g}, expected mscale, {mscale:g}")
        mscale = all_dim = 0.0
    if not rope.flag("truncate", True):
        raise UnsupportedError(f"{rope['truncate'].name} is False, expected true")
    return Yarn(
        factor=factor,
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        beta_fast=rope.number("beta_fast", 32.0, least=1e-6),
        beta_slow=rope.number("beta_slow", 1.0, least=1e-6),
        mscale=mscale,
        mscale_all_dim=all_dim,
    )
