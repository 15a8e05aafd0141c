"""Steps that drafters skip: rows to read later, and holes in the drafters' caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_specblock.cache_holes import CacheHoles
from vllm_specblock.committed import CommittedTokens, MissedRows
from vllm_specblock.drafters.common.missed_rows import MOST_BYTES, Backlog
from vllm_specblock.drafters.interface import Drafter
from vllm_specblock.engine.device import device_of
from vllm_specblock.engine.runner.step_batch import rows_without_drafts
from vllm_specblock.engine.runner.tree_states import TreeStates


class SkippedSteps:
    """Rows that the drafters have missed.

    On a CPU they are kept until the drafters read again. Rows that are never read leave holes in
    the drafters' caches; blocks with holes are masked.

    Attributes:
        has_caches: a drafter has a cache and must read every committed row.
        blocks_shared: later requests may reuse the blocks of a request without drafts.
        backlog: rows to read later, none on a GPU.
        holes: incomplete cache blocks; None: no drafter has a cache, or there is none yet.
        masks: [2, ≥ R] int64, see `CacheHoles.mask`; CUDA graphs read them.
        blind: [S] bool by request slot, requests whose next trees are empty; see there, too.
    """

    holes: CacheHoles | None = None

    def __init__(
        self, config: VllmConfig, drafters: list[Drafter], num_slots: int, device: torch.device
    ) -> None:
        self.has_caches = any(each.cache_layers() for each in drafters)
        self.blocks_shared = self.has_caches and config.cache_config.enable_prefix_caching
        self.backlog = Backlog(MOST_BYTES * (self.has_caches and device_of(device).on_host))
        self.masks = torch.zeros(2, num_slots, dtype=torch.int64, device=device)
        self.blind = torch.zeros(num_slots, dtype=torch.bool, device=device)

    def track(self, num_blocks: int, block_size: int) -> None:
        """Track holes in the cache blocks."""
        if self.has_caches:
            self.holes = CacheHoles(num_blocks, block_size, self.masks, self.blind)

    def begin(self, req_idx: int) -> None:
        """Reset the slot of a new request."""
        self.backlog.forget(req_idx)
        self.blind[req_idx].fill_(False)

    def behind(self, req_idx: Sequence[int]) -> int:
        """Return how many rows of these requests can be read later."""
        return sum(map(self.backlog.rows, req_idx)) if self.backlog.pieces else 0

    def can_skip(self, batch: InputBatch, states: Sequence[torch.Tensor], undrafted: bool) -> bool:
        """Return whether the drafters can read a step later, or need not read it.

        Later requests may reuse a block of `undrafted` requests once it is full.
        """
        if self.holes is None:
            return True
        begin, size = batch.num_computed_tokens_np, self.holes.block_size
        end = begin + batch.num_scheduled_tokens[: batch.num_reqs]
        fills = undrafted and (end // size > begin // size).any()  # host arrays
        return not fills and self.backlog.has_room(batch.num_tokens, states)

    def skip(
        self, kv_slot: torch.Tensor, rows: Callable[[], MissedRows], wanted: np.ndarray | bool
    ) -> None:
        """Note `rows` that no drafter reads now; kv_slot: [T] int64, their slots.

        wanted: [R] bool, requests whose rows are kept.
        """
        if self.holes is not None:
            self.holes.skip(kv_slot)
        if self.backlog.most_bytes:
            self.backlog.keep(rows(), wanted)

    def read(self, rows: CommittedTokens) -> CommittedTokens:
        """Return a step's rows behind those that were kept, with incomplete blocks masked."""
        rows = self.backlog.catch_up(rows)
        if self.holes is not None and self.holes.any:
            rows = self.holes.masked(rows)
        return rows

    def mask(self, batch: InputBatch, table: torch.Tensor, states: TreeStates) -> None:
        """Mask incomplete blocks for a graph, in `table` [≥ R, max blocks] int32, in place.

        Each of the R requests has one row and its drafts.
        """
        if self.holes is None or not self.holes.any:
            return
        count, req_idx = batch.num_reqs, batch.idx_mapping.long()
        first = batch.positions[batch.query_start_loc[:count].long()]
        # Drafting writes to the slots after the root.
        longest = int(batch.seq_lens_cpu_upper_bound[:count].max())  # a host tensor
        width = (longest + states.num_nodes) // self.holes.block_size + 1
        last = first + states.accepted[req_idx]
        self.holes.mask(table[:count, :width], first, last, req_idx)


def all_rows(batch: InputBatch, states: Sequence[torch.Tensor]) -> MissedRows:
    """Return all rows of a batch without drafts, or with none left of them, on a CPU."""
    length = rows_without_drafts(batch)
    begin = length.cumsum() - length
    position = batch.positions.numpy()[begin]  # a host tensor
    return MissedRows(batch.idx_mapping_np, tuple(states), None, begin, length, position)
