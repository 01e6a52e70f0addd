# SPDX-License-Identifier: Apache-2.0
"""Tensors in files: one safetensors file, or a folder of `.npy` files with a manifest.

    read_tensors, write_tensors   a safetensors file: named tensors, and string metadata
    read_manifest                 a folder: `manifest.json`, and one `.npy` file per tensor

A safetensors file is 8 bytes of header length (little-endian), the header (a JSON object), then the data.
The header is checked here, because the safetensors library accepts a name given twice and its numpy reader
knows no bf16. A file that breaks a rule is an InputError of one line: file, tensor, what was expected.
"""

import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..dtypes import LARGEST, TAGS, dtype, name_of
from ..errors import InputError
from .rawfile import Path, check_regular, is_text, json_object, naming, open_regular, read_bytes, shape_of, short

_NAME_OF = {tag: name for name, tag in TAGS.items()}
_HEADER_LIMIT = 100_000_000  # bytes, as in the safetensors library

# dtype inside the `.npy` file, for each dtype a manifest may name
_NPY = {"f32": "<f4", "f16": "<u2", "bf16": "<u2", "i32": "<i4", "i64": "<i8"}


@dataclass(frozen=True)
class Manifest:
    """A problem an engine recorded: what it computed, from which tensors, and how close is close enough."""

    op: str
    args: dict[str, Any]
    tensors: dict[str, NDArray[Any]]  # by name, read-only
    inputs: tuple[str, ...]  # names of tensors; empty where the manifest does not say
    outputs: tuple[str, ...]
    tol: dict[str, float]  # atol, rtol


def read_tensors(
    path: Path, *, wanted: Callable[[str], bool] | None = None
) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """The tensors of a safetensors file, in the order of its header, and its metadata.

    The tensors are read-only views of one buffer; one that lies unaligned in the file is a read-only copy. Of those
    whose names are not `wanted`, nothing but the header is read.
    """
    with naming(path, "read"), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise InputError(f"it has {size} bytes, expected at least 8: a header length")
        length = int.from_bytes(read_bytes(file, 8).tobytes(), "little")
        limit = min(size - 8, _HEADER_LIMIT)
        if length > limit:
            raise InputError(f"header length is {length}, expected at most {limit}")
        header = json_object(read_bytes(file, length).tobytes(), "header")
        metadata = _metadata(header.pop("__metadata__", {}))
        entries = _entries(header, size - 8 - length)
        if wanted is None:
            data = read_bytes(file, size - 8 - length)
            return {name: _tensor(name, entry, data) for name, entry in entries.items()}, metadata
        tensors = {}
        for name, entry in entries.items():
            if wanted(name):
                file.seek(8 + length + entry.begin)
                data = read_bytes(file, entry.end - entry.begin)
                tensors[name] = _tensor(name, entry._replace(begin=0, end=len(data)), data)
    return tensors, metadata


def write_tensors(path: Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file. At any moment a reader finds the old file or the new one, whole.

    `path` is a new name or a regular file: a link or a device is an InputError, because the file is renamed
    into place and would replace it. The dtypes are those of `dtypes.TAGS`.
    """
    from safetensors import SafetensorError, TensorSpec, serialize_file

    with naming(path, "write"):
        _check_destination(path)
        metadata = _metadata(metadata)
        stored = {name: _storable(name, array) for name, array in tensors.items()}
        specs = {
            name: TensorSpec(
                dtype=array.dtype.name, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes
            )
            for name, array in stored.items()
        }
        temporary = os.path.join(os.path.dirname(path), f".mla-oracle-{os.urandom(8).hex()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        os.close(descriptor)
        try:
            # An empty dict would make the library write a broken header beside no tensors. It renames a file
            # of mode 0600 over `temporary`, hence the mode that the umask gave.
            serialize_file(specs, temporary, metadata or None)
            os.chmod(temporary, mode)
            if metadata:
                _sort_metadata(temporary)
            os.replace(temporary, path)
        except SafetensorError as error:
            raise InputError(str(error)) from None
        finally:
            if os.path.lexists(temporary):
                os.unlink(temporary)


def _sort_metadata(path: str) -> None:
    """Order the metadata by key: the library writes it in an order that differs from process to process."""
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":"))
        file.seek(8)
        file.write(text.encode().ljust(length))


def read_manifest(folder: Path) -> Manifest:
    """The problem in `folder`, in the form of vllm.cpp's parity goldens.

    `manifest.json` holds op, args, tensors {name: {file, dtype, shape}} and tol {atol, rtol}, and may hold
    inputs and outputs, lists of names. A `.npy` file is of version 1 or 2, in C order; f16 and bf16 are
    stored as u16 and come back as themselves.
    """
    path = os.path.join(folder, "manifest.json")
    with naming(path, "read"), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _HEADER_LIMIT:
            raise InputError(f"it has {size} bytes, expected at most {_HEADER_LIMIT}")
        top = json_object(read_bytes(file, size).tobytes(), "it")
        op = _member(top, "op", str)
        if not is_text(op):
            raise InputError(f"op is {short(op)}, expected Unicode text")
        args = _member(top, "args", dict)
        tol = _member(top, "tol", dict)
        for key in ("atol", "rtol"):
            value = tol.get(key)
            if type(value) not in (int, float) or not 0 <= value <= LARGEST["f64"]:
                raise InputError(f"tol.{key} is {short(value)}, expected a number, 0 or more")
        files = {name: _npy_form(name, entry) for name, entry in _member(top, "tensors", dict).items()}
        names = {}
        for key in ("inputs", "outputs"):
            names[key] = _member(top, key, list) if key in top else []
            for i, name in enumerate(names[key]):
                if not isinstance(name, str) or name not in files:
                    raise InputError(f"{key}[{i}] is {short(name)}, expected the name of a tensor")

    tensors = {
        name: _read_npy(os.path.join(folder, file), name, of, shape) for name, (file, of, shape) in files.items()
    }
    within = {key: float(tol[key]) for key in ("atol", "rtol")}
    return Manifest(op, args, tensors, tuple(names["inputs"]), tuple(names["outputs"]), within)


def _metadata(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise InputError(f"metadata is {short(value)}, expected strings by name")
    for key, text in value.items():
        if not is_text(key) or not is_text(text):
            raise InputError(f"metadata {short(key)} is {short(text)}, expected strings of Unicode text")
    return dict(value)


class _Entry(NamedTuple):
    begin: int  # byte of the data
    end: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


def _entries(header: dict[str, Any], available: int) -> dict[str, _Entry]:
    """The tensors of a header; together they cover the `available` bytes of data once."""
    entries = {}
    for name, entry in header.items():
        subject = f"tensor {short(name)}"
        if not is_text(name):
            raise InputError(f"{subject} has a name that is not Unicode text")
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise InputError(f"{subject} is {short(entry)}, expected dtype, shape and data_offsets")
        tag, offsets = entry["dtype"], entry["data_offsets"]
        if not isinstance(tag, str) or tag not in _NAME_OF:
            raise InputError(f"{subject} has dtype {short(tag)}, expected one of {' '.join(_NAME_OF)}")
        of = dtype(_NAME_OF[tag])
        shape = shape_of(entry["shape"], of.itemsize, subject)
        size = math.prod(shape) * of.itemsize
        if not isinstance(offsets, list) or [type(offset) for offset in offsets] != [int, int]:
            raise InputError(f"{subject} has data_offsets {short(offsets)}, expected two integers")
        if offsets[1] - offsets[0] != size:
            raise InputError(f"{subject} has data_offsets {short(offsets)}, expected {size} bytes: "
                             f"{tag} of shape {list(shape)}")
        entries[name] = _Entry(offsets[0], offsets[1], of, shape)

    position = 0
    for name, (begin, end, _, _) in sorted(entries.items(), key=lambda item: item[1][:2]):
        if begin != position:
            raise InputError(f"tensor {short(name)} begins at byte {short(begin)} of the data, "
                             f"expected {position}: no gap and no overlap")
        position = end
    if position != available:
        raise InputError(f"the data has {available} bytes, expected {position}")
    return entries


def _tensor(name: str, entry: _Entry, data: NDArray[Any]) -> NDArray[Any]:
    # data: [bytes] u8 of all tensors, aligned, read-only
    part = data[entry.begin : entry.end]
    if entry.begin % entry.dtype.itemsize:
        part = part.copy()
        part.flags.writeable = False
    if entry.dtype == np.bool_ and (part > 1).any():
        first = int((part > 1).argmax())
        index = [int(i) for i in np.unravel_index(first, entry.shape)]
        raise InputError(f"tensor {short(name)} at {index} is byte {part[first]}, expected 0 or 1")
    return part.view(entry.dtype).reshape(entry.shape)


def _storable(name: str, array: NDArray[Any]) -> NDArray[Any]:
    if not is_text(name) or name == "__metadata__":
        raise InputError(f"tensor name is {short(name)}, expected Unicode text other than __metadata__")
    array = np.asarray(array, order="C")
    try:
        known = name_of(array.dtype) in TAGS
    except InputError:
        known = False
    if not known:
        raise InputError(f"tensor {short(name)} has dtype {array.dtype}, expected one of {' '.join(TAGS)}")
    return array


def _check_destination(path: Path) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    check_regular(mode, "a regular file or a new name")
    if not os.access(path, os.W_OK, effective_ids=True):
        raise InputError("it is read-only")


def _member(top: dict[str, Any], key: str, kind: type) -> Any:
    value = top.get(key)
    if not isinstance(value, kind):
        expected: dict[type, str] = {str: "a string", dict: "an object", list: "a list"}
        raise InputError(f"{key} is {short(value)}, expected {expected[kind]}")
    return value


def _npy_form(name: str, entry: object) -> tuple[str, str, tuple[int, ...]]:
    subject = f"tensor {short(name)}"
    if not is_text(name):
        raise InputError(f"{subject} has a name that is not Unicode text")
    if not isinstance(entry, dict) or not {"file", "dtype", "shape"} <= entry.keys():
        raise InputError(f"{subject} is {short(entry)}, expected file, dtype and shape")
    file, of = entry["file"], entry["dtype"]
    if not isinstance(file, str) or not file or os.path.isabs(file) or ".." in file.split("/"):
        raise InputError(f"{subject} has file {short(file)}, expected a name inside the folder")
    if not isinstance(of, str) or of not in _NPY:
        raise InputError(f"{subject} has dtype {short(of)}, expected one of {' '.join(_NPY)}")
    return file, of, shape_of(entry["shape"], dtype(of).itemsize, subject)


def _read_npy(path: str, name: str, of: str, shape: tuple[int, ...]) -> NDArray[Any]:
    from numpy.lib import format as npy

    with naming(path, "read"), open_regular(path) as file:
        try:
            version = npy.read_magic(file)
            read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
            found_shape, fortran_order, found = read_header(file)
        except OSError:
            raise
        except Exception as error:  # numpy evaluates the header as Python text: anything may come out of it
            raise InputError(f"expected an npy header of version 1 or 2 ({type(error).__name__})") from None
        if found != np.dtype(_NPY[of]) or found_shape != shape or fortran_order:
            order = "Fortran" if fortran_order else "C"
            raise InputError(f"tensor {short(name)} is {found} {list(found_shape)} in {order} order, "
                             f"expected {_NPY[of]} {list(shape)} in C order")
        size, left = math.prod(shape) * found.itemsize, os.fstat(file.fileno()).st_size - file.tell()
        if left != size:
            raise InputError(f"tensor {short(name)} has {left} bytes of data, expected {size}")
        return read_bytes(file, size).view(dtype(of)).reshape(shape)
