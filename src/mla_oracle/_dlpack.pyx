# SPDX-License-Identifier: Apache-2.0
# Borrow the memory behind a DLPack capsule (DLPack 1.x, legacy and versioned), bf16 and fp8 included:
# numpy.from_dlpack refuses those. The result speaks numpy's array interface and keeps the producer alive.
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef struct DLDevice:
    int32_t device_type
    int32_t device_id

cdef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes

cdef struct DLTensor:
    void* data
    DLDevice device
    int32_t ndim
    DLDataType dtype
    int64_t* shape
    int64_t* strides            # in elements; NULL means row-major
    uint64_t byte_offset

cdef struct DLManagedTensor:
    DLTensor dl_tensor
    void* manager_ctx
    void (*deleter)(DLManagedTensor*) noexcept

cdef struct DLManagedTensorVersioned:
    uint32_t major
    uint32_t minor
    void* manager_ctx
    void (*deleter)(DLManagedTensorVersioned*) noexcept
    uint64_t flags
    DLTensor dl_tensor

cdef enum:
    READ_ONLY = 1

# (code, bits) of a DLDataType -> the array interface's type string, the name in mla_oracle.dtypes.
TYPES = {
    (0, 8): ('|i1', 'i8'), (0, 16): ('<i2', 'i16'), (0, 32): ('<i4', 'i32'), (0, 64): ('<i8', 'i64'),
    (1, 8): ('|u1', 'u8'), (1, 16): ('<u2', 'u16'), (1, 32): ('<u4', 'u32'), (1, 64): ('<u8', 'u64'),
    (2, 16): ('<f2', 'f16'), (2, 32): ('<f4', 'f32'), (2, 64): ('<f8', 'f64'),
    (4, 16): ('<u2', 'bf16'),
    (6, 8): ('|b1', 'bool'),
    (10, 8): ('|u1', 'e4m3'), (11, 8): ('|u1', 'e4m3fnuz'), (12, 8): ('|u1', 'e5m2'), (14, 8): ('|u1', 'e8m0'),
}


cdef class Borrowed:
    """The tensor in `capsule`: `__array_interface__` for numpy, `dtype` by its name in mla_oracle.dtypes."""

    cdef DLManagedTensor* legacy
    cdef DLManagedTensorVersioned* versioned
    cdef readonly dict __array_interface__
    cdef readonly str dtype

    def __init__(self, capsule):
        cdef DLTensor* tensor
        cdef bint read_only = False
        if PyCapsule_IsValid(capsule, b'dltensor_versioned'):
            versioned = <DLManagedTensorVersioned*>PyCapsule_GetPointer(capsule, b'dltensor_versioned')
            if versioned.major != 1:
                raise TypeError(f'DLPack version {versioned.major}, expected 1')
            tensor = &versioned.dl_tensor
            read_only = versioned.flags & READ_ONLY
            self._describe(tensor, read_only)
            PyCapsule_SetName(capsule, b'used_dltensor_versioned')
            self.versioned = versioned
        elif PyCapsule_IsValid(capsule, b'dltensor'):
            legacy = <DLManagedTensor*>PyCapsule_GetPointer(capsule, b'dltensor')
            self._describe(&legacy.dl_tensor, read_only)
            PyCapsule_SetName(capsule, b'used_dltensor')
            self.legacy = legacy
        else:
            raise TypeError('not a fresh DLPack capsule')

    cdef _describe(self, DLTensor* tensor, bint read_only):
        cdef int64_t step = 1
        cdef int32_t axis
        code = (tensor.dtype.code, tensor.dtype.bits)
        if tensor.dtype.lanes != 1 or code not in TYPES:
            raise TypeError(f'DLPack type code {code[0]} of {code[1]} bits, {tensor.dtype.lanes} lanes')
        typestr, self.dtype = TYPES[code]
        itemsize = tensor.dtype.bits // 8
        shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
        strides = [0] * tensor.ndim
        for axis in reversed(range(tensor.ndim)):
            strides[axis] = itemsize * (tensor.strides[axis] if tensor.strides != NULL else step)
            step *= tensor.shape[axis]
        if tensor.data == NULL and step != 0:
            raise TypeError('a tensor without memory')
        self.__array_interface__ = {
            'version': 3,
            'typestr': typestr,
            'shape': shape,
            'strides': tuple(strides),
            'data': (<uint64_t>tensor.data + tensor.byte_offset, bool(read_only)),
        }

    def __dealloc__(self):
        if self.versioned != NULL and self.versioned.deleter != NULL:
            self.versioned.deleter(self.versioned)
        if self.legacy != NULL and self.legacy.deleter != NULL:
            self.legacy.deleter(self.legacy)
