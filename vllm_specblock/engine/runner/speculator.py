"""Tree speculator: commit the accepted path, advance the drafters, draft, store the trees."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_specblock.drafters.common.backlog import MissedRows
from vllm_specblock.drafters.interface import CommittedTokens
from vllm_specblock.engine.adaptive.budget import clock
from vllm_specblock.engine.metrics.counters import Counts
from vllm_specblock.engine.runner.dummy import null_inputs, to_scratch_slot
from vllm_specblock.engine.runner.graphs import StepInputs
from vllm_specblock.engine.runner.speculator_setup import SpeculatorSetup
from vllm_specblock.engine.runner.step_batch import StepBatch, missed_rows, rows_without_drafts
from vllm_specblock.engine.undrafted import fills_block, wants_drafts
from vllm_specblock.feedback.verified_trees import VerifiedTrees

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.dp_utils import DPSyncState


class TreeSpeculator(SpeculatorSetup):
    """DraftModelSpeculator that proposes trees.

    Unlike vLLM's speculators it also commits: a target step leaves the keys, values and hidden
    states of the accepted path scattered among rejected nodes, and later steps need them in order.
    """

    _counted = True
    """The last step added to the counters."""

    def capture(self) -> None:
        self.forget_warm_up()
        self._compile_kernels()
        groups = [group for group, _ in self.target_caches]
        self.graphs.capture(self.step, self.draft_tokens, groups)

    # ---- once per request ----

    def note_request(self, req_idx: int, params: SamplingParams | None) -> None:
        """Store the sampling parameters of a new request, and reset the state of its slot."""
        temperature = 0.0 if params is None else params.temperature
        self.temperature[req_idx].fill_(temperature)
        self.draft_policy.begin(req_idx)
        drafts = wants_drafts(params)
        self.undrafted[req_idx] = not drafts
        if self.adaptive is not None:
            self.adaptive.add(req_idx, samples=temperature > 0, drafts=drafts)
        if self.backlog is not None:
            self.backlog.forget(req_idx)
        self.chains.note(req_idx, params)

    # ---- once per step ----

    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        dp_sync_state: DPSyncState | None = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        mm_inputs: tuple[list[torch.Tensor], torch.Tensor] | None = None,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
    ) -> torch.Tensor:
        batch = to_scratch_slot(input_batch, self.scratch_idx) if dummy_run else input_batch
        aux_hidden_states = aux_hidden_states or []
        if self.reads_last:
            aux_hidden_states = [*aux_hidden_states, last_hidden_states]
        if self.recorder is not None and not dummy_run:
            self.recorder.turn(batch.idx_mapping_np)
        if skip_attn_for_dummy_run:
            self._bind_null_caches()
            size = self.vllm_config.cache_config.block_size
            rows = StepBatch(batch, self.tree_states, self.pad_rows)
            return self.step(null_inputs(rows, aux_hidden_states, size, self.max_model_len))
        self.blind = None
        undrafted = self.undrafted[batch.idx_mapping_np]
        paused = not dummy_run and self.adaptive is not None and self.adaptive.is_paused(batch)
        # 0 comes from vLLM's schedule by batch size and, from 0.33 on, in prompt chunks and last
        # steps.
        draft = num_speculative_tokens != 0
        counted, self._counted = self._counted, batch.num_draft_tokens > 0
        if undrafted.all():  # a host array
            self._follow(batch, slot_mappings, aux_hidden_states)
            tokens = self._no_trees(batch.num_reqs)
        elif paused or (not draft and self._can_skip(batch, aux_hidden_states)):
            if self.recorder is not None:
                self.recorder.pause(batch.idx_mapping_np)
            missed = partial(missed_rows, batch, aux_hidden_states[: self.num_layers])
            skipped = self._slots(batch, slot_mappings)
            if batch.num_draft_tokens:  # drafted before the pause
                inputs = self._inputs(batch, slot_mappings, aux_hidden_states)
                self.settle(inputs)
                committed = self._committed(inputs)
                missed, skipped = partial(MissedRows.of, committed), committed.kv_slot
            if self.holes is not None:
                self.holes.skip(skipped)
            if paused and self.adaptive is not None:
                self.adaptive.pause(batch, missed)
            else:
                self._skip(batch, missed)
            tokens = self._no_trees(batch.num_reqs)
        else:
            self._counted = True
            began = clock()
            graph = self.graphs.find(batch, dummy_run) if draft else None
            if graph is None:
                inputs = self._inputs(batch, slot_mappings, aux_hidden_states)
                # A GPU pads its batches and drafts for all requests.
                if draft and undrafted.any() and not self.pad_rows:  # a host array
                    wanted = np.flatnonzero(~undrafted)
                    self.draft_policy.wanted = torch.from_numpy(wanted)  # a host array
                tokens = self.step(inputs, draft)
                self.draft_policy.wanted = None
            else:
                self.graphs.fill(
                    graph, batch, aux_hidden_states, self.chains.among(batch.idx_mapping_np)
                )
                self._mask(batch)
                self.graphs.run_fullgraph(graph)
                tokens = self.draft_tokens[: batch.num_reqs]
            if self.blind is not None:
                self._discard(batch.idx_mapping, self.blind)
            if self.adaptive is not None:
                prompts = batch.num_reqs if batch.has_prefill and not dummy_run else 0
                policy = self.draft_policy
                self.adaptive.drafted(clock() - began, policy.asked, policy.read, prompts)
        # A GPU's counts are on the host one step later.
        if not dummy_run and (counted or self._counted or self.recorder is not None):
            self.counters.publish(self._more_counts)
        return tokens

    def _follow(
        self,
        batch: InputBatch,
        slot_mappings: dict[str, torch.Tensor],
        hidden_states: list[torch.Tensor],
    ) -> None:
        """Let the drafters read a batch in which every request declined drafts."""
        if self.holes is None or not self.follows:
            return
        block_size = self.block_tables.block_sizes[self.group]
        if self.adaptive is not None and self.adaptive.drafting_state.all_paused:
            self.holes.skip(self._slots(batch, slot_mappings))
            if self.backlog is not None:
                rows = missed_rows(batch, hidden_states[: self.num_layers])
                self.backlog.keep(rows, np.zeros(batch.num_reqs, dtype=bool))
        elif self.backlog is None or fills_block(batch, block_size):
            self.step(self._inputs(batch, slot_mappings, hidden_states), draft=False)
        else:
            rows = missed_rows(batch, hidden_states[: self.num_layers])
            self.backlog.keep(rows, np.ones(batch.num_reqs, dtype=bool))

    def _inputs(
        self,
        batch: InputBatch,
        slot_mappings: dict[str, torch.Tensor],
        hidden_states: list[torch.Tensor],
    ) -> StepInputs:
        """Return the inputs of an eager step."""
        self._mask(batch)
        chain = self.chains.among(batch.idx_mapping_np)
        slots = {group: slot_mappings[name] for group, name in self.layer_of.items()}
        return StepInputs(
            StepBatch(batch, self.tree_states, self.pad_rows, self.reads_rows),
            slots[self.group],
            [slots[group] for group, _ in self.target_caches],
            hidden_states,
            self.block_tables.input_block_tables[self.group][: batch.num_reqs],
            self.block_tables.block_sizes[self.group],
            self.masks[:, : batch.num_reqs],
            async_tensor_h2d(chain, device=self.device) if chain.any() else None,
        )

    def _slots(self, batch: InputBatch, slot_mappings: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the drafters' cache slots of a batch, [rows] int64."""
        return slot_mappings[self.layer_of[self.group]][: batch.num_tokens]

    def _mask(self, batch: InputBatch) -> None:
        """Mask cache blocks with rows that the drafters skipped; vLLM gathers its tables anew."""
        if self.holes is None or self.draft_policy.holes is not None or not self.holes.any:
            return
        num_reqs, req_idx = batch.num_reqs, batch.idx_mapping
        end = async_tensor_h2d(rows_without_drafts(batch).astype(np.int64), device=self.device)
        first = batch.positions[batch.query_start_loc[:num_reqs].long()]
        last = first + end - 1 + self.tree_states.accepted[req_idx.long()]
        if self.backlog is not None:
            missed = [self.backlog.rows(index) for index in batch.idx_mapping_np.tolist()]
            first = first - torch.tensor(missed)
        # Drafting borrows slots after the root.
        longest = int(batch.seq_lens_cpu_upper_bound[:num_reqs].max())  # a host tensor
        width = (longest + self.num_nodes) // self.holes.block_size + 1
        table = self.block_tables.input_block_tables[self.group][:num_reqs, :width]
        self.blind = self.holes.mask(table, first, last)

    def _discard(self, req_idx: torch.Tensor, blind: torch.Tensor) -> None:
        """Discard the trees of requests whose drafter could not see their newest tokens."""
        self.tree_states.discard(req_idx, blind)
        if self.adaptive is not None:
            self.adaptive.confidence[: len(blind)].masked_fill_(blind[:, None], 0)

    def step(self, inputs: StepInputs, draft: bool = True) -> torch.Tensor:
        """Commit, draft and store the trees; the same eagerly and in a graph.

        Args:
            draft: False: the drafters read the step and draft nothing.

        Returns:
            [R, N] int64, the trees' tokens.
        """
        verified = self.settle(inputs)
        rows, req_idx = inputs.rows, inputs.rows.batch.idx_mapping
        committed = self._committed(inputs)
        if self.recorder is not None:
            self.recorder.record(rows, committed, inputs.hidden_states, verified)
        if self.backlog is not None:
            committed = self.backlog.catch_up(committed)
        self.clock.begin()
        self.draft_policy.advance(committed)
        if not draft:
            self._nothing_drafted(req_idx)
            return self._no_trees(len(req_idx))
        proposal = self.draft_policy.combine(committed)
        # With a prompt, most of the time is spent reading it.
        if not rows.batch.has_prefill:
            self.clock.end()
        combined = proposal.combined
        if inputs.chain is not None:
            combined = combined.where(inputs.chain)
        if self.adaptive is not None:
            combined = self.adaptive.write_survival(req_idx, committed.temperature, combined)
        self.tree_states.store(req_idx, combined)
        self.counters.drafted(
            proposal.drafted,
            proposal.second,
            proposal.agreed,
            rows.goes_on,
            [drafter.beta_of(committed) for drafter in self.draft_policy.drafters],
        )
        return combined.tree.token

    def _can_skip(self, batch: InputBatch, states: list[torch.Tensor]) -> bool:
        """Whether drafters can read this step later, or need not read it."""
        if self.recorder is not None or not self.can_resume:
            return False
        return self.backlog is None or self.backlog.has_room(
            batch.num_tokens, states[: self.num_layers]
        )

    def _skip(self, batch: InputBatch, missed: Callable[[], MissedRows]) -> None:
        """Skip the drafters in this step; `missed` returns its committed rows."""
        if self.backlog is not None:
            self.backlog.keep(missed(), np.ones(batch.num_reqs, dtype=bool))
        if self.adaptive is not None:
            self.adaptive.drafted(0.0, asked=False)
        self._nothing_drafted(batch.idx_mapping)

    def _nothing_drafted(self, req_idx: torch.Tensor) -> None:
        # Drafts scheduled next are placeholders.
        self.tree_states.accepted.index_fill_(0, req_idx, 0)
        if self.adaptive is not None:
            self.adaptive.nothing_drafted(len(req_idx))

    def _no_trees(self, num_reqs: int) -> torch.Tensor:
        """Return valid placeholder tokens, [R, N] int64.

        A copy: vLLM overwrites unused drafts with −1 and would read those later."""
        return self.draft_tokens[:num_reqs].clone()

    def _committed(self, inputs: StepInputs) -> CommittedTokens:
        return inputs.rows.committed(
            inputs.slot_mapping,
            inputs.hidden_states[: self.num_layers],
            self.req_states.all_token_ids.gpu,
            inputs.block_table,
            inputs.block_size,
            self.temperature,
            inputs.masks,
        )

    def settle(self, inputs: StepInputs) -> VerifiedTrees:
        """Commit the accepted paths, and learn from them."""
        rows = inputs.rows
        if rows.has_drafts:
            for (_, caches), slots in zip(self.target_caches, inputs.target_slots):
                rows.move(caches, slots)
            for layer in self.recurrent:
                layer.commit(rows.path, rows.accepted)
        verified = rows.verified(self.temperature)
        self.draft_policy.learn(verified)
        self.counters.verified(verified)
        if self.adaptive is not None:
            self.adaptive.learn(verified)
        return verified

    def _more_counts(self) -> Counts:
        return self.clock.counts() | ({} if self.recorder is None else self.recorder.counts())
