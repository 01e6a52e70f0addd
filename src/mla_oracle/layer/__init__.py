# SPDX-License-Identifier: Apache-2.0
"""One whole attention layer, from hidden states to the attention output, stage by stage.

    config = LayerConfig.from_hf_config("config.json", layer=3)
    weights = read_weights("model.safetensors.index.json", config, layer=3)
    stages = run(config, weights, {"hidden_states": x, "positions": positions})

config.py, weights.py, hf_file.py and gguf_file.py say what a layer is; stages.py, rotation.py, indexer.py and
attention.py compute it; spread.py, limits.py and check.py judge what an engine dumped; case_file.py is its file.
"""

from .config import Indexer, LayerConfig, LongRope
from .stages import STAGES, run, stages_of
from .weights import Weights, check_weights, read_weights

__all__ = [
    "STAGES",
    "Indexer",
    "LayerConfig",
    "LongRope",
    "Weights",
    "check_weights",
    "read_weights",
    "run",
    "stages_of",
]
