"""Steps that drafters skip: rows to read later, and holes in the drafters' caches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_specblock.drafters.common.missed_rows import Backlog, CacheHoles, MissedRows
from vllm_specblock.engine.adaptive import TreeBudgetManager
from vllm_specblock.engine.device import device_of
from vllm_specblock.engine.runner.draft_policy import DraftPolicy, SkippingMergedDrafters
from vllm_specblock.engine.runner.step_batch import missed_rows, rows_without_drafts
from vllm_specblock.engine.runner.tree_states import TreeStates

States = list[torch.Tensor]
"""[batch rows, Ht] for each layer of the target that drafters read."""


class SkippedSteps:
    """Rows that the drafters have missed.

    On a CPU they are kept until the drafters read again. Rows that are never read leave holes in
    the drafters' caches; blocks with holes are masked.

    Attributes:
        has_caches: a drafter has a cache and must read every committed row.
        backlog: rows to read later; None: there is no such drafter, or it is on a GPU.
        holes: incomplete cache blocks; None: there is no such drafter, or no cache yet.
        masks: [2, requests] int64; blind: [R] bool, requests of this step that cannot draft; see
            `CacheHoles.mask`.
        adaptive: the budget manager, once vLLM has built it; None: budgets are fixed.
        resumes: the drafters can draft after steps that they have not read.
        blocks_shared: later requests may reuse the blocks of a request without drafts.
    """

    holes: CacheHoles | None = None
    blind: torch.Tensor | None = None
    adaptive: TreeBudgetManager | None = None

    def __init__(
        self, config: VllmConfig, has_caches: bool, tree_states: TreeStates, device: torch.device
    ) -> None:
        self.tree_states, self.has_caches = tree_states, has_caches
        on_host = device_of(device).on_host
        self.backlog = Backlog() if has_caches and on_host else None
        self.resumes = on_host or not has_caches
        self.blocks_shared = has_caches and config.cache_config.enable_prefix_caching
        most_requests = config.scheduler_config.max_num_seqs
        self.masks = torch.zeros(2, most_requests, dtype=torch.int64, device=device)

    def track(self, num_blocks: int, block_size: int, policy: DraftPolicy) -> None:
        """Track holes in the cache blocks; a policy that skips drafters masks them itself."""
        if not self.has_caches:
            return
        self._masks_here = not isinstance(policy, SkippingMergedDrafters)
        masks = self.masks if self._masks_here else torch.zeros_like(self.masks)
        self.holes = CacheHoles(num_blocks, block_size, masks)
        policy.holes = None if self._masks_here else self.holes

    def can_keep(self, batch: InputBatch, states: States) -> bool:
        """Return whether the drafters can read a step later, or need not read it."""
        room = self.backlog is None or self.backlog.has_room(batch.num_tokens, states)
        return self.resumes and room

    def must_read(
        self, batch: InputBatch, states: States, kv_slot: Callable[[], torch.Tensor]
    ) -> bool:
        """Return whether drafters must read a batch without drafts now.

        Otherwise its rows are kept for later, or skipped if drafting is paused. Later requests may
        reuse a block once it is full. kv_slot: returns the rows' slots, [≥ batch rows] int64.
        """
        if self.holes is None or not self.blocks_shared:
            return False
        paused = self.adaptive is not None and self.adaptive.all_paused
        block = batch.num_computed_tokens_np // self.holes.block_size
        after = batch.num_computed_tokens_np + batch.num_scheduled_tokens[: batch.num_reqs]
        if paused:
            self.holes.skip(kv_slot()[: batch.num_tokens])
        elif self.backlog is None or (after // self.holes.block_size > block).any():  # host arrays
            return True
        if self.backlog is not None:
            self.backlog.keep(missed_rows(batch, states), np.full(batch.num_reqs, not paused))
        return False

    def skip(
        self, batch: InputBatch, rows: Callable[[], MissedRows], kv_slot: torch.Tensor, paused: bool
    ) -> None:
        """Keep the `rows` of a step that no drafter reads; kv_slot: [T] int64, their slots."""
        if self.holes is not None:
            self.holes.skip(kv_slot)
        wanted = np.ones(batch.num_reqs, dtype=bool)
        if paused and self.adaptive is not None:
            wanted = ~self.adaptive.undrafted[batch.idx_mapping_np]
        if self.backlog is not None:
            self.backlog.keep(rows(), wanted)
        if self.adaptive is not None and not paused:
            self.adaptive.drafted(self.adaptive.clock.mark(), asked=False)
        self.nothing_drafted(batch.idx_mapping, confidence=float(not paused))

    def nothing_drafted(self, req_idx: torch.Tensor, confidence: float = 1.0) -> None:
        """Mark the drafts scheduled next as placeholders; the manager ignores a confidence of 1."""
        self.tree_states.accepted.index_fill_(0, req_idx, 0)
        if self.adaptive is not None:
            self.adaptive.confidence[: len(req_idx)] = confidence

    def mask(self, batch: InputBatch, table: torch.Tensor) -> None:
        """Mask incomplete blocks in the batch's `table` [≥ R, max blocks] int32, in place."""
        if self.holes is None or not self._masks_here or not self.holes.any:
            return
        num_reqs = batch.num_reqs
        end = async_tensor_h2d(rows_without_drafts(batch).astype(np.int64), device=table.device)
        first = batch.positions[batch.query_start_loc[:num_reqs].long()]
        last = first + end - 1 + self.tree_states.accepted[batch.idx_mapping.long()]
        if self.backlog is not None:
            missed = [self.backlog.rows(index) for index in batch.idx_mapping_np.tolist()]
            first = first - torch.tensor(missed)
        # Drafting writes to the slots after the root.
        longest = int(batch.seq_lens_cpu_upper_bound[:num_reqs].max())  # a host tensor
        width = (longest + self.tree_states.num_nodes) // self.holes.block_size + 1
        self.blind = self.holes.mask(table[:num_reqs, :width], first, last)

    def discard_blind(self, req_idx: torch.Tensor) -> None:
        """Discard the trees of requests whose drafter could not see their newest tokens."""
        if self.blind is None:
            return
        blind, states = self.blind[:, None], self.tree_states
        for field, none in ((states.parent, -1), (states.origin, 0), (states.score, -torch.inf)):
            field[req_idx] = field[req_idx].masked_fill(blind, none)
        if self.adaptive is not None:
            self.adaptive.confidence[: len(blind)].masked_fill_(blind, 0)
