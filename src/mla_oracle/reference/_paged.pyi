from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]

def decode(
    q: Array,
    q_dtype: int,
    kv_cache: Array,
    kv_dtype: int,
    block_table: Array,
    seq_lens: Array,
    softmax_scale: float,
    causal: bool,
    lse_unit: float,
    empty_lse: float,
    out: Array,
    lse: Array,
) -> None: ...
