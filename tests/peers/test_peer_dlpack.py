# SPDX-License-Identifier: Apache-2.0
"""torch tensors straight into the forms: read where they lie, refused in one line where they cannot be, let go of.

The bits wanted are those that numpy arrays of the same numbers give; torch's own `view` and `numpy` make them.
"""

import gc
import math
import weakref

import ml_dtypes
import numpy as np
import pytest

from mla_oracle import InputError, append_kv, decode_paged
from mla_oracle.arrays import as_array

torch = pytest.importorskip("torch", reason="torch is not installed")

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
WIDTH, HEAD_DIM_V = 24, 16
CONVENTIONS = {"softmax_scale": 0.2, "head_dim_v": HEAD_DIM_V}


class Legacy:
    """A producer from before DLPack 1.0: no max_version, an unversioned capsule."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, stream=None):
        return torch.utils.dlpack.to_dlpack(self.tensor)


def problem(dtype):
    """q [B, H, D], kv_cache [num_blocks, block_size, D], block_table [B, max_blocks], seq_lens [B]."""
    draw = torch.Generator().manual_seed(3)
    q = torch.randn(2, 3, WIDTH, generator=draw).to(dtype)
    kv_cache = torch.randn(5, 4, WIDTH, generator=draw).to(dtype)
    block_table = torch.tensor([[4, 1, 2], [0, 3, -1]], dtype=torch.int32)
    return q, kv_cache, block_table, torch.tensor([11, 6], dtype=torch.int32)


def strided(tensor):
    """The same numbers, in the middle of a larger tensor that is NaN everywhere else."""
    room = torch.full([2 * size + 1 for size in tensor.shape[:-1]] + [tensor.shape[-1] + 8], 77)
    room = room.to(tensor.dtype).fill_(math.nan if tensor.dtype.is_floating_point else 77)
    view = room[tuple(slice(1, None, 2) for _ in tensor.shape[:-1])][..., 3 : 3 + tensor.shape[-1]]
    view.copy_(tensor)
    return view


def numpy_of(tensor):
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.contiguous().numpy()


@pytest.mark.parametrize("spread", [lambda tensor: tensor, strided], ids=["contiguous", "strided"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_tensors_and_arrays_give_the_same_bits(dtype, spread):
    tensors = problem(dtype)
    wanted = decode_paged(*map(numpy_of, tensors), **CONVENTIONS)
    for producer in (lambda tensor: tensor, Legacy):
        out, lse = decode_paged(*(producer(spread(tensor)) for tensor in tensors), **CONVENTIONS)
        np.testing.assert_array_equal(out.view(np.uint32), wanted.out.view(np.uint32))
        np.testing.assert_array_equal(lse.view(np.uint32), wanted.lse.view(np.uint32))


@pytest.mark.parametrize("producer", [lambda tensor: tensor, Legacy], ids=["DLPack 1", "legacy"])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool])
def test_the_array_is_the_tensors_memory(dtype, producer):
    tensor = strided(torch.zeros(3, 4, 5, dtype=dtype))
    array = as_array("x", producer(tensor))
    assert array.ctypes.data == tensor.data_ptr()
    assert array.strides == tuple(stride * tensor.itemsize for stride in tensor.stride())
    assert not array.any()
    tensor[2, 3, 4] = 1
    assert array[2, 3, 4] == 1 and np.count_nonzero(array) == 1
    array[0, 0, 0] = 1
    assert tensor[0, 0, 0] == 1


@pytest.mark.parametrize("dtype", FLOATS)
def test_append_kv_writes_into_the_tensor(dtype):
    kv_cache = torch.zeros(2, 4, WIDTH, dtype=dtype)
    row = torch.arange(1, WIDTH + 1, dtype=dtype)[None]
    append_kv(kv_cache, row[:, :HEAD_DIM_V], row[:, HEAD_DIM_V:], torch.tensor([6]))
    assert torch.equal(kv_cache[1, 2], row[0])
    assert torch.count_nonzero(kv_cache) == WIDTH


# A conjugate or negative tensor is a flag on the memory of another: what lies there has other signs.
REFUSED = {
    "requires_grad": lambda x: x.requires_grad_(),
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "mkldnn": lambda x: x.to_mkldnn(),
    "conjugate": lambda x: x.to(torch.complex64).conj(),
    "negative": lambda x: (x * 1j).conj().imag,
    "complex": lambda x: x.to(torch.complex64),
    "float8_e5m2fnuz": lambda x: x.to(torch.float8_e5m2fnuz),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_what_cannot_be_read_in_place_is_one_line_that_names_the_tensor(refused):
    with pytest.raises(InputError, match=r"^c_kv \S.*\Z"):
        as_array("c_kv", REFUSED[refused](torch.randn(2, 3)))


def test_i64_lengths_are_refused_by_name():
    q, kv_cache, block_table, seq_lens = problem(torch.float32)
    with pytest.raises(InputError, match=r"^seq_lens is i64, expected i32$"):
        decode_paged(q, kv_cache, block_table, seq_lens.long(), **CONVENTIONS)


@pytest.mark.parametrize("producer", [lambda tensor: tensor, Legacy], ids=["DLPack 1", "legacy"])
def test_the_memory_lives_as_long_as_a_view_of_the_array_and_no_longer(producer):
    memory = np.zeros((3, 4), np.float32)
    alive = weakref.ref(memory)
    array = as_array("x", producer(torch.from_numpy(memory)))
    part = array[1:]
    del memory, array
    gc.collect()
    assert alive() is not None and part.sum() == 0
    del part
    gc.collect()
    assert alive() is None


def test_the_memory_of_a_refused_tensor_is_let_go():
    memory = np.zeros((3, 4), np.complex64)
    alive = weakref.ref(memory)
    with pytest.raises(InputError):
        as_array("x", torch.from_numpy(memory))
    del memory
    gc.collect()
    assert alive() is None
