from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]

def turn(
    positions: Array,
    n: int,
    base: float,
    angles: int,
    kept: Array,
    factor: float,
    amplitude: float,
    cosine: Array,
    sine: Array,
) -> None: ...
def rotate(x: Array, cosine: Array, sine: Array, neox: bool) -> None: ...
