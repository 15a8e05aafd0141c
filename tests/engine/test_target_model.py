"""Target layers that are refused before weights are loaded. Layers with hooks: tests/targets."""

from __future__ import annotations

import pytest
import torch
from support import dflash
from support.engines import make_engine
from support.targets import write_target
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.encoder_only_attention import (
    create_encoder_only_attention_backend,
)
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models import llama
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.worker.gpu.spec_decode.eagle.utils import maybe_share_target_embed

from vllm_specblock.config import OptionError
from vllm_specblock.engine.attention import TreeAttentionBackend
from vllm_specblock.train import saving, untrained


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


def test_drafters_read_the_rows_of_the_target_that_vllms_own_share(tmp_path):
    """Gemma scales them for itself."""
    sizes = {"hidden_size": 32, "vocab_size": 64, "head_dim": 32}
    like = write_target(tmp_path / "like", **sizes)
    gemma = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}
    folder = write_target(tmp_path / "target", **sizes, **gemma)
    saving.save(untrained.init(like, qk_norm=False), tmp_path / "specblock")
    block = dflash.write(tmp_path / "dflash", dflash.make_model())
    engine = make_engine(
        {"model": str(tmp_path / "specblock"), "second_drafter": {"model": str(block)}},
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
    )
    target, draft, ids = engine.runner.model, torch.nn.Module(), torch.arange(64)
    maybe_share_target_embed(draft, draft, target.model)
    rows = draft.embed_tokens(ids)
    assert not torch.equal(rows, target.embed_input_ids(ids))
    for drafter in engine.speculator.draft_policy.drafters:
        assert torch.equal(drafter.embed(ids), rows), drafter.kind
