# SPDX-License-Identifier: Apache-2.0
"""Page tables, selections, masks and layouts as engines spell them, to the canonical ones and back."""
