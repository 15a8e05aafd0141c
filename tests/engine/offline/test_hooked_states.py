"""Features of targets without vLLM's EAGLE-3 interface, against transformers' hidden states."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from support.processes import run_python

pytest.importorskip("vllm", reason="needs vLLM")

LAYERS = (1, 2, 3)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
# Each engine in a process of its own: its KV connector is process-wide.
EXTRACT = f"""
import json, sys, torch
from pathlib import Path
from vllm_specblock.engine.offline.target import FeatureExtractor

engine = {{"enforce_eager": True, "max_num_seqs": 4, "kv_cache_memory_bytes": 64 << 20}}
folder, tokens, found = Path(sys.argv[1]), torch.tensor(json.loads(sys.argv[2])), []
for name in sys.argv[3:]:
    given = folder / name, {LAYERS}, 128, "float32", folder / "scratch"
    extractor = FeatureExtractor(*given, engine | {{"gpu_memory_utilization": 0.3}})
    ((states, _),) = extractor([tokens])
    found.append(states.tolist())
    extractor.close()
print(json.dumps(found))
"""


def test_hooked_states_are_the_layers_inputs(tmp_path):
    """Residuals are added by the next layer, or by the layer itself."""
    targets, tokens = {}, torch.randint(3, 60, (20,))
    mixtral = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    for config in (mixtral, transformers.CohereConfig(**SIZES)):
        torch.manual_seed(0)
        target = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        target.save_pretrained(tmp_path / config.model_type)
        targets[config.model_type] = target
    words, switch = (tmp_path, tokens.tolist(), *targets), {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    found = json.loads(run_python("-c", EXTRACT, *words, **switch)[-1])
    for target, states in zip(targets.values(), found, strict=True):
        with torch.no_grad():
            wanted = target(tokens[None], output_hidden_states=True).hidden_states
        states = torch.tensor(states).view(len(tokens), len(LAYERS), -1).unbind(1)
        for layer, state in zip(LAYERS, states):
            torch.testing.assert_close(state, wanted[layer][0], atol=1e-5, rtol=1e-5)
