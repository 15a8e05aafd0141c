"""Baseline model configurations.

ParallelSpec's is `DrafterConfig`, whose `block_size` is the positions of one forward. What that
says of the rank head and the shift is not read, here and in `FalconShape`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_specblock.drafters.specblock.config import (
    Count,
    DrafterConfig,
    check_rope_scaling,
    check_shape,
)


class MedusaShape(BaseModel):
    """Attributes: hidden_size: Ht, the target's; num_heads: K; num_layers: blocks of each head."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden_size: Count
    vocab_size: Count
    draft_vocab_size: Count
    num_heads: Count
    num_layers: Count

    @property
    def target_hidden_size(self) -> int:
        return self.hidden_size

    def target_layers(self, num_layers: int) -> tuple[int, ...]:
        """What follows all layers of the target: the state that its LM head reads."""
        return (num_layers,)


class FalconShape(DrafterConfig):
    """`block_size` is k, tokens of one forward.

    k divides every block of vLLM's cache, which holds a multiple of 16 tokens.

    Attributes:
        forwards: F; the tree is at most F·k deep.
        lstm_layers: before the decoder layers.
    """

    block_size: Literal[1, 2, 4, 8, 16]
    hidden_size: Annotated[int, Field(ge=2, multiple_of=2)]
    forwards: Count
    lstm_layers: Count


class SmallShape(BaseModel):
    """A Llama with tied embeddings; the attributes are those of its config.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden_size: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)]
    intermediate_size: Count
    num_hidden_layers: Count
    vocab_size: Count
    draft_vocab_size: Count
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: Literal[True] = True

    @property
    def qk_norm(self) -> bool:
        return False

    @property
    def block_size(self) -> int:
        """Positions of one row, as RoPE asks every drafter."""
        return 1

    @property
    def target_hidden_size(self) -> None:
        """It reads no state of the target."""

    def target_layers(self, num_layers: int) -> tuple[int, ...]:
        return ()

    @model_validator(mode="after")
    def _check(self) -> SmallShape:
        check_shape(self)
        check_rope_scaling(self.rope_scaling)
        return self
