# SPDX-License-Identifier: Apache-2.0
from mla_oracle.arrays import Array

Found = tuple[int, int, int, int, int, int, int, int, int]

def run(
    code: Array,
    targets: Array,
    constants: Array,
    pieces: Array,
    shape: Array,
    patience: int,
    shared_size: int,
    local_size: int,
    shared_state: Array,
) -> tuple[Found | None, set[int]]: ...
def sizes() -> tuple[int, int]: ...
