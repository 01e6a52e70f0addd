# SPDX-License-Identifier: Apache-2.0
# Enumerations of int; their members are in _opcodes.pxd.
from typing import Any

Op: Any
Space: Any
Format: Any
Rounding: Any
Atomic: Any
Fault: Any
