"""Tree speculator: commit the accepted path, advance the drafters, draft, store the trees."""

from __future__ import annotations

from functools import partial
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.interfaces_base import VllmModel
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.states import RequestState

from vllm_specblock.commit import move_path
from vllm_specblock.committed import MissedRows
from vllm_specblock.drafters.registry import drafter_kind
from vllm_specblock.engine import draft_models
from vllm_specblock.engine.adaptive import OURS, TreeBudgetManager
from vllm_specblock.engine.config.resolved_config import ResolvedConfig
from vllm_specblock.engine.device import device_of
from vllm_specblock.engine.draft_models import load_drafters
from vllm_specblock.engine.metrics.counters import DrafterCounters
from vllm_specblock.engine.metrics.exporter import make_sink
from vllm_specblock.engine.request_drafts import looks_back, shares, wants_drafts
from vllm_specblock.engine.runner import graphs
from vllm_specblock.engine.runner.caches import EngineCaches, Slots
from vllm_specblock.engine.runner.draft_policy import DraftPolicy, SkippingMergedDrafters
from vllm_specblock.engine.runner.model_state import TreeModelState
from vllm_specblock.engine.runner.skipped_steps import SkippedSteps, all_rows
from vllm_specblock.engine.runner.step_batch import StepBatch
from vllm_specblock.engine.runner.tree_states import TreeStates, store_trees
from vllm_specblock.engine.scheduler import FORGET
from vllm_specblock.engine.step_observer import StepObserver, adaptation
from vllm_specblock.engine.target_model import check_target_model
from vllm_specblock.feedback.acceptance_estimator import write_survival
from vllm_specblock.feedback.controller import Controller
from vllm_specblock.feedback.verified_trees import VerifiedTrees


class TreeSpeculator(DraftModelSpeculator):
    """DraftModelSpeculator that proposes trees.

    Unlike vLLM's speculators it also commits: a target step leaves the keys, values and states of
    the accepted path among those of rejected nodes, and later steps need them in order.
    """

    adaptive: TreeBudgetManager | None = None  # built by vLLM
    _counted = True  # the last step added to the counters

    # ---- at start, in vLLM's order ----

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState
    ) -> None:
        super().__init__(vllm_config, device)
        draft_models.install()
        self.req_states = req_states
        self.resolved: ResolvedConfig = vllm_config.speculative_config.specblock
        self.num_speculative_tokens = self.num_speculative_steps
        # An extra slot for padding rows.
        self.scratch_idx, self.num_slots = self.max_num_reqs, self.max_num_reqs + 1
        # vLLM keeps token ids in host memory unless its own n-gram method reads them.
        on_device = any(drafter_kind(each.kind).reads_text for each in self.resolved.drafters)
        texts = req_states.all_token_ids
        shape = self.num_slots, texts.gpu.shape[1]
        req_states.all_token_ids = StagedWriteTensor(
            shape, dtype=texts.dtype, device=device, uva_instead_of_gpu=not on_device
        )
        depth = vllm_config.model_config.hf_text_config.num_hidden_layers
        self.num_layers = len(self.resolved.layers)
        self.num_inner = sum(layer < depth for layer in self.resolved.layers)
        self.adapts = self.resolved.adapting is not None
        self.reads_last = self.num_inner < self.num_layers or self.adapts
        self.parts = device_of(device)
        self.pad_rows = not self.parts.on_host
        self.enable_adaptive_verification = self.resolved.adaptive
        self.use_acceptance_estimator = False  # vLLM's, for chains
        self.temperature = torch.zeros(self.num_slots, device=device)
        # By request slot: verifies the best path of its tree only; declines drafts; T > 0; its
        # answer may serve others.
        flags = np.zeros((4, self.num_slots), dtype=bool)
        self.chains, self.undrafted, self.samples, self.shares = flags
        self.all_chains = False  # a custom logits processor may read the output

    def load_draft_model(
        self, target_model: VllmModel, target_attn_layer_names: set[str]
    ) -> nn.Module:
        config, resolved, device = self.vllm_config, self.resolved, self.device
        target_layers, self.recurrent = sorted(target_attn_layer_names), list[Any]()
        if config.model_config.is_hybrid:
            from vllm_specblock.engine.recurrent import take_recurrent

            layers = config.compilation_config.static_forward_context
            target_layers, self.recurrent = take_recurrent(layers, target_layers)
        drafters = load_drafters(config, resolved, target_model, device)
        combine, num_nodes = resolved.combine, self.num_speculative_tokens
        depth = max(drafter.max_depth for drafter in drafters)
        self.tree_states = states = TreeStates(self.num_slots, num_nodes, depth, device)
        self.caches = EngineCaches(config, target_layers, drafters, device)
        self.skipped = SkippedSteps(config, drafters, self.num_slots, device)
        self.controller = Controller()
        given = drafters, combine, self.skipped, num_nodes, depth
        if combine is None or not combine.skip_drafter:
            self.draft_policy = DraftPolicy(*given)
        else:
            self.draft_policy = SkippingMergedDrafters(self.controller, *given)
        if resolved.adaptive:
            setattr(self.req_states, OURS, self)
            resolve_name(self.parts.install_budgets)()
        self.recorder = StepObserver()
        if self.adapts:
            make = adaptation("serving.observer").make_observer
            self.recorder = make(config, resolved, drafters, states.parent, depth) or self.recorder
        sink = make_sink(config, get_tensor_model_parallel_rank())
        self.counters = DrafterCounters(len(drafters), device, sink, self.recorder.counts)
        return draft_models.DraftModels(drafters, resolved)

    def load_model(self, target_model: VllmModel) -> None:
        check_target_model(target_model, self.vllm_config)  # not all loaders call `create_model`
        self.parts.prepare(self.vllm_config)
        super().load_model(target_model)
        # vLLM builds this class without our arguments, hence one class per engine.
        kinds: tuple[type, ...] = (TreeModelState,)
        if self.recurrent:
            from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

            kinds = TreeModelState, MambaHybridModelState
        state = type("TreeModelState", kinds, {"speculator": self})
        target_model.get_model_state_cls = lambda: state

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn(*args, **kwargs)
        self.caches.find_groups(self.kv_cache_config)

    def bind_caches(self) -> None:
        self.caches.bind()
        blocks = self.kv_cache_config.num_blocks, self.block_tables.block_sizes[self.caches.group]
        self.skipped.track(*blocks)
        # Otherwise `capture` compiles them.
        if not self.pad_rows or self.vllm_config.model_config.enforce_eager:
            self.caches.warm_up(self.block_tables)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        self.graphs = graphs.ProposalGraphs(self, cudagraph_mode)

    def capture(self) -> None:
        self.forget_warm_up()
        self.caches.warm_up(self.block_tables)
        for brief in (False,) if self.adaptive is None else self.adaptive.lengths:
            for drafter in self.draft_policy.drafters:
                drafter.brief = brief
            self.graphs.capture(self.step, self.draft_tokens, brief)

    def forget_warm_up(self) -> None:
        """Reset the counters and estimates after vLLM's warm-up requests."""
        self.counters.clear()
        self.draft_policy.forget()
        if self.adaptive is not None:
            self.adaptive.acceptance.forget()

    # ---- once per request ----

    def note_request(self, req_idx: int, params: SamplingParams | None) -> None:
        """Store the sampling parameters of a new request, and reset the state of its slot."""
        temperature = 0.0 if params is None else params.temperature
        self.temperature[req_idx].fill_(temperature)
        self.draft_policy.begin(req_idx)
        self.undrafted[req_idx], self.samples[req_idx] = not wants_drafts(params), temperature > 0
        self.skipped.begin(req_idx)
        self.chains[req_idx] = self.all_chains or looks_back(params)
        self.shares[req_idx] = params is not None and shares(params)

    def end_request(self, req_id: str) -> None:
        """Drop the rows kept of a request that ended or was preempted.

        Show the drafters its answer, unless it declines that.
        """
        states = self.req_states
        if req_id == FORGET:
            for drafter in self.draft_policy.drafters:
                drafter.forget()
        if (req_idx := states.req_id_to_index.get(req_id)) is None:
            return
        self.skipped.backlog.forget(req_idx)
        if self.shares[req_idx]:
            texts, length = states.all_token_ids.gpu, states.total_len.gpu[req_idx]
            # Not the prompt's end: an earlier part has been shown at each preemption.
            first = int(states.prefill_len.np[req_idx])  # a host array
            for drafter in self.draft_policy.drafters:
                drafter.finish(texts[req_idx], first, length)

    # ---- once per step ----

    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: Slots,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        *_: Any,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **__: Any,
    ) -> torch.Tensor:
        batch = graphs.to_scratch_slot(input_batch, self.scratch_idx) if dummy_run else input_batch
        states = list(aux_hidden_states or ())
        if self.reads_last:
            states.append(last_hidden_states)
        if self.adapts and not dummy_run:
            self.recorder.between_steps(batch.idx_mapping_np)
        if skip_attn_for_dummy_run:
            self.caches.bind_null()
            return self.step(graphs.null_batch(batch, self.tree_states, states, self.vllm_config))
        adaptive, skipped, slots = self.adaptive, self.skipped, batch.idx_mapping_np
        declined = self.undrafted[slots]
        undrafted = bool(declined.all())  # a host array
        paused = not dummy_run and adaptive is not None and adaptive.is_paused(batch)
        # 0 comes from vLLM's schedule by batch size; in 0.33 also in prompt chunks and last steps.
        draft = num_speculative_tokens != 0 and not undrafted
        may_skip = undrafted or not (draft or self.adapts)
        counted, self._counted = self._counted, batch.num_draft_tokens > 0
        if undrafted and not skipped.blocks_shared:
            tokens = self._no_trees(batch.idx_mapping)  # no drafter needs these rows
        elif paused or (may_skip and skipped.can_skip(batch, states[: self.num_layers], undrafted)):
            self.recorder.pause(slots)
            kv_slot = self.caches.slots(slot_mappings)[: batch.num_tokens]
            missed = partial(all_rows, batch, states[: self.num_layers])
            if batch.num_draft_tokens:  # drafted before the pause
                verified, committed = self.settle(self._eager(batch, slot_mappings, states))
                self.counters.count(verified)
                if skipped.has_caches:
                    missed, kv_slot = partial(MissedRows.of, committed), committed.kv_slot
            skipped.skip(kv_slot, missed, ~(declined & paused))
            if adaptive is not None and not (paused or undrafted):
                adaptive.drafted(adaptive.clock.mark(), asked=False)
            tokens = self._no_trees(batch.idx_mapping, confidence=float(not paused))
        else:
            self._counted |= draft
            began = None if adaptive is None else adaptive.clock.mark()
            brief = adaptive is not None and adaptive.brief
            for drafter in self.draft_policy.drafters:
                drafter.brief = brief
            graph = self.graphs.find(batch, dummy_run, brief) if draft else None
            if graph is None:
                tokens = self.step(self._eager(batch, slot_mappings, states), draft)
            else:
                self.graphs.fill(graph, batch, states, self.chains[slots])
                table = self.block_tables.input_block_tables[self.caches.group]
                skipped.mask(batch, table, self.tree_states)
                self.graphs.run_fullgraph(graph)
                tokens = self.draft_tokens[: batch.num_reqs]
            if adaptive is not None and not undrafted:
                prompts = batch.num_reqs if batch.has_prefill and not dummy_run else 0
                adaptive.drafted(began, self.draft_policy.asked, prompts)
        # A GPU's counts reach the host one step later.
        if not dummy_run and (counted or self._counted or self.adapts):
            self.counters.publish()
        return tokens

    def step(self, rows: StepBatch, draft: bool = True) -> torch.Tensor:
        """Commit, draft and store the trees, eagerly or in a graph; return the trees' tokens.

        The tokens are [R, N] int64. Without `draft` the drafters only read the step.
        """
        verified, committed = self.settle(rows)
        req_idx = rows.batch.idx_mapping
        self.recorder.record(rows, committed, verified)
        self.counters.clock.begin()
        self.draft_policy.advance(committed)
        if not draft:
            self.counters.count(verified)
            return self._no_trees(req_idx)
        tree, drafted = self.draft_policy.draft(rows.goes_on)
        # With a prompt, most of the time is spent reading it.
        if not rows.batch.has_prefill:
            self.counters.clock.end()
        self.counters.count(verified, drafted)  # `store` overwrites the verified trees
        kept, empty = self.tree_states.trees, self.skipped.blind
        tokens = store_trees(req_idx, tree, kept, rows.chain, empty, rows.tokens)
        if (adaptive := self.adaptive) is not None:
            found = adaptive.acceptance.seen, adaptive.confidence, adaptive.later
            write_survival(req_idx, kept.score, committed.temperature, *found)
        return tokens

    def settle(self, rows: StepBatch) -> tuple[VerifiedTrees, Any]:
        """Commit the accepted paths, and learn from them; return the rows to advance on."""
        paths, trees, has_drafts = rows.accepted_rows, self.tree_states, rows.batch.num_draft_tokens
        if has_drafts:
            for (_, caches), slots in zip(self.caches.target, rows.target_slots):
                move_path(caches, slots, paths, rows.batch.num_tokens)
            for layer in self.recurrent:
                layer.commit(paths.path, paths.accepted)
        verdict = rows.batch.idx_mapping, rows.drafts, paths.accepted, paths.path
        verified = VerifiedTrees(*verdict, trees.score, trees.origin, self.temperature)
        self.draft_policy.learn(verified)
        if self.adaptive is not None and has_drafts:
            self.adaptive.learn(verified)
        texts = self.req_states.all_token_ids.gpu
        return verified, rows.committed(self.num_layers, texts, self.temperature)

    def _eager(
        self, batch: InputBatch, slot_mappings: Slots, states: list[torch.Tensor]
    ) -> StepBatch:
        chains, group = self.chains[batch.idx_mapping_np], self.caches.group
        return StepBatch(
            batch=batch,
            tree_states=self.tree_states,
            slot_mapping=self.caches.slots(slot_mappings),
            target_slots=[self.caches.slots(slot_mappings, of) for of, _ in self.caches.target],
            hidden_states=states,
            block_table=self.block_tables.input_block_tables[group][: batch.num_reqs],
            block_size=self.block_tables.block_sizes[group],
            masks=torch.zeros(2, batch.num_reqs, dtype=torch.int64, device=self.device),
            chain=async_tensor_h2d(chains, device=self.device) if chains.any() else None,
            pad=self.pad_rows,
            text_only=not (self.pad_rows or self.num_layers or self.skipped.has_caches),
        )

    def _no_trees(self, req_idx: torch.Tensor, confidence: float = 1.0) -> torch.Tensor:
        """Return valid placeholder tokens, [R, N] int64; vLLM overwrites some with −1.

        The budget manager ignores a confidence of 1.
        """
        self.tree_states.accepted.index_fill_(0, req_idx, 0)
        if self.adaptive is not None:
            self.adaptive.confidence[: len(req_idx)] = confidence
        return self.draft_tokens[: len(req_idx)].clone()
