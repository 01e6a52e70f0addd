from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]

def attend(
    q_nope: Array, q_pe: Array, c_kv: Array, k_pe: Array, w_uk: Array, w_uv: Array, scale: float, out: Array
) -> None: ...
