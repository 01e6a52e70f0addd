# SPDX-License-Identifier: Apache-2.0
"""Safetensors files built byte by byte.

`packed` builds a file from any header, so a test can lie in it; `refused` asks for the one line that says so.
"""

import json
import struct

import pytest

from mla_oracle.errors import InputError
from mla_oracle.files.tensorfile import read_tensors


def packed(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(tag="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": tag, "shape": list(shape), "data_offsets": list(offsets)}


VALID = packed(
    {"__metadata__": {"kind": "paged"}, "q": entry(), "n": entry("I32", (1, 1), (8, 12))},
    struct.pack("<ffi", 1.5, -2.0, 7),
)


def refused(path, call, *arguments):
    with pytest.raises(InputError) as error:
        call(path, *arguments)
    message = str(error.value)
    assert len(message.splitlines()) == 1
    assert message.startswith(("cannot read ", "cannot write "))
    assert str(path) in message
    return message


def refuses(file, content, expected):
    file.write_bytes(content)
    message = refused(file, read_tensors)
    assert expected in message, message


def reads_or_refuses(file, content):
    """Every content is a valid file or one line; a valid file spends each byte of its data on a tensor."""
    file.write_bytes(content)
    try:
        tensors, metadata = read_tensors(file)
    except InputError as error:
        assert str(error).startswith(f"cannot read {file}: ")
        assert len(str(error).splitlines()) == 1
        return None
    length = struct.unpack("<Q", content[:8])[0]
    assert sum(tensor.nbytes for tensor in tensors.values()) == len(content) - 8 - length
    assert all(isinstance(text, str) for item in metadata.items() for text in item)
    return tensors
