# SPDX-License-Identifier: Apache-2.0
"""CUDA: the kernels of mla_oracle/cuda compiled by NVRTC and run on a GPU; the extra `cuda` is imported here alone.

    sources -> nvrtc -> cache        text, PTX and cubin, kept on disk          (no driver needed)
    resources                        registers, spills, shared memory of each   (no driver needed)
    driver -> device, foreign        a GPU as a machine, and arrays already on it
    layout -> paged, dense -> forms  every form on any machine, a GPU or the interpreter
    calls                            the public functions on a GPU's arrays

Importing this package, or any module of it, imports nothing of CUDA.
"""
