"""Lessons on random weights and random text that are as much work as real ones.

The work of an update depends on how often the drafter is right: a path ends at its first wrong
choice, and with it the LM head's work and the next block's. Random weights are never right, so the
drafter is made to choose token `FAVOURITE` everywhere, and the text has it with probability α:
every position is then right with probability α, as in a drafter that has learned.
"""

from __future__ import annotations

from dataclasses import dataclass
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from vllm_specblock.drafters.specblock.checkpoint import init
from vllm_specblock.drafters.specblock.config import default_layer_ids
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.train.data.batch import Batch
from vllm_specblock.train.target.features import OnlineTeacher, TargetOutputs

FAVOURITE = 0
"""The token, and draft id, that the drafter always chooses."""


@dataclass(frozen=True)
class Shape:
    """A target and how its drafter is trained. draft_vocab: Vd; batch, length: windows of an
    update, and their columns."""

    target: LlamaConfig
    draft_vocab: int
    batch: int
    length: int


SHAPES = {
    "8b": Shape(  # Llama-3.1-8B
        LlamaConfig(
            hidden_size=4096,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            num_hidden_layers=32,
            vocab_size=128256,
            max_position_embeddings=131072,
        ),
        draft_vocab=32000,
        batch=4,
        length=2048,
    ),
    "tiny": Shape(
        LlamaConfig(
            hidden_size=256,
            intermediate_size=384,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=32,
            num_hidden_layers=8,
            vocab_size=160,
        ),
        draft_vocab=96,
        batch=2,
        length=48,
    ),
}


def make_drafter(shape: Shape) -> SpecBlockModel:
    """A random drafter that chooses `FAVOURITE` at every position of every block."""
    with TemporaryDirectory() as folder:
        shape.target.save_pretrained(folder)
        drafter = init(folder, draft_vocab_size=shape.draft_vocab, target_name="random")
    size, layer = drafter.config.hidden_size, drafter.input_layer
    with torch.no_grad():
        # One query for all positions puts one constant vector into every state. In so many
        # dimensions nothing random comes near it: the LM head's row along it always wins.
        layer.position_queries.weight.copy_(layer.position_queries.weight[:1].clone())
        query = layer.query_norm(layer.position_queries.weight[0])
        constant = layer.fuse.weight[:, 2 * size :] @ query
        drafter.lm_head.weight[FAVOURITE] = constant * 60 / (constant.norm() * size**0.5)
    return drafter


def make_text(shape: Shape, batch: int, length: int, alpha: float) -> Batch:
    """B windows of L draftable tokens each, `FAVOURITE` with probability `alpha`."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, shape.draft_vocab, (batch, length), generator=draw)
    tokens[torch.rand(batch, length, generator=draw) < alpha] = FAVOURITE
    return Batch.of(tokens)


class StillTeacher:
    """Random features, made once, of whatever batch."""

    def __init__(self, shape: Shape, text: Batch, device: torch.device, dtype: torch.dtype):
        size, of = shape.target.hidden_size, {"device": device, "dtype": dtype}
        self.target_outputs = TargetOutputs(
            torch.randn(*text.tokens.shape, 3 * size, **of),
            torch.randn(*text.tokens.shape, size, **of),
            torch.randn(*text.tokens.shape, shape.draft_vocab, device=device).softmax(-1),
        )
        self.table = torch.randn(shape.target.vocab_size, size, **of)

    def teach(self, batch: Batch) -> TargetOutputs:
        return self.target_outputs

    def embed(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def target_probs(self, last: Tensor) -> Tensor:
        return self.target_outputs.target_probs


def online_teacher(shape: Shape, device: torch.device, dtype: torch.dtype) -> OnlineTeacher:
    """A target of random weights, made on the device."""
    with device:
        target = AutoModelForCausalLM.from_config(shape.target, dtype=dtype)
        draft_ids = torch.arange(shape.draft_vocab)
    target = target.eval().requires_grad_(False)
    return OnlineTeacher(target, default_layer_ids(shape.target.num_hidden_layers), draft_ids)


@dataclass(frozen=True)
class SameText:
    """`PackedDataset` that give one batch at every step."""

    text: Batch

    def __len__(self) -> int:
        return len(self.text)

    def batch(self, step: int, batch: int, seed: int) -> Batch:
        return self.text
