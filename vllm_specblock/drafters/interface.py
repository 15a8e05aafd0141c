"""Drafter interface: advance on committed tokens, then draft a tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import nn

from vllm_specblock.committed import CommittedTokens
from vllm_specblock.feedback.calibration import DraftCalibration
from vllm_specblock.tree import DraftTree


@dataclass(frozen=True)
class CacheLayer:
    """One layer of a drafter in the paged cache; a token leaves `entries_per_token` keys."""

    num_kv_heads: int
    head_dim: int
    entries_per_token: int


class Drafter(ABC):
    """Anything that yields a DraftTree for every request.

    A step calls `advance` once and `draft` at most once. Between the two a drafter may hold any
    state. Between steps it keeps a request's state in the paged cache alone: requests are
    preempted, resumed, served from cached prefixes, and drafted for by other drafters.
    """

    kind: str  # its name in `speculative_config`
    num_nodes: int  # N, nodes of every tree
    max_depth: int  # of the longest path it can draft
    max_model_len: int  # tokens of the longest request; the engine sets it again before `bind`
    model: nn.Module | None = None  # its network
    calibration: DraftCalibration | None = None  # sharpens its scores by the verdicts on its nodes
    # [R] fp32, factor on the logits of a step, set by the draft policy before `advance`; None: 1.
    beta: torch.Tensor | None = None
    # Depth of its first block if it can draft that alone, else 0; whether it does so now.
    first_block, brief = 0, False

    def cache_layers(self) -> list[CacheLayer]:
        """The layers whose keys and values the engine is to keep."""
        return []

    def bind(self, caches: list[torch.Tensor]) -> None:  # noqa: B027 (not all have any)
        """Take the paged caches, one per layer of `cache_layers`.

        Each is [blocks, kv heads, block size · entries per token, 2 · head dim], keys first; entry
        slot · entries + i is the i-th of the token at `kv_slot`. Until the step ends, a drafter may
        use the slots after the root, one for each node of the verified tree.
        """

    def warm_up(self, block_table: torch.Tensor, most_rows: int) -> None:  # noqa: B027
        """Compile the kernels of later steps of at most `most_rows` rows, with empty caches bound.

        block_table: [most requests, max blocks] int32 of valid blocks.
        """

    @abstractmethod
    def advance(self, rows: CommittedTokens) -> None:
        """Write every row's keys and values, since other requests may reuse its block."""

    def finish(self, text: torch.Tensor, first: int, length: torch.Tensor) -> None:  # noqa: B027
        """Note the answer of a request that ended, to draft for others by it.

        text: [longest request] int32; first: where the answer begins; length: [] integer, where it
        ends, on the device.
        """

    def forget(self) -> None:  # noqa: B027
        """Forget all finished requests."""

    @abstractmethod
    def draft(self) -> DraftTree:
        """Return the step's R trees of `num_nodes` slots, rooted in `token[last]`."""
