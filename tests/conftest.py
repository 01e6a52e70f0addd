# SPDX-License-Identifier: Apache-2.0
"""For all tests, and the processes they start: BLAS has one thread, for the workers of pytest-xdist share the cores.

More threads than cores wait for each other in a loop: the diagnosis of a small case takes five times as long.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read where numpy is loaded, after this
