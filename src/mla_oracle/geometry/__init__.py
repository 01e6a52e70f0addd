# SPDX-License-Identifier: Apache-2.0
"""A model's geometry: its head sizes, and what fixes its softmax scale and its rope.

    Geometry.preset("deepseek-v3").softmax_scale            0.1352337788608801
    Geometry.from_hf_config("path/to/config.json")          reads the file, or its folder, or a dict

The models are in presets.py, what a config.json means is in hf_config.py.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from os import PathLike
from typing import Any

from ..errors import InputError

MAX_SIZE = 2**31 - 1


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 mscale ln(factor) + 1, and 1 where factor is at most 1: `yarn_get_mscale` of DeepSeek's code."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """YaRN's parameters; the defaults are those of DeepSeek's modelling code.

    The two mscale fields act in two places, with m = yarn_mscale(factor, .):

        rotation        cosines and sines times m(mscale) / m(mscale_all_dim): 1 where the fields are equal
        softmax scale   times m(mscale_all_dim)^2: 1 where the field is 0

    `mscale=0, mscale_all_dim=0` turns both off. Raises InputError.
    """

    factor: float  # >= 1: new context / original context
    original_max_position_embeddings: int  # tokens
    beta_fast: float = 32.0  # turns in the original context: pairs that turn more keep their frequency
    beta_slow: float = 1.0  # pairs that turn less have it divided by factor
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        _set(self, check_number, "factor", least=1)
        _set(self, check_integer, "original_max_position_embeddings", least=1)
        _set(self, check_number, "beta_fast", "beta_slow", least=1e-6)
        _set(self, check_number, "mscale", "mscale_all_dim", least=0)
        if self.beta_fast < self.beta_slow:
            raise InputError(f"beta_fast is {self.beta_fast:g}, below beta_slow, {self.beta_slow:g}")

    def to_json(self) -> str:
        """One JSON object, every field written out; `from_json` gives an equal Yarn back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Yarn:
        """The Yarn that the JSON object `text` describes. Raises InputError naming the key."""
        try:
            values = json.loads(text)
        except (TypeError, ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise InputError(f"yarn is {show(text)}, expected a JSON object")
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise InputError(f"yarn has {show(name)}, expected {', '.join(known)}")
        for name in known[:2]:
            if name not in values:
                raise InputError(f"yarn has no {name}, expected a number")
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """The sizes of one attention layer, under their names in config.json, and what fixes its scale and rope.

    With P = qk_nope_head_dim, R = qk_rope_head_dim, V = v_head_dim, L = kv_lora_rank, a cached row is
    [c_kv (L) | k_pe (R)]. R is even, or 0 in a NoPE model. Raises InputError naming the field and its value.
    """

    num_heads: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int
    # None where nothing is rotated (NoPE: R is 0, or the R elements stay as they are), where `longrope` is
    # set, and where the caller rotates and this object need not know.
    rope_theta: float | None = None
    rope_interleave: bool = True  # pairs (2j, 2j + 1), else halves (j, j + R/2)
    yarn: Yarn | None = None
    # The angles come from LongRoPE's tables, which this object does not hold. The softmax scale is as ever.
    longrope: bool = False
    # A query at position p is multiplied by 1 + beta ln(1 + floor(p / original_max_position_embeddings)), in
    # addition to the softmax scale (Mistral 4, after Llama 4). 0: it is not.
    llama_4_scaling_beta: float = 0.0
    # The whole layer around the attention. q_lora_rank None: q is projected directly, or not stated.
    hidden_size: int | None = None
    q_lora_rank: int | None = None
    # LongCat multiplies q, and c_kv after its norm and before it is cached: sqrt(hidden_size / rank).
    mla_scale_q_lora: float = 1.0
    mla_scale_kv_lora: float = 1.0

    def __post_init__(self) -> None:
        _set(self, check_integer, "num_heads", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", least=1)
        _set(self, check_integer, "qk_rope_head_dim", least=0)
        if self.qk_rope_head_dim % 2:
            raise InputError(f"qk_rope_head_dim is {self.qk_rope_head_dim}, expected an even number")
        _set(self, check_bool, "rope_interleave", "longrope")
        _set(self, check_number, "llama_4_scaling_beta", least=0)
        stated = [name for name in ("hidden_size", "q_lora_rank") if getattr(self, name) is not None]
        _set(self, check_integer, *stated, least=1)
        _set(self, check_number, "mla_scale_q_lora", "mla_scale_kv_lora", above=0)
        self._check_rope()

    def _check_rope(self) -> None:
        if self.yarn is not None and not isinstance(self.yarn, Yarn):
            raise InputError(f"yarn is {show(self.yarn)}, expected a Yarn or None")
        if self.yarn is None and self.llama_4_scaling_beta:
            raise InputError(f"llama_4_scaling_beta is {self.llama_4_scaling_beta}, expected 0 without yarn")
        if self.rope_theta is None:
            if self.yarn is not None:
                raise InputError("rope_theta is None, expected a number with yarn")
        elif self.qk_rope_head_dim == 0 or self.longrope:
            reason = "longrope" if self.longrope else "qk_rope_head_dim 0"
            raise InputError(f"rope_theta is {show(self.rope_theta)}, expected None with {reason}")
        else:
            _set(self, check_number, "rope_theta", above=0 if self.yarn is None else 1)
        if self.longrope and self.qk_rope_head_dim == 0:
            raise InputError("longrope is True, expected false without rope elements")

    @property
    def latent_dim(self) -> int:
        """Elements of a cached row: kv_lora_rank + qk_rope_head_dim."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Elements of a decompressed query or key: qk_nope_head_dim + qk_rope_head_dim."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_mscale(self) -> float:
        """What multiplies 1/sqrt(qk_head_dim), squared: YaRN's m(mscale_all_dim), and 1 without YaRN."""
        return 1.0 if self.yarn is None else yarn_mscale(self.yarn.factor, self.yarn.mscale_all_dim)

    @property
    def softmax_scale(self) -> float:
        """softmax_mscale^2 / sqrt(qk_head_dim), in f64. The absorbed width, latent_dim, has no part in it."""
        return 1 / math.sqrt(self.qk_head_dim) * self.softmax_mscale**2

    @classmethod
    def preset(cls, name: str) -> Geometry:
        """The entry `name` of presets.PRESETS. Raises InputError that lists the names."""
        from .presets import PRESETS

        if not isinstance(name, str) or name not in PRESETS:
            raise InputError(f"geometry is {show(name)}, expected {', '.join(PRESETS)}")
        return PRESETS[name]

    @classmethod
    def from_hf_config(cls, config: str | PathLike[str] | Mapping[str, Any]) -> Geometry:
        """The geometry that a Hugging Face config.json describes: its path, its folder, or its content.

        Reads both spellings of rope, `rope_scaling` and the `rope_parameters` of transformers 5, and the text
        model nested in a vision-language config. Raises InputError naming the key where the file is bad or
        contradicts itself, UnsupportedError for an architecture or a rope that is not known: never a guess.
        """
        from . import hf_config

        return hf_config.read_geometry(config)


def show(value: object) -> str:
    """`value` on one short line, for an error text."""
    if isinstance(value, numbers.Integral):
        return str(value) if abs(int(value)) < 2**64 else "an integer of more than 64 bits"
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    return str(value) if value is None or isinstance(value, float) else f"a {type(value).__name__}"


def check_integer(name: str, value: object, *, least: int) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or not least <= int(value) <= MAX_SIZE:
        raise InputError(f"{name} is {show(value)}, expected an integer from {least} to {MAX_SIZE}")
    return int(value)


def check_number(name: str, value: object, *, least: float = -math.inf, above: float = -math.inf) -> float:
    number = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool) and abs(value) <= 2**53:  # type: ignore[operator]
        number = float(value)
    if not (number >= least and number > above):
        bound = f"from {least:g}" if least > above else f"above {above:g}"
        raise InputError(f"{name} is {show(value)}, expected a number {bound} to 2^53")
    return number


def check_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name} is {show(value)}, expected true or false")
    return value


def _set(target: object, check: Callable[..., object], *names: str, **bounds: float) -> None:
    """Check these fields of a frozen dataclass, and give them the type the check returns."""
    for name in names:
        object.__setattr__(target, name, check(name, getattr(target, name), **bounds))
