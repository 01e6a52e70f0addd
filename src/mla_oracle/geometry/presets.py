# SPDX-License-Identifier: Apache-2.0
"""The geometries of published models, by name. Each has the public source of its numbers above it.

"transformers" is the package of that name, version 5.24; "hub" the model's config.json on the Hugging Face
hub; "Megatron-Bridge" the folder src/megatron/bridge/models of the repository NVIDIA-NeMo/Megatron-Bridge.
To add a model, add an entry, and its config to tests/test_hf_config.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from . import Geometry, Yarn

_DEEPSEEK: dict[str, Any] = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512}
_GLM: dict[str, Any] = {"qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "kv_lora_rank": 512}
_V2_YARN = Yarn(factor=40, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707)
_V3_YARN = Yarn(factor=40, original_max_position_embeddings=4096, mscale=1, mscale_all_dim=1)
_V3 = Geometry(
    num_heads=128, **_DEEPSEEK, rope_theta=1e4, yarn=_V3_YARN, hidden_size=7168, q_lora_rank=1536
)

PRESETS: Mapping[str, Geometry] = MappingProxyType(
    {
        # hub zai-org/GLM-5.2; transformers GlmMoeDsaConfig has all but rope_theta.
        "glm-5.2": Geometry(num_heads=64, **_GLM, rope_theta=8e6, hidden_size=6144, q_lora_rank=2048),
        # transformers Glm5NextTextConfig, the defaults of which are zai-org/GLM-5.3-Flash; its DSA layers.
        "glm-5.3-flash": Geometry(
            num_heads=64,
            qk_nope_head_dim=256,
            qk_rope_head_dim=0,
            v_head_dim=256,
            kv_lora_rank=512,
            hidden_size=4096,
            q_lora_rank=1536,
        ),
        # transformers Glm4MoeLiteConfig; rope_theta from vLLM's test of zai-org/GLM-4.7-Flash, glm4_moe_lite.
        "glm-4.7-flash": Geometry(num_heads=20, **_GLM, rope_theta=1e6, hidden_size=2048, q_lora_rank=768),
        # hub deepseek-ai/DeepSeek-V2-Lite; Megatron-Bridge deepseek/deepseek_provider.py.
        "deepseek-v2-lite": Geometry(
            num_heads=16, **_DEEPSEEK, rope_theta=1e4, yarn=_V2_YARN, hidden_size=2048, q_lora_rank=None
        ),
        # Megatron-Bridge deepseek/deepseek_provider.py. DeepSeek-V2.5 differs: its mscale fields are 1.
        "deepseek-v2": Geometry(
            num_heads=128, **_DEEPSEEK, rope_theta=1e4, yarn=_V2_YARN, hidden_size=5120, q_lora_rank=1536
        ),
        # transformers DeepseekV3Config; YaRN: Megatron-Bridge deepseek/deepseek_provider.py. R1 and V3.1 too.
        "deepseek-v3": _V3,
        # transformers DeepseekV32Config; YaRN: deepseek-ai/DeepSeek-V3.2-Exp, inference/model.py.
        "deepseek-v3.2": _V3,
        # Kimi-K2-Instruct: Megatron-Bridge kimi/kimi_provider.py. Both betas are 1. K2-Thinking has factor
        # 64, K2.5 factor 64 and beta_fast 32.
        "kimi-k2": Geometry(
            num_heads=64,
            **_DEEPSEEK,
            rope_theta=5e4,
            yarn=Yarn(
                factor=32, original_max_position_embeddings=4096, beta_fast=1, beta_slow=1, mscale_all_dim=1
            ),
            hidden_size=7168,
            q_lora_rank=1536,
        ),
        # transformers KimiLinearConfig, moonshotai/Kimi-Linear-48B-A3B: the rope elements stay unrotated.
        "kimi-linear": Geometry(num_heads=32, **_DEEPSEEK, hidden_size=2304, q_lora_rank=None),
        # transformers MiniCPM3Config, openbmb/MiniCPM3-4B; v_head_dim is hidden_size / num_heads.
        "minicpm3": Geometry(
            num_heads=40,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
            v_head_dim=64,
            kv_lora_rank=256,
            rope_interleave=False,
            longrope=True,
            hidden_size=2560,
            q_lora_rank=768,
        ),
        # transformers Mistral4Config, mistralai/Mistral-Small-4-119B; its scale: see hf_config.py.
        "mistral-4": Geometry(
            num_heads=32,
            qk_nope_head_dim=64,
            qk_rope_head_dim=64,
            v_head_dim=128,
            kv_lora_rank=256,
            rope_theta=1e4,
            yarn=Yarn(factor=128, original_max_position_embeddings=8192, mscale=1, mscale_all_dim=1),
            llama_4_scaling_beta=0.1,
            hidden_size=4096,
            q_lora_rank=1024,
        ),
        # transformers LongcatFlashConfig, meituan-longcat/LongCat-Flash-Chat.
        "longcat-flash": Geometry(
            num_heads=64,
            **_DEEPSEEK,
            rope_theta=1e7,
            hidden_size=6144,
            q_lora_rank=1536,
            mla_scale_q_lora=math.sqrt(6144 / 1536),
            mla_scale_kv_lora=math.sqrt(6144 / 512),
        ),
    }
)
