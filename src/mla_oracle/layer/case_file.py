# SPDX-License-Identifier: Apache-2.0
"""A layer case: one safetensors file, schema mla-oracle-layer/1, that says which layer and what goes into it.

    tensors    hidden_states [T, C], positions [T]; past_c_kv, past_k_pe, past_index_k, past_index_gate, topk (state.py)
               qo_indptr, past_indptr [B + 1] of several sequences (sequences.py)
    metadata   config   a config.json, its folder, or its text        weights   a file or folder (weights.py)
               layer    its number, 0 if not given                    prefix    of the weights' names in safetensors
               norm_eps, index_rope, index_hadamard, index_scores, index_kpool      as LayerConfig.from_hf_config's
               form     naive (if not given), absorbed, or paged with slot_mapping [T] and block_table [B, blocks] and
                        block_size, cache_dtype or cache_format, cache_writer, cache_reader, kv_scale      (pages.py)
               angles   any, recurrence, power, closed or table       rope_layout, held, lse_base      as check_stages

Paths are relative to the case file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from ..arrays import Array, as_array
from ..cases import format_convention, parse_bool, parse_choice, parse_float, parse_positive
from ..errors import InputError
from ..files.exchange import LAYER_SCHEMA
from ..files.rawfile import json_object
from ..files.tensorfile import read_tensors, write_tensors
from .config import PAIRINGS, LayerConfig
from .hf_file import files_of
from .pages import DTYPES, Store
from .rotation import ANGLE_MODES
from .state import FORMS, INPUTS, STARTS
from .weights import Weights, read_weights


def _natural(text: str) -> int:
    return 0 if text == "0" else parse_positive(text)


OF_CONFIG: dict[str, Callable[[str], Any]] = {
    "norm_eps": parse_float,
    "index_rope": parse_choice(*PAIRINGS),
    "index_hadamard": parse_bool,
    "index_scores": parse_choice("f32", "fp8"),
    "index_kpool": parse_positive,
}
OF_CHECK: dict[str, Callable[[str], Any]] = {
    "rope_layout": parse_choice(*PAIRINGS),
    "held": parse_choice("f64", "f32", "bf16", "f16"),
    "lse_base": parse_choice("e", "2"),
}
OF_STORE: dict[str, Callable[[str], Any]] = {
    "block_size": parse_positive,
    "cache_dtype": parse_choice(*DTYPES),
    "cache_format": str,
    "cache_writer": str,
    "cache_reader": str,
    "kv_scale": parse_float,
}
OTHERS: dict[str, Callable[[str], Any]] = {
    "config": str,
    "weights": str,
    "layer": _natural,
    "prefix": str,
    "form": parse_choice(*FORMS),
    "angles": parse_choice(*ANGLE_MODES),
}
PARSERS = OF_CONFIG | OF_CHECK | OF_STORE | OTHERS

TENSORS = (*INPUTS, *STARTS)


@dataclass(frozen=True, eq=False)
class LayerCase:
    """A layer, its weights, and what goes into it."""

    name: str
    config: LayerConfig
    weights: Weights
    inputs: dict[str, Array]
    angles: str
    conventions: dict[str, Any]  # its metadata
    form: str = "naive"
    store: Store | None = None  # of the paged form

    @property
    def how(self) -> dict[str, Any]:
        """rope_layout, held and lse_base, where given."""
        return {name: self.conventions[name] for name in OF_CHECK if name in self.conventions}

    @property
    def work(self) -> dict[str, Any]:
        """angles, form and store, as `prepare` takes them."""
        return {"angles": self.angles, "form": self.form, "store": self.store}

    @property
    def files(self) -> list[tuple[str, str]]:
        """What the case, its weights and its config were read from, each with what it is."""
        folder, config = os.path.dirname(self.name), self.conventions["config"]
        weights = os.path.join(folder, self.conventions["weights"])
        found = [("the case file", self.name)]
        found += [("the weights", file) for file in ([weights] if weights.endswith(".gguf") else files_of(weights))]
        if not config.lstrip().startswith("{"):
            path = os.path.join(folder, config)
            found.append(("the config", os.path.join(path, "config.json") if os.path.isdir(path) else path))
        return found


def read_layer_case(path: str | PathLike[str]) -> LayerCase:
    """The layer case in the file `path`, and the weights it names. Raises InputError."""
    tensors, metadata = read_tensors(path)
    if metadata.get("schema") != LAYER_SCHEMA:
        raise InputError(f"{fspath(path)}: schema is {metadata.get('schema')!r}, expected {LAYER_SCHEMA!r}")
    for name in tensors:
        if name not in TENSORS:
            raise InputError(f"{name} does not belong to a layer case, expected {', '.join(TENSORS)}")
    values: dict[str, Any] = {"layer": 0}
    for name, text in metadata.items():
        if name == "schema":
            continue
        if name not in PARSERS:
            raise InputError(f"metadata {name} does not belong to a layer case, expected {', '.join(PARSERS)}")
        try:
            values[name] = PARSERS[name](text)
        except ValueError as error:
            raise InputError(f"metadata {name} is {text!r}, expected {error}") from None
    for name in ("config", "weights"):
        if name not in values:
            raise InputError(f"metadata {name} is missing from the layer case")
    folder = os.path.dirname(fspath(path))
    source: str | Mapping[str, Any] = values["config"]
    if values["config"].lstrip().startswith("{"):
        source = json_object(values["config"].encode(), "metadata config")
    else:
        source = os.path.join(folder, values["config"])
    config = LayerConfig.from_hf_config(
        source, values["layer"], **{name: values[name] for name in OF_CONFIG if name in values}
    )
    weights = read_weights(
        os.path.join(folder, values["weights"]), config, values["layer"], prefix=values.get("prefix")
    )
    form, store = values.get("form", "naive"), None
    of_store = {name.removeprefix("cache_").removeprefix("kv_"): values[name] for name in OF_STORE if name in values}
    if form == "paged":
        if "block_size" not in values:
            raise InputError("metadata block_size is missing from the layer case, expected it with form paged")
        store = Store(**of_store)
    elif of_store:
        name = next(name for name in OF_STORE if name in values)
        raise InputError(f"metadata {name} is given, expected form paged with it")
    return LayerCase(fspath(path), config, weights, tensors, values.get("angles", "any"), values, form, store)


def write_layer_case(path: str | PathLike[str], inputs: Mapping[str, object], **conventions: Any) -> None:
    """Write a layer case: `inputs` as of `stages.run`, and the metadata by name, config and weights among it.

    Raises InputError for a name that is none, or a file that cannot be written.
    """
    arrays = {name: as_array(name, value) for name, value in inputs.items()}
    for name in conventions:
        if name not in PARSERS:
            raise InputError(f"metadata {name} does not belong to a layer case, expected {', '.join(PARSERS)}")
    for name in arrays:
        if name not in TENSORS:
            raise InputError(f"tensor {name} does not belong to a layer case, expected {', '.join(TENSORS)}")
    texts = {name: format_convention(value) for name, value in conventions.items()}
    write_tensors(path, arrays, {"schema": LAYER_SCHEMA, **texts})
