# SPDX-License-Identifier: Apache-2.0
"""`python -m mla_oracle` is the command `mla-oracle`."""

import sys

from .cli import main

sys.exit(main())
