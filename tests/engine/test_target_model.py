"""Target layers that are refused before weights are loaded. Layers with hooks: tests/targets."""

from __future__ import annotations

import pytest
from support.engines import make_engine
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.encoder_only_attention import (
    create_encoder_only_attention_backend,
)
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models import llama
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from vllm_specblock.config import OptionError
from vllm_specblock.engine.attention import TreeAttentionBackend


class OwnAttention(Attention):
    """A subclass, which may store or mask differently."""


@pytest.fixture
def no_weights(monkeypatch):
    def load_weights(self, model, config):
        raise AssertionError("weights are being loaded")

    monkeypatch.setattr(DefaultModelLoader, "load_weights", load_weights)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        (Attention, CPUAttentionBackend),
        (Attention, create_encoder_only_attention_backend(TreeAttentionBackend)),
        (OwnAttention, None),
    ],
    ids=["another backend", "ours, without its causal mask", "a subclass"],
)
def test_a_layer_that_ignores_the_mask_is_refused(kind, backend, no_weights, monkeypatch):
    def attention(*args, prefix, **kwargs):
        if "layers.3." in prefix:
            return kind(*args, prefix=prefix, **kwargs, attn_backend=backend)
        return Attention(*args, prefix=prefix, **kwargs)

    monkeypatch.setattr(llama, "Attention", attention)
    says = rf"{kind.__name__} layers \(model.layers.3.self_attn.attn"
    with pytest.raises(OptionError, match=says):
        make_engine({"kind": "ngram", "model": None})


def test_a_target_with_its_own_model_state_is_refused(no_weights, monkeypatch):
    monkeypatch.setattr(llama.LlamaForCausalLM, "get_model_state_cls", object, raising=False)
    with pytest.raises(OptionError, match=r"its own model state \(LlamaForCausalLM\)"):
        make_engine({"kind": "ngram", "model": None})
