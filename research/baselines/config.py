"""Baseline model configurations.

ParallelSpec's is `DrafterConfig`, whose `block_size` is the positions of one forward. What that
says of the rank head and the shift is not read, here and in `FalconShape`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from vllm_specblock.drafters.common.config import Count, NetworkShape
from vllm_specblock.drafters.specblock.config import DrafterConfig


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


class SmallShape(NetworkShape):
    """A Llama with tied embeddings; the attributes are those of its config.json."""

    draft_vocab_size: Count
    tie_word_embeddings: Literal[True] = True
    max_position_embeddings: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    @property
    def target_hidden_size(self) -> None:
        """It reads no state of the target."""

    def target_layers(self, num_layers: int) -> tuple[int, ...]:
        return ()
