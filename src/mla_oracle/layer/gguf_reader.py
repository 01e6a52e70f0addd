# SPDX-License-Identifier: Apache-2.0
"""A GGUF file opened with the package gguf, which says of a truncated file neither what is missing nor where it ends.

    header    magic and version (8 bytes), counts of tensors and of metadata (16), the metadata, an entry a tensor
    data      the tensors, each where its entry says
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ..errors import InputError, MissingError

COUNTS = 24  # bytes of the header up to the metadata


def open_gguf(path: str) -> Any:
    """A GGUFReader. Raises InputError in one line, MissingError without the package."""
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader
    except ImportError:
        raise MissingError("a GGUF file needs the package gguf: pip install 'mla-oracle[gguf]'") from None

    class Reader(GGUFReader):  # type: ignore[misc]
        """Says what a truncated file lacks, where the package would read less, or fail to shape it."""

        entries: list[str] | None = None  # the tensors whose entries are read
        counts = 0, 0

        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            end = int(offset) + np.dtype(dtype).itemsize * int(count)
            if end > len(self.data):
                raise InputError(
                    f"{path} has {len(self.data)} bytes, and {self._part()} needs {end} or more: it is truncated"
                )
            return super()._get(offset, dtype, count, override_order)

        def _part(self) -> str:
            if self.entries is not None:
                after = f" ({self.entries[-1]} is before it)" if self.entries else ""
                return f"the entry of tensor {len(self.entries) + 1} of {self.counts[0]}{after}"
            names = [name for name in self.fields if not name.startswith("GGUF.")]
            after = f" ({names[-1]} is before it)" if names else ""
            return f"metadata {len(names) + 1} of {self.counts[1]}{after}"

        def _build_fields(self, offs: int, count: int) -> int:
            self.counts = int(self.fields["GGUF.tensor_count"].parts[0][0]), int(count)
            found: int = super()._build_fields(offs, count)
            self.entries = []
            return found

        def _get_tensor_info_field(self, orig_offs: int) -> Any:
            found = super()._get_tensor_info_field(orig_offs)
            assert self.entries is not None
            self.entries.append(found.name)
            return found

        def _build_tensors(self, start_offs: int, fields: Any) -> None:
            for field in fields:
                _, name, _, dims, kind, offset = field.parts
                block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind[0])]
                count = int(np.prod(dims, dtype=np.int64)) * size // block
                begin = int(start_offs) + int(offset[0])
                if begin + count > len(self.data):
                    shape = [int(n) for n in reversed(dims)]
                    raise InputError(
                        f"{path}: {bytes(name).decode(errors='replace')} {shape} is {count} bytes from byte {begin} on,"
                        f" and the file has {max(len(self.data) - begin, 0)} of them: it is truncated"
                    )
            super()._build_tensors(start_offs, fields)

    try:
        if os.path.getsize(path) < COUNTS:
            raise InputError(f"{path} has {os.path.getsize(path)} bytes, expected a GGUF file's {COUNTS} or more")
        with np.errstate(all="ignore"):  # sizes that are none
            return Reader(path)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # the package checks little before it reads
        said = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path} is not a whole GGUF file: {said}") from None
