# SPDX-License-Identifier: Apache-2.0
"""tensorfile: any bytes are a valid file or an InputError, never anything else."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_files import VALID, packed, reads_or_refuses

from mla_oracle.dtypes import TAGS, dtype
from mla_oracle.files.tensorfile import read_tensors, write_tensors


@pytest.fixture
def file(tmp_path):
    return tmp_path / "case.safetensors"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch") / "fuzzed.safetensors"


def test_a_file_cut_anywhere_is_refused(file):
    for length in range(len(VALID)):
        assert reads_or_refuses(file, VALID[:length]) is None


def test_a_flipped_byte_in_the_header_is_read_or_refused(file):
    header = len(VALID) - 12
    for position in range(header):
        for flip in (0x01, 0x02, 0x10, 0x20, 0x80, 0xFF):
            content = bytearray(VALID)
            content[position] ^= flip
            reads_or_refuses(file, bytes(content))


@given(content=st.binary(max_size=200))
@settings(deadline=None, derandomize=True)
def test_random_bytes_are_read_or_refused(scratch, content):
    reads_or_refuses(scratch, content)


@given(length=st.integers(0, 2**64 - 1) | st.integers(0, len(VALID)))
@settings(deadline=None, derandomize=True)
def test_a_lying_header_length_is_read_or_refused(scratch, length):
    reads_or_refuses(scratch, struct.pack("<Q", length) + VALID[8:])


@given(header=st.binary(max_size=80) | st.text(max_size=80).map(str.encode), data=st.binary(max_size=20))
@settings(deadline=None, derandomize=True)
def test_a_random_header_is_read_or_refused(scratch, header, data):
    reads_or_refuses(scratch, packed(header, data))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 20)
    | st.integers()
    | st.integers(2**60, 2**66)
    | st.floats()
    | st.sampled_from([*TAGS.values(), "F4", "C64", "q"])
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*TAGS.values()]) | values,
        "shape": st.lists(st.integers(-1, 4) | values, max_size=4) | values,
        "data_offsets": st.lists(st.integers(-1, 24), min_size=2, max_size=2) | values,
    },
    optional={"extra": values},
)
headers = st.dictionaries(
    st.sampled_from(["q", "kv_cache", "__metadata__"]) | st.text(max_size=5), entries | values, max_size=4
)


@given(header=headers, data=st.binary(max_size=24))
@settings(deadline=None, derandomize=True, max_examples=400)
def test_a_mutated_header_is_read_or_refused(scratch, header, data):
    reads_or_refuses(scratch, packed(header, data))


@st.composite
def written(draw):
    name = draw(st.sampled_from([*TAGS]))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=5)))
    size = int(np.prod(shape)) * dtype(name).itemsize
    raw = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8)
    return (raw & 1 if name == "bool" else raw).view(dtype(name)).reshape(shape)


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(
    tensors=st.dictionaries(text.filter(lambda name: name != "__metadata__"), written(), max_size=5),
    metadata=st.dictionaries(text, text, max_size=5),
)
@settings(deadline=None, derandomize=True)
def test_any_tensors_and_metadata_come_back(scratch, tensors, metadata):
    write_tensors(scratch, tensors, metadata)
    found, found_metadata = read_tensors(scratch)
    assert found_metadata == metadata
    assert {name: (t.dtype, t.shape, t.tobytes()) for name, t in found.items()} == {
        name: (t.dtype, t.shape, t.tobytes()) for name, t in tensors.items()
    }
