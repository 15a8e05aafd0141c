"""CUDA graphs of the commit and draft step, one per number of requests.

A graph serves batches in which every request decodes: one committed token and up to N nodes,
hence 1 + D rows for the drafters, whatever was scheduled or accepted. Batches with prompt chunks
run the same function eagerly.

Inside a graph is everything from the commit to the tokens of the next trees. Outside is what
the host knows: it goes to the device in one small copy before a replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

from vllm_specblock.engine.runner.step_batch import StepBatch
from vllm_specblock.engine.runner.tree_states import TreeStates


@dataclass(frozen=True)
class StepInputs:
    """All that a proposal reads of a step of the target.

    Attributes (R requests):
        rows: the batch, row by row.
        slot_mapping: [≥ batch rows] int64, of the drafters' cache group.
        target_slots: likewise, of each set of the target's caches.
        hidden_states: per layer that a drafter reads [≥ batch rows, Ht].
        block_table: [R, max blocks] int32.
        block_size: tokens per block.
        chain: [R] bool or integers (not 0), requests that verify a chain; None: no one does.
    """

    rows: StepBatch
    slot_mapping: torch.Tensor
    target_slots: list[torch.Tensor]
    hidden_states: list[torch.Tensor]
    block_table: torch.Tensor
    block_size: int
    chain: torch.Tensor | None


Step = Callable[[StepInputs], torch.Tensor]
"""A proposal: commits, drafts, keeps the trees; returns their tokens, [R, N] int64."""

_SLOT, _GOES_ON, _CHAIN = range(3)
"""Columns of what the host knows of a request."""


class GraphStepBatch(StepBatch):
    """StepBatch of a batch that a graph reads from fixed addresses.

    Differs in that the layout is that of R requests with N nodes each, and stays. What changes
    from step to step is read again by `read`, inside the graph.

    Args:
        batch: R requests in persistent buffers, N nodes each.
        known: [R, 3] int64, see `_SLOT` and its neighbours.
    """

    def __init__(self, batch: InputBatch, tree_states: TreeStates, known: torch.Tensor) -> None:
        super().__init__(batch, tree_states, pad=True)
        self.known = known

    def read(self) -> None:
        """Take in the step's own values."""
        self.goes_on, self.chain = self.known[:, _GOES_ON], self.known[:, _CHAIN]
        self.read_accepted(self.known[:, _SLOT])


class ProposalGraphs(CudaGraphManager):
    """CudaGraphManager of the proposals; vLLM's memory profile knows it by its class.

    Serves the decode batches that the target's graphs serve: as many requests, or, where the
    device shares out the drafts, as many rows. A batch between two sizes is filled up with
    requests that own the spare slot and null blocks: they commit nothing, and count nowhere.

    Keeps a copy of the drafters' input states, (layers read) · (largest capture size + 1) · Ht
    elements: 12 MiB for three layers of 4096 in bfloat16 at 512 rows.

    Args:
        varlen: the device shares out the drafts: a request has any number of them up to N.
        tree_states: the engine's; its last one is the spare.
        num_states: layers of the target that a drafter reads.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        cudagraph_mode: CUDAGraphMode,
        varlen: bool,
        tree_states: TreeStates,
        num_states: int,
        target_buffers: InputBuffers,
        block_tables: BlockTables,
        group: int,
    ) -> None:
        each = 1 if varlen else tree_states.num_nodes + 1
        super().__init__(vllm_config, device, cudagraph_mode, decode_query_len=each)
        self.tree_states, self.scratch_idx = tree_states, len(tree_states.accepted) - 1
        self.buffers, self.block_tables, self.group = target_buffers, block_tables, group
        descs = self._capture_descs.get(CUDAGraphMode.FULL, [])
        # One row remains for those who fill up.
        self.most_rows = min(
            self.compilation_config.max_cudagraph_capture_size or 0,
            target_buffers.max_num_tokens - 1,
        )
        model = vllm_config.model_config
        self.hidden_states = [
            torch.zeros(
                self.most_rows + 1 if descs else 0,
                model.get_hidden_size(),
                dtype=model.dtype,
                device=device,
            )
            for _ in range(num_states)
        ]
        most = max((desc.num_reqs for desc in descs), default=0)
        self.known = torch.zeros(most, 3, dtype=torch.int64, device=device)
        self.known[:, _SLOT] = self.scratch_idx
        # vLLM's own lie elsewhere where the device shares out the drafts.
        self.query_start = torch.zeros(most + 1, dtype=torch.int32, device=device)
        # What a graph was captured with has to live as long as the graph.
        self.rows: dict[int, GraphStepBatch] = {}

    # ---- once ----

    def capture(self, step: Step, tokens: torch.Tensor, target_groups: list[int]) -> None:
        """Capture `step` for every size.

        Args:
            target_groups: cache group of each set of the target's caches.
            tokens: [≥ most requests, N] int64, where every replay leaves its tokens.
        """

        def create_forward_fn(
            desc: BatchExecutionDescriptor, warmup: bool
        ) -> Callable[[CUDAGraphMode], None]:
            count = desc.num_reqs
            rows = self._rows(count)
            slots = self.block_tables.get_dummy_slot_mappings(self.most_rows + 1)
            inputs = {
                "slot_mapping": slots[self.group],
                "target_slots": [slots[group] for group in target_groups],
                "block_table": self.block_tables.get_dummy_block_tables(count)[self.group],
                "block_size": self.block_tables.block_sizes[self.group],
                "hidden_states": self.hidden_states,
            }

            def forward(cg_mode: CUDAGraphMode) -> None:
                rows.read()
                tokens[:count] = step(StepInputs(rows, chain=rows.chain, **inputs))

            return forward

        super().capture(create_forward_fn, "Capturing SpecBlock proposals")

    def _rows(self, count: int) -> GraphStepBatch:
        num_nodes = self.tree_states.num_nodes
        batch = InputBatch.make_dummy(count, count, self.buffers)
        if count not in self.rows:
            batch = replace(
                batch,
                idx_mapping=self.known[:count, _SLOT],
                query_start_loc=self.query_start[: count + 1],
                num_tokens=self.most_rows + 1,
                positions=self.buffers.positions[: self.most_rows + 1],
                num_scheduled_tokens=np.full(count, num_nodes + 1, dtype=np.int32),
                num_draft_tokens=count * num_nodes,
                num_draft_tokens_per_req=np.full(count, num_nodes, dtype=np.int32),
                # Bounds have to hold at every replay.
                seq_lens_cpu_upper_bound=torch.full(
                    (count,), self.vllm_config.model_config.max_model_len, dtype=torch.int32
                ),
            )
            self.rows[count] = GraphStepBatch(batch, self.tree_states, self.known[:count])
        return self.rows[count]

    # ---- once per step ----

    def find(self, batch: InputBatch, dummy: bool) -> BatchExecutionDescriptor | None:
        """The graph that serves `batch`; None if it has to run eagerly.

        Args:
            dummy: the batch is vLLM's, without drafts: as many rows as a decode step has at
                most are taken for one.
        """
        count, each = batch.num_reqs, self.decode_query_len
        scheduled = batch.num_scheduled_tokens[:count]
        if dummy:
            decodes = (scheduled <= self.tree_states.num_nodes + 1).all()
        else:
            drafts = batch.num_draft_tokens_per_req
            decodes = (scheduled - (0 if drafts is None else drafts) == 1).all()
        if not decodes or batch.num_tokens > self.most_rows:
            return None
        desc = self.dispatch(count, count * each, each, num_active_loras=0)
        return desc if desc.cg_mode == CUDAGraphMode.FULL else None

    def fill(
        self,
        desc: BatchExecutionDescriptor,
        batch: InputBatch,
        hidden_states: list[torch.Tensor],
        chain: np.ndarray,
    ) -> None:
        """Bring a step's values to where the graph of `desc` reads them.

        Positions, cache slots and block tables are there already: vLLM's own buffers are read.

        Args:
            hidden_states: per layer [batch rows, Ht].
            chain: [requests] bool, on the host.
        """
        count, size, num_rows = batch.num_reqs, desc.num_reqs, batch.num_tokens
        known = np.zeros((size, 3), dtype=np.int64)
        known[:, _SLOT] = self.scratch_idx
        known[:count, _SLOT] = batch.idx_mapping_np
        done = batch.num_computed_prefill_tokens_np + batch.num_scheduled_tokens[:count]
        known[:count, _GOES_ON] = done >= batch.prefill_len_np
        known[:count, _CHAIN] = chain
        async_tensor_h2d(known, out=self.known[:size])
        self.query_start[: count + 1].copy_(batch.query_start_loc[: count + 1])
        # An n-gram drafter reads none, though vLLM hands one on.
        wanted = list(zip(self.hidden_states, hidden_states or ()))
        if wanted:  # all of them in one launch
            torch._foreach_copy_(
                [buffer[:num_rows] for buffer, _ in wanted],
                [states[:num_rows] for _, states in wanted],
            )
        if count < size:
            # Whoever had these rows in an earlier batch may still own the blocks, and a filler
            # drafts into the slots behind its root. At position 0 it has nothing to attend to.
            self.block_tables.input_block_tables[self.group][count:size].zero_()
            self.buffers.positions[num_rows].zero_()
            self.query_start[count + 1 : size + 1].fill_(num_rows)
