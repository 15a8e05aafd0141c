"""Drafter interface: advance on committed tokens, then draft a tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from vllm_specblock.feedback.calibration import DraftCalibration
from vllm_specblock.tree import DraftTree


@dataclass(frozen=True)
class CommittedTokens:
    """The rows that one target step committed, on which drafters advance.

    Row t holds the target's states of the token at `position[t]`, and the token after it. The rows
    of a request are consecutive. Behind the accepted path there may be padding (`kv_slot` −1).

    T rows, R requests, L layers of the target that some drafter reads, B rows of its batch.
    """

    # L × [B, Ht], low layers first; in CUDA graphs one tensor.
    states: Sequence[torch.Tensor] | torch.Tensor
    source: torch.Tensor  # [T] int64, row of `states`
    token: torch.Tensor  # [T] int64, the token at position + 1, target vocabulary
    position: torch.Tensor  # [T] int64
    index: torch.Tensor  # [T] int64, place in `block_table`: less the tokens of masked blocks
    # [T] int64, the target's cache slot of that position; −1 for rows that are not stored: padding,
    # and positions before `start`.
    kv_slot: torch.Tensor
    row_start: torch.Tensor  # [R+1] int32, first row of each request
    row_start_host: list[int]
    last: torch.Tensor  # [R] int64, the newest row of each request, from which it drafts
    start: torch.Tensor  # [R] int64, the first position to store; 0 unless a block is incomplete
    block_table: torch.Tensor  # [R, max blocks] int32, without masked blocks (`CacheHoles`)
    block_size: int  # tokens in one block
    max_position: int  # host upper bound of `position`, for loop bounds only
    # [S, longest request] int32, the tokens of each of the engine's S request slots; the root, at
    # position[last] + 1, is the last valid one.
    text: torch.Tensor
    req_idx: torch.Tensor  # [R] int64, each request's row of `text`
    temperature: torch.Tensor  # [R] fp32; 0: greedy

    PER_ROW: ClassVar = ("source", "token", "position", "index", "kv_slot")
    PER_REQUEST: ClassVar = ("start", "block_table", "req_idx", "temperature")

    def request(self) -> torch.Tensor:
        """[T] int64, the request of each row."""
        row = torch.arange(len(self.token), device=self.token.device)
        return (row[:, None] >= self.row_start[1:-1]).sum(1)

    def features(self, layers: tuple[int, ...]) -> torch.Tensor:
        """[T, len(layers) · Ht], the states of `layers` (indices into `states`) side by side."""
        first, after = layers[0], layers[-1] + 1
        if isinstance(self.states, torch.Tensor) and layers == (*range(first, after),):
            rows = self.states[first:after].transpose(0, 1)
            return rows.index_select(0, self.source).flatten(1)  # one launch
        return torch.cat([self.states[layer][self.source] for layer in layers], dim=-1)


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

    Attributes:
        kind: its name in `speculative_config`.
        num_nodes: N, nodes of every tree it yields.
        max_depth: the deepest path it can draft.
        max_model_len: tokens of the longest request; the engine sets it again before `bind`.
        model: its network; None for a drafter without weights.
        calibration: sharpens its scores by the verdicts on its nodes; None: it does not learn.
        beta: [R] fp32, what it multiplies logits by in this step; the draft policy sets it before
            `advance`. None: 1.
    """

    kind: str
    num_nodes: int
    max_depth: int
    max_model_len: int
    model: nn.Module | None = None
    calibration: DraftCalibration | None = None
    beta: torch.Tensor | None = None

    def cache_layers(self) -> list[CacheLayer]:
        """The layers whose keys and values the engine is to keep."""
        return []

    def bind(self, caches: list[torch.Tensor]) -> None:  # noqa: B027 (not all have any)
        """Take the paged caches, one per layer of `cache_layers`.

        Each is [blocks, kv heads, block size · entries per token, 2 · head dim], keys first,
        under the target's block table: entry slot · entries + i is the i-th of the token at
        `kv_slot`. Slots after the root are reserved for as many tokens as the verified tree has
        nodes; a drafter may use them until the step ends.
        """

    def warm_up(self, block_table: torch.Tensor, most_rows: int) -> None:  # noqa: B027
        """Compile the kernels of later steps, with empty caches bound.

        Args:
            block_table: [most requests, max blocks] int32 of valid blocks.
            most_rows: committed rows of a step, at most.
        """

    @abstractmethod
    def advance(self, rows: CommittedTokens) -> None:
        """Write every row's keys and values; other requests may hit the blocks of any."""

    @abstractmethod
    def draft(self, requests: torch.Tensor | None = None) -> DraftTree:
        """Return trees of `num_nodes` slots, rooted in `token[last]`, of `requests` [n] int64.

        None: of all R requests of the step.
        """
