from typing import Any

class Borrowed:
    __array_interface__: dict[str, Any]
    dtype: str
    def __init__(self, capsule: object) -> None: ...
