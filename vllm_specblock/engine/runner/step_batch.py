"""Inputs of a step: committed rows and their destinations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_specblock.commit import committed_tokens
from vllm_specblock.committed import CommittedTokens
from vllm_specblock.engine.runner.tree_states import TreeStates
from vllm_specblock.triton_kernels.kv_cache.commit import AcceptedRows
from vllm_specblock.triton_kernels.kv_cache.committed_tokens import StepRows


class TextRows(NamedTuple):
    """What of `CommittedTokens` a drafter reads that follows the text alone."""

    text: torch.Tensor
    req_idx: torch.Tensor
    position: torch.Tensor  # [R] int64, of the newest rows alone
    last: torch.Tensor
    temperature: torch.Tensor


def rows_without_drafts(batch: InputBatch) -> np.ndarray:
    """Return the number of each request's rows up to and including its root, [R] integers.

    vLLM's counts on the host include all scheduled drafts, verified or not.
    """
    scheduled, drafts = batch.num_scheduled_tokens[: batch.num_reqs], batch.num_draft_tokens_per_req
    return scheduled if drafts is None else scheduled - drafts


@dataclass(eq=False, kw_only=True)
class StepBatch:
    """One batch of R requests: its committed rows and their destinations.

    A request's rows in the batch are `base` rows up to and including the root, then its nodes.
    The base rows and the accepted path are committed.
    """

    batch: InputBatch
    tree_states: TreeStates
    slot_mapping: torch.Tensor  # [≥ batch rows] int64, of the drafters' cache group
    target_slots: list[torch.Tensor]  # the same for each set of the target's caches
    # [≥ batch rows, Ht] for each layer that drafters read, then those that the recorder reads.
    hidden_states: list[torch.Tensor] | torch.Tensor
    block_table: torch.Tensor  # [R, max blocks] int32, of the drafters' cache group
    block_size: int  # tokens per block
    masks: torch.Tensor  # [2, R] int64, see `CacheHoles.mask`
    chain: torch.Tensor | None = None  # [R] nonzero: verify a chain; None: all verify trees
    tokens: torch.Tensor | None = None  # [R, N] int64, to write the trees' tokens to
    # A request with drafts gets D rows for its path, so that shapes follow from the schedule.
    # False, on the host: it gets as many as it needs, or a few more.
    pad: bool = True
    text_only: bool = False  # no drafter reads more, and the host has `TextRows`

    def __post_init__(self) -> None:
        batch, num_reqs, device = self.batch, self.batch.num_reqs, self.block_table.device
        base = rows_without_drafts(batch)

        def put(array: np.ndarray, dtype: type = np.int64) -> torch.Tensor:
            made = torch.from_numpy(array.astype(dtype, copy=False))
            return async_tensor_h2d(made, device=device) if self.pad else made

        self.base = put(base)
        prompt_done = batch.num_computed_prefill_tokens_np + batch.num_scheduled_tokens[:num_reqs]
        self.goes_on = put(prompt_done >= batch.prefill_len_np, bool)  # [R], has a root
        self.read_accepted(batch.idx_mapping)
        if self.text_only:
            return
        has_drafts = base < batch.num_scheduled_tokens[:num_reqs]
        path = most = has_drafts * self.tree_states.max_depth
        if not self.pad:
            path = has_drafts * self.accepted_rows.accepted.numpy()  # a host tensor
            # A CPU prepares its matrix products again for every new number of rows: from 16 on,
            # only multiples of 8 occur, if there is room for padding.
            rows, room = int((base + path).sum()), most - path  # a host array
            missing = -rows % 8 if rows > 16 else 0
            path = path + np.clip(missing - (np.cumsum(room) - room), 0, room)
        counts = base + path
        self.row_start_host = [0, *np.cumsum(counts).tolist()]  # a host array
        request = np.repeat(np.arange(num_reqs), counts)
        local = np.arange(len(request)) - np.repeat(self.row_start_host[:-1], counts)
        self.request, self.local = put(request), put(local)
        self.row_start = put(np.array(self.row_start_host), np.int32)

    def read_accepted(self, slot: torch.Tensor) -> None:
        """Load the accepted paths of the slots [R] int64; a request without a root has none."""
        start, end = self.batch.query_start_loc[: len(slot)], self.batch.query_start_loc[1:]
        # [R], nodes that the target ran on; the host knows only how many were scheduled.
        self.drafts = (end[: len(slot)] - start - self.base) * self.goes_on
        path, accepted = self.tree_states.path[slot], self.tree_states.accepted[slot]
        self.accepted_rows = AcceptedRows(start, self.base, path, accepted)

    def committed(self, num_layers: int, text: torch.Tensor, temperature: torch.Tensor) -> Any:
        """Return the CommittedTokens or TextRows of drafters that read `num_layers` layers.

        text: [slots, max_model_len] int32, this step's tokens included; temperature: [slots] fp32.
        """
        batch = self.batch
        if self.text_only:
            start, base, _, accepted = self.accepted_rows
            slots, newest = batch.idx_mapping.long(), batch.positions[start + base - 1] + accepted
            return TextRows(text, slots, newest, torch.arange(len(slots)), temperature[slots])
        own = self.request, self.local, self.row_start
        of_batch = batch.positions, self.slot_mapping, batch.idx_mapping
        step = StepRows(*self.accepted_rows, *own, *of_batch, text, temperature, *self.masks)
        rows = committed_tokens(step, batch.num_tokens)._asdict()
        bound = batch.seq_lens_cpu_upper_bound[: batch.num_reqs]
        return CommittedTokens(
            index=rows.pop("place"),
            **rows,
            states=self.hidden_states[:num_layers],
            row_start=self.row_start,
            row_start_host=self.row_start_host,
            block_table=self.block_table,
            block_size=self.block_size,
            max_position=int(bound.max()) - 1,  # a host tensor
            text=text,
            req_idx=batch.idx_mapping.long(),
        )
