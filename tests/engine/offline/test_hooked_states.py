"""Features of targets without vLLM's EAGLE-3 interface, against transformers' hidden states."""

from __future__ import annotations

import pytest
import torch
import transformers

pytest.importorskip("vllm", reason="needs vLLM")

from support.features import features_of

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
CONFIGS = {
    "residual added by the next layer": lambda: transformers.MixtralConfig(
        num_local_experts=4, num_experts_per_tok=2, **SIZES
    ),
    "residual added by the layer itself": lambda: transformers.CohereConfig(**SIZES),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_hooked_states_are_the_layers_inputs(config, tmp_path):
    torch.manual_seed(0)
    target = transformers.AutoModelForCausalLM.from_config(config()).float().eval()
    target.save_pretrained(tmp_path / "target")
    tokens = torch.randint(3, 60, (20,))
    with torch.no_grad():
        wanted = target(tokens[None], output_hidden_states=True).hidden_states
    found = features_of(tmp_path / "target", LAYERS, tokens.tolist(), tmp_path / "scratch")
    states = torch.tensor(found).view(len(tokens), len(LAYERS), -1).unbind(1)
    for layer, state in zip(LAYERS, states):
        torch.testing.assert_close(state, wanted[layer][0], atol=1e-5, rtol=1e-5)
