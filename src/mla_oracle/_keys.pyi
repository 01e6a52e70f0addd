from typing import Any

from numpy.typing import NDArray

def walk(
    indices: NDArray[Any],
    selected: bool,
    length: NDArray[Any],
    limits: NDArray[Any],
    window_first: int,
    kept: NDArray[Any],
    skip: bool,
    request: NDArray[Any],
    table: NDArray[Any],
    num_blocks: int,
    block_size: int,
    places: NDArray[Any],
    counts: NDArray[Any],
    found: NDArray[Any],
    positions: NDArray[Any],
) -> tuple[int, int, int]: ...
