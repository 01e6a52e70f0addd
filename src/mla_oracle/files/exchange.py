# SPDX-License-Identifier: Apache-2.0
"""Cases and results in files: one safetensors file each, arrays under fixed names, conventions in its metadata.

    case     schema mla-oracle-case/1     kind, id, and the conventions of the kind (see mla_oracle.cases)
    result   schema mla-oracle-result/1   an engine may leave the metadata out

A folder with manifest.json and .npy files is read as well.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..arrays import Array
from ..cases import Case, format_convention, from_parts
from ..errors import InputError
from .tensorfile import read_manifest, read_tensors, write_tensors

CASE_SCHEMA = "mla-oracle-case/1"
RESULT_SCHEMA = "mla-oracle-result/1"
LAYER_SCHEMA = "mla-oracle-layer/1"  # see mla_oracle.layer.case_file


def load_case(source: str | Path) -> Case:
    """The case in a file or folder, or the one an id stands for."""
    path = Path(source)
    if ":" in str(source) and not os.path.exists(path):
        from ..cases.inputs import generate

        return generate(str(source))
    return read_case(path)


def read_case(path: str | Path) -> Case:
    """The case in the file `path`, or in the folder `path` with a manifest. Raises InputError."""
    path = Path(path)
    if os.path.isdir(path):
        return _case_of_manifest(path)
    tensors, metadata = read_tensors(path)
    _check_schema(path, metadata, CASE_SCHEMA)
    try:
        return from_parts(tensors, metadata)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def is_layer_case(path: str | Path) -> bool:
    """Whether a file is a layer case. Nothing but its header is read; what cannot be read is none."""
    if not os.path.isfile(path):
        return False
    try:
        return read_tensors(path, wanted=lambda name: False)[1].get("schema") == LAYER_SCHEMA
    except InputError:
        return False


def write_case(path: str | Path, case: Case) -> None:
    """Write `case` to the file `path`, whole or not at all. Raises InputError."""
    metadata = {name: format_convention(value) for name, value in case.conventions().items()}
    if case.id is not None:
        metadata["id"] = case.id
    write_tensors(path, case.tensors(), {"schema": CASE_SCHEMA, "kind": case.kind, **metadata})


def read_result(path: str | Path) -> dict[str, Array]:
    """The tensors of the result file `path`, or of a folder's manifest outputs. Raises InputError."""
    path = Path(path)
    if os.path.isdir(path):
        manifest = read_manifest(path)
        return {name: manifest.tensors[name] for name in manifest.outputs}
    tensors, metadata = read_tensors(path)
    if "schema" in metadata:
        _check_schema(path, metadata, RESULT_SCHEMA)
    return tensors


def write_result(path: str | Path, tensors: dict[str, Array], about: dict[str, str]) -> None:
    """Write results to the file `path`, whole or not at all. Raises InputError."""
    write_tensors(path, tensors, {"schema": RESULT_SCHEMA, **about})


def _check_schema(path: Path, metadata: dict[str, str], schema: str) -> None:
    if metadata.get("schema") != schema:
        raise InputError(f"{path}: schema is {metadata.get('schema')!r}, expected {schema!r}")


# What manifests written by engines call things, and what cases call them.
MANIFEST_OPS = {"mla_decode_attention": "paged"}
MANIFEST_TENSORS = {"query": "q"}
MANIFEST_ARGS = {"scale": "softmax_scale", "v_head_dim": "head_dim_v"}
# Arguments of the launch: they change no result.
MANIFEST_LAUNCH = ("num_kv_splits", "max_seq_len")


def _case_of_manifest(folder: Path) -> Case:
    """The case of a manifest: `op` is a kind or mla_decode_attention, `args` are its conventions.

    A paged case whose args do not give head_dim_v takes it from the recorded `out`.
    """
    manifest = read_manifest(folder)
    kind = MANIFEST_OPS.get(manifest.op, manifest.op)
    for names, given in ((MANIFEST_TENSORS, manifest.tensors), (MANIFEST_ARGS, manifest.args)):
        for name, other in names.items():
            if name in given and other in given:
                raise InputError(f"{folder}: both {name} and {other} are given, expected one of them")
    conventions = {
        MANIFEST_ARGS.get(name, name): format_convention(value)
        for name, value in manifest.args.items()
        if name not in MANIFEST_LAUNCH
    }
    if kind == "paged" and "out" in manifest.outputs:
        conventions.setdefault("head_dim_v", str(manifest.tensors["out"].shape[-1]))
    tensors = {
        MANIFEST_TENSORS.get(name, name): tensor
        for name, tensor in manifest.tensors.items()
        if name not in manifest.outputs
    }
    try:
        return from_parts(tensors, {"kind": kind, **conventions})
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None
