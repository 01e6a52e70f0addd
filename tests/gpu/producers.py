# SPDX-License-Identifier: Apache-2.0
"""Arrays that claim to lie on a GPU; on the fake driver a device's memory is the host's."""

from typing import Any

import numpy as np


class Interface:
    """An array that speaks __cuda_array_interface__; keywords replace or add fields."""

    def __init__(self, array: np.ndarray, **fields: Any) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.ctypes.data, False),
            "strides": array.strides,
            **fields,
        }


class Dlpack:
    """An array that speaks DLPack from device (kind, ordinal); `stream` is the one it was asked to wait for."""

    def __init__(self, array: np.ndarray, ordinal: int = 0, kind: int = 2, versioned: bool = True) -> None:
        self.array = array
        self.device = kind, ordinal
        self.versioned = versioned
        self.stream: Any = "nobody asked"

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: int, **keywords: Any) -> Any:
        if keywords and not self.versioned:
            raise TypeError("unexpected keyword max_version")
        self.stream = stream
        return self.array.__dlpack__(**keywords)
