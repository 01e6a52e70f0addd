# SPDX-License-Identifier: Apache-2.0
# The names of _opcodes.pxd for Python: Op, Space, Format, Rounding, Atomic, Fault.
