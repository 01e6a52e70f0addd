from typing import Any

from numpy.typing import NDArray

def scan(
    block_table: NDArray[Any], seq_lens: NDArray[Any], num_blocks: int, block_size: int
) -> tuple[int, int, int]: ...
