from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]

def merge(
    partial_out: Array,
    partial_lse: Array,
    unit: float,
    marker: float,
    empty_lse: float,
    out: Array,
    lse: Array,
) -> None: ...
