# SPDX-License-Identifier: Apache-2.0
"""One whole attention layer, from hidden states to the attention output, stage by stage.

    config = LayerConfig.from_hf_config("config.json", layer=3)
    weights = read_weights("model.safetensors.index.json", config, layer=3)
    stages = run(config, weights, {"hidden_states": x, "positions": positions})
    verdict = check_stages(config, weights, {"hidden_states": x, "positions": positions}, dump)

config.py, weights.py, hf_file.py and gguf_*.py say what a layer is; stages.py, rotation.py, indexer.py,
attention.py and pages.py compute it, sequences.py where it has several; dump.py, layout.py, spread*.py, limits.py,
choice.py, judge.py and check.py judge what an engine dumped, blind.py what it would not tell, verdict.py is the answer;
case_file.py is a layer in a file, meaning.py says it in words, command.py is the command line.
"""

from .case_file import read_layer_case, write_layer_case
from .check import check_stages
from .config import Indexer, LayerConfig, LongRope
from .pages import Store
from .stages import STAGES, run, stages_of
from .verdict import Finding, LayerVerdict
from .weights import Weights, check_weights, read_weights

__all__ = [
    "STAGES",
    "Finding",
    "Indexer",
    "LayerConfig",
    "LayerVerdict",
    "LongRope",
    "Store",
    "Weights",
    "check_stages",
    "check_weights",
    "read_layer_case",
    "read_weights",
    "run",
    "stages_of",
    "write_layer_case",
]
