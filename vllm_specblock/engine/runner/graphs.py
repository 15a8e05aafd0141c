"""CUDA graphs of the commit and draft step, one per number of requests.

A graph serves batches in which every request decodes one committed token and up to N nodes. It
covers everything from the commit to the tokens of the next trees. Host values go to the device in
one small copy, when they change. Batches with prompt chunks run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_specblock.engine.runner.step_batch import StepBatch, rows_without_drafts
from vllm_specblock.engine.runner.tree_states import TreeStates

if TYPE_CHECKING:
    from vllm_specblock.engine.runner.speculator import TreeSpeculator


def to_scratch_slot(batch: InputBatch, scratch_idx: int) -> InputBatch:
    """Point a dummy batch at the scratch slot, as prompts, so that it overwrites no request."""
    count = batch.num_reqs
    return replace(
        batch,
        idx_mapping=torch.full_like(batch.idx_mapping, scratch_idx),
        idx_mapping_np=np.full(count, scratch_idx, dtype=np.intp),
        prefill_len_np=np.full(count, np.iinfo(np.int32).max, dtype=np.int32),
    )


def null_batch(
    batch: InputBatch, states: TreeStates, hidden_states: list[torch.Tensor], config: VllmConfig
) -> StepBatch:
    """Return a dummy step before vLLM allocates caches; all blocks are null blocks."""
    count, device = batch.num_reqs, batch.idx_mapping.device
    # vLLM's dummy requests may be longer than any real one.
    longest = int(batch.num_scheduled_tokens[:count].max())  # a host array
    block_size = config.cache_config.block_size
    blocks = -(-max(config.model_config.max_model_len, longest) // block_size)
    return StepBatch(
        batch=batch,
        tree_states=states,
        slot_mapping=torch.full((batch.num_tokens,), -1, dtype=torch.int64, device=device),
        target_slots=[],
        hidden_states=hidden_states,
        block_table=torch.zeros(count, blocks, dtype=torch.int32, device=device),
        block_size=block_size,
        masks=torch.zeros(2, count, dtype=torch.int64, device=device),
    )


_SLOT, _GOES_ON, _CHAIN = range(3)
"""Columns of the host values of a request."""


class ProposalGraphs(CudaGraphManager):
    """CudaGraphManager of the proposals; vLLM's memory profile finds it by its class.

    Captures the sizes of the target's decode graphs: by requests, or by rows where the device
    allocates the drafts. A batch between two sizes is padded with requests that own the scratch
    slot and null blocks. The drafters' input states are copied.
    """

    def __init__(self, engine: TreeSpeculator, target_mode: CUDAGraphMode) -> None:
        full = target_mode.decode_mode() == CUDAGraphMode.FULL
        mode = CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE
        vllm_config, device = engine.vllm_config, engine.device
        each = 1 if engine.enable_adaptive_verification else engine.num_speculative_tokens + 1
        super().__init__(vllm_config, device, mode, decode_query_len=each)
        self.tree_states, self.scratch_idx = engine.tree_states, engine.scratch_idx
        self.buffers, self.block_tables = engine.target_input_buffers, engine.block_tables
        self.caches, self.masks = engine.caches, engine.skipped.masks
        descs = self._capture_descs.get(CUDAGraphMode.FULL, [])
        # One row is kept for padding requests.
        longest = self.compilation_config.max_cudagraph_capture_size or 0
        self.most_rows = min(longest, self.buffers.max_num_tokens - 1)
        rows, model = self.most_rows + 1 if descs else 0, vllm_config.model_config
        shape = engine.num_inner + engine.reads_last, rows, model.get_hidden_size()
        self.hidden_states = torch.zeros(shape, dtype=model.dtype, device=device)
        most = max((desc.num_reqs for desc in descs), default=0)
        self.sent = np.zeros((most, 3), dtype=np.int64)
        self.sent[:, _SLOT] = self.scratch_idx
        self.known = torch.tensor(self.sent, device=device)  # read inside the graphs
        # Tensors that were captured must live as long as the graph.
        self.steps: dict[tuple[bool, int], StepBatch] = {}
        self.of_length: dict[bool, dict[BatchExecutionDescriptor, torch.cuda.CUDAGraph]] = {}

    def capture(
        self, step: Callable[[StepBatch], torch.Tensor], tokens: torch.Tensor, brief: bool
    ) -> None:
        """Capture `step` for every size; `tokens` [≥ most requests, N] int64 is its output.

        brief: `step` drafts the first block only; `find` looks graphs up by it.
        """

        def create_forward_fn(
            desc: BatchExecutionDescriptor, warmup: bool
        ) -> Callable[[CUDAGraphMode], None]:
            count = desc.num_reqs
            self.steps[brief, count] = rows = self._step(count, tokens[:count])

            def forward(cg_mode: CUDAGraphMode) -> None:
                slot, rows.goes_on, rows.chain = self.known[:count].unbind(1)
                rows.read_accepted(slot)
                step(rows)

            return forward

        self.graphs = self.of_length[brief] = {}
        super().capture(create_forward_fn, "Capturing SpecBlock proposals")

    def _step(self, count: int, tokens: torch.Tensor) -> StepBatch:
        """Return `count` requests with N nodes each, in persistent buffers."""
        num_nodes, group = self.tree_states.num_nodes, self.caches.group
        slots = self.block_tables.get_dummy_slot_mappings(self.most_rows + 1)
        batch = replace(
            InputBatch.make_dummy(count, count, self.buffers),
            idx_mapping=self.known[:count, _SLOT],
            query_start_loc=self.buffers.query_start_loc[: count + 1],
            num_tokens=self.most_rows + 1,
            positions=self.buffers.positions[: self.most_rows + 1],
            num_scheduled_tokens=np.full(count, num_nodes + 1, dtype=np.int32),
            num_draft_tokens=count * num_nodes,
            num_draft_tokens_per_req=np.full(count, num_nodes, dtype=np.int32),
            # An upper bound for every replay.
            seq_lens_cpu_upper_bound=torch.full(
                (count,), self.vllm_config.model_config.max_model_len, dtype=torch.int32
            ),
        )
        return StepBatch(
            batch=batch,
            tree_states=self.tree_states,
            slot_mapping=slots[group],
            target_slots=[slots[each] for each, _ in self.caches.target],
            hidden_states=self.hidden_states,
            block_table=self.block_tables.get_dummy_block_tables(count)[group],
            block_size=self.block_tables.block_sizes[group],
            masks=self.masks[:, :count],
            tokens=tokens,
        )

    def find(self, batch: InputBatch, dummy: bool, brief: bool) -> BatchExecutionDescriptor | None:
        """Return the graph for the `batch` of a step; None: run it eagerly.

        In a dummy batch, which has no drafts, requests of up to N + 1 rows count as decoding.
        """
        count, each = batch.num_reqs, self.decode_query_len
        most = self.tree_states.num_nodes + 1 if dummy else 1
        if (rows_without_drafts(batch) > most).any() or batch.num_tokens > self.most_rows:
            return None
        self.graphs = self.of_length.get(brief, self.graphs)  # none yet in a dry run
        desc = self.dispatch(count, count * each, each, num_active_loras=0)
        return desc if desc.cg_mode == CUDAGraphMode.FULL else None

    def fill(
        self,
        desc: BatchExecutionDescriptor,
        batch: InputBatch,
        hidden_states: list[torch.Tensor],
        chain: np.ndarray,
    ) -> None:
        """Copy the values of a step to the graph's buffers; it reads all others from vLLM's.

        hidden_states: per layer [batch rows, Ht]; chain: [requests] bool, on the host.
        """
        count, size, num_rows = batch.num_reqs, desc.num_reqs, batch.num_tokens
        known = np.zeros((size, 3), dtype=np.int64)
        known[:, _SLOT] = self.scratch_idx
        known[:count, _SLOT] = batch.idx_mapping_np
        done = batch.num_computed_prefill_tokens_np + batch.num_scheduled_tokens[:count]
        known[:count, _GOES_ON] = done >= batch.prefill_len_np
        known[:count, _CHAIN] = chain
        if not np.array_equal(known, self.sent[:size]):  # changes only with the batch
            self.sent[:size] = known
            async_tensor_h2d(known, out=self.known[:size])
        starts = self.buffers.query_start_loc[: count + 1]
        if batch.query_start_loc.data_ptr() != starts.data_ptr():  # the device allocated the drafts
            starts.copy_(batch.query_start_loc[: count + 1])
        # n-gram lookup reads none, though vLLM passes one.
        wanted = list(zip(self.hidden_states, hidden_states))
        if wanted:  # one launch for all
            torch._foreach_copy_(
                [buffer[:num_rows] for buffer, _ in wanted],
                [states[:num_rows] for _, states in wanted],
            )
        if count < size:
            # A padding request drafts into the slots after its root: point it at null blocks, not
            # at those of an earlier batch. At position 0 it attends to nothing.
            self.block_tables.input_block_tables[self.caches.group][count:size].zero_()
            self.buffers.positions[num_rows].zero_()
