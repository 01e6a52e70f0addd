# SPDX-License-Identifier: Apache-2.0
"""Every dialect over every option of a case: it says the case, the same bits, or refuses it in one line."""

import pytest

from mla_oracle import UnsupportedError, generate
from mla_oracle.dialects import NAMES, get
from mla_oracle.dialects.folded import folded
from mla_oracle.dialects.same import difference

OPTIONS = [
    "tokens=1", "tokens=2", "tokens=2,causal=false", "ragged=1+0+2", "kv_heads=2", "kpe=64", "value_offset=64",
    "softcap=3", "sinks=infinite", "sinks=normal,sinks_in_lse=true", "bias=alibi", "bias=mask,tokens=2", "window=3",
    "window=3+2,causal=false", "window=3,first=2", "topk=64", "topk=64,topk_by=slot", "topk=64,topk_by=slot,tokens=2",
    "topk=64,topk_by=slot,topk_length=query,tokens=2", "topk=64,topk_by=slot,topk_length=request,invalid=rows",
    "topk=64,topk_outside=skip", "topk=64,topk_by=slot,extra=9+1+4,extra_topk=64", "topk=64,extra=9+1+4,extra_topk=64",
    "format=fp8_ds_mla", "format=fp8_ds_mla,topk=64,topk_by=slot,sinks=normal", "format=fp8_e4m3,reader=fold",
    "format=flashinfer_fp8", "format=flashinfer_fp8_grouped", "format=nvfp4_ds_mla", "format=q8_0",
    "format=q8_0,q_dtype=f32", "q_dtype=e4m3,q_scale=0.25",
    "output_scale=0.5", "q_dtype=f32", "pages=huge", "pages=strided", "shards=2",
    "row=512,format=model1,topk=64,topk_by=slot", "row=512,format=v4.1", "lse_base=2,empty_lse=inf",
    "tokens=2,lse_axes=BHT",
]  # fmt: skip
SIZES = ["heads=64,lens=70+0+33,block=64", "heads=4,lens=70+1+33,block=16", "heads=128,lens=5+0+0,block=32"]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["bf16", "f16", "f32"])
def test_a_case_is_said_as_it_is_or_refused_in_one_line(options, kind):
    sizes = SIZES[OPTIONS.index(options) % 3]
    row = "" if "row=" in options else "row=576,"
    case = generate(f"paged:{sizes},{row}value=512,scale=0.0625,dtype={kind},{options}")
    for name in NAMES:
        dialect = get(name)
        try:
            arguments = dialect.from_case(case)
        except UnsupportedError as error:
            assert "\n" not in str(error) and repr(name) in str(error)
        else:
            said = folded(case) if dialect.folds else case
            assert difference(said, dialect.to_case(**arguments)) is None
