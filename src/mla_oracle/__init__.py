# SPDX-License-Identifier: Apache-2.0
"""An oracle for MLA (multi-head latent attention) decode kernels."""
