from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]

def attend(
    q: Array,
    rows: Array,
    starts: Array,
    keys: Array,
    bias: Array,
    sinks: Array,
    softmax_scale: float,
    softcap: float,
    sinks_in_lse: bool,
    value_offset: int,
    output_scale: float,
    lse_unit: float,
    empty_lse: float,
    out: Array,
    lse: Array,
) -> None: ...
