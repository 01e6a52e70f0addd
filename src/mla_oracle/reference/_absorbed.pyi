from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]

def attend(
    q_nope: Array, q_pe: Array, c_kv: Array, k_pe: Array, w_uk: Array, w_uv: Array, scale: float, out: Array
) -> None: ...
def absorb_query(q_nope: Array, w_uk: Array, q_lat: Array) -> None: ...
def up_project(o_lat: Array, w_uv: Array, out: Array) -> None: ...
