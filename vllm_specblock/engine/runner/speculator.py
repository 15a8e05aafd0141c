"""Tree speculator: commit the accepted path, advance the drafters, draft, keep the trees."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.spec_decode.utils import unconditional_to_conditional_rates
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.states import RequestState

from vllm_specblock.drafters.common.synthetic import SyntheticDrafter
from vllm_specblock.drafters.interface import CommittedTokens, Drafter
from vllm_specblock.drafters.registry import drafter_kind
from vllm_specblock.drafters.specblock.drafter import SpecBlockDrafter
from vllm_specblock.engine import deep_sleep
from vllm_specblock.engine.adaptive.trees import AdaptiveTrees
from vllm_specblock.engine.config.vllm_args import read_back
from vllm_specblock.engine.cpu.warm_up import compile_loops
from vllm_specblock.engine.metrics.counters import Counts, DrafterCounters
from vllm_specblock.engine.metrics.draft_clock import DraftClock
from vllm_specblock.engine.metrics.exporter import make_sink
from vllm_specblock.engine.runner.adaptation import make_recorder
from vllm_specblock.engine.runner.chain_fallback import ChainFallback
from vllm_specblock.engine.runner.draft_policy import DraftPolicy, LazilyRoutedDrafters
from vllm_specblock.engine.runner.drafter_loader import build_drafters, register_layers
from vllm_specblock.engine.runner.dummy import bind_null_caches, null_inputs, to_scratch_slot
from vllm_specblock.engine.runner.graphs import ProposalGraphs, StepInputs
from vllm_specblock.engine.runner.make_policy import drafter_budgets, make_draft_policy
from vllm_specblock.engine.runner.model_state import TreeModelState
from vllm_specblock.engine.runner.step_batch import StepBatch
from vllm_specblock.engine.runner.tree_states import TreeStates
from vllm_specblock.engine.runner.warm_up import compile_kernels
from vllm_specblock.feedback.verified_trees import VerifiedTrees
from vllm_specblock.triton_kernels.kv_cache.commit import KVCacheSet
from vllm_specblock.verify.synthetic_acceptance import SyntheticAcceptance

if TYPE_CHECKING:
    from vllm.model_executor.models.interfaces_base import VllmModel
    from vllm.v1.worker.gpu.dp_utils import DPSyncState


class TreeSpeculator(DraftModelSpeculator):
    """DraftModelSpeculator that proposes trees.

    Differs from the chain drafters beside it in that it also commits: a target step over a
    tree leaves the accepted path's keys, values and hidden states scattered among rejected
    nodes, and everything after this (vLLM's bookkeeping, the drafter, the next step) wants them
    in a row.
    """

    draft_policy: DraftPolicy
    target_caches: KVCacheSet

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState
    ) -> None:
        super().__init__(vllm_config, device)
        if vllm_config.model_config.enable_sleep_mode:
            deep_sleep.install()
        self.req_states = req_states
        self.resolved = read_back(vllm_config.additional_config)
        # A slot that no request gets: rows that fill up a batch belong to it.
        self.scratch_idx = self.max_num_reqs
        self.num_slots = self.max_num_reqs + 1
        texts = req_states.all_token_ids
        req_states.all_token_ids = StagedWriteTensor(
            (self.num_slots, texts.gpu.shape[1]),
            dtype=texts.dtype,
            device=device,
            # vLLM keeps the texts in host memory unless its own n-gram method reads them.
            uva_instead_of_gpu=not any(
                drafter_kind(drafter.kind).reads_text for drafter in self.resolved.drafters
            ),
        )
        depth = vllm_config.model_config.hf_text_config.num_hidden_layers
        self.num_inner = sum(layer < depth for layer in self.resolved.layers)
        self.reads_last = (
            self.num_inner < len(self.resolved.layers) or self.resolved.adapting is not None
        )
        self.num_nodes = self.num_speculative_steps
        self.pad_rows = device.type != "cpu"
        self.enable_adaptive_verification = self.resolved.adaptive
        self.use_acceptance_estimator = False  # a chain's
        self.adaptive: AdaptiveTrees | None = None
        self.temperature = torch.zeros(self.num_slots, device=device)
        self.chains = ChainFallback(self.num_slots)

    # ---- once, at start-up ----

    def load_draft_model(
        self, target_model: VllmModel, target_attn_layer_names: set[str]
    ) -> nn.Module:
        self.target_layers = sorted(target_attn_layer_names)
        budgets = drafter_budgets(self.resolved.combine, self.num_nodes)
        sizes = self.num_nodes, self.max_model_len, self.num_slots
        drafters: list[Drafter] = build_drafters(
            self.resolved, budgets, target_model.embed_input_ids, *sizes, self.dtype, self.device
        )
        self.drafter_layers = register_layers(self.vllm_config, drafters)
        weights = [drafter.model for drafter in drafters if drafter.model is not None]
        rates = self.speculative_config.synthetic_acceptance_rates
        if rates is not None:  # benchmarks only, and then there is one drafter
            best = unconditional_to_conditional_rates(rates)
            (drafter,) = drafters
            assert isinstance(drafter, SpecBlockDrafter)  # `check_acceptance` has said so
            drafters = [SyntheticDrafter(drafter, best, self.device)]
        self.draft_policy = make_draft_policy(
            drafters, self.resolved.combine, self.num_nodes, self.num_slots, self.device
        )
        self.max_depth = self.draft_policy.max_depth
        self.tree_states = TreeStates(self.num_slots, self.num_nodes, self.max_depth, self.device)
        if rates is not None:
            self.tree_states.synthetic_acceptance = SyntheticAcceptance(
                self.num_slots, self.num_nodes, self.device
            )
        if self.resolved.adaptive:
            self.adaptive = AdaptiveTrees(
                drafters,
                self.req_states,
                self.tree_states,
                self.draft_token_confidence_probs,
                self.device,
            )
        self.counters = DrafterCounters(
            len(drafters),
            self.num_nodes,
            self.max_depth,
            self.device,
            make_sink(self.vllm_config, get_tensor_model_parallel_rank()),
        )
        self.clock = DraftClock(self.device)
        self.recorder = make_recorder(
            self.vllm_config, self.resolved, drafters, self.tree_states.parent, self.max_depth
        )
        return nn.ModuleList(weights)

    def load_model(self, target_model: VllmModel) -> None:
        super().load_model(target_model)
        if hasattr(target_model, "get_model_state_cls"):
            raise ValueError(
                f"{type(target_model).__name__} keeps a model state of its own, which SpecBlock "
                "cannot verify trees with: run it without speculative_config."
            )
        if self.device.type == "cpu":
            compile_loops(self.dtype)
        # vLLM asks the model for its state's class next. It takes no argument of ours, hence
        # a class per engine.
        state = type("TreeModelState", (TreeModelState,), {"speculator": self})
        target_model.get_model_state_cls = lambda: state

    def set_attn(self, *args: Any, **kwargs: Any) -> None:
        super().set_attn(*args, **kwargs)
        # vLLM measures graphs with caches of its own, which must go before it makes the others.
        self.target_caches = None  # type: ignore[assignment]  # before a step reads them
        self._bind_null_caches()
        wanted = {self.target_layers[0], *(name for names in self.drafter_layers for name in names)}
        groups = [set(group.layer_names) for group in self.kv_cache_config.kv_cache_groups]
        found = [index for index, names in enumerate(groups) if names >= wanted]
        if not found:
            raise ValueError(
                "vLLM gave the target's layers and the drafters' different block tables, which "
                "SpecBlock cannot draft with: run this target without speculative_config."
            )
        self.group = found[0]

    def _bind_null_caches(self) -> None:
        size = self.vllm_config.cache_config.block_size
        bind_null_caches(self.draft_policy.drafters, size, self.dtype, self.device)

    def bind_caches(self) -> None:
        """The paged caches exist now: hand them to the commit and to the drafter."""
        context = self.vllm_config.compilation_config.static_forward_context
        layers = [context[name] for name in self.target_layers]
        packing = layers[0].impl.packing(layers[0].kv_cache)
        self.target_caches = KVCacheSet([layer.kv_cache for layer in layers], packing)
        for drafter, names in zip(self.draft_policy.drafters, self.drafter_layers):
            drafter.bind([context[name].kv_cache for name in names])
        # Where nothing will be captured.
        if self.device.type == "cpu" or self.vllm_config.model_config.enforce_eager:
            self._compile_kernels()

    def _compile_kernels(self) -> None:
        compile_kernels(
            self.vllm_config,
            self.target_layers,
            self.draft_policy.drafters,
            self.num_nodes,
            self.block_tables.input_block_tables[self.group],
            self.target_caches,
        )

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        # Whether lazy routing asks its second drafter is a decision of the host, step by step.
        if isinstance(self.draft_policy, LazilyRoutedDrafters):
            full = False
        self.graphs = ProposalGraphs(
            self.vllm_config,
            self.device,
            CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE,
            self.enable_adaptive_verification,
            self.tree_states,
            self.num_inner + self.reads_last,
            self.target_input_buffers,
            self.block_tables,
            self.group,
        )

    def forget_warm_up(self) -> None:
        """vLLM's warm-up requests, which came before, are nobody's."""
        self.counters.total.zero_()
        self.clock.total.zero_()
        self.draft_policy.forget()
        if self.adaptive is not None:
            self.adaptive.acceptance.forget()

    def capture(self) -> None:
        self.forget_warm_up()
        self._compile_kernels()
        self.graphs.capture(self.step, self.draft_tokens)

    # ---- once per request ----

    def note_request(self, req_idx: int, params: SamplingParams | None) -> None:
        """Remember how the request in `req_idx` samples; nothing learned of its last one holds."""
        temperature = 0.0 if params is None else params.temperature
        self.temperature[req_idx].fill_(temperature)
        self.draft_policy.begin(req_idx)
        if self.adaptive is not None:
            self.adaptive.add(req_idx, samples=temperature > 0)
        self.chains.note(req_idx, params)

    # ---- once per step ----

    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor],  # vLLM's "eagle3" always has some
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
        if self.reads_last:
            # vLLM hands on some layers even where none was asked for.
            aux_hidden_states = [*aux_hidden_states[: self.num_inner], last_hidden_states]
        if self.recorder is not None and not dummy_run:
            self.recorder.turn(batch.idx_mapping_np)
        if skip_attn_for_dummy_run:
            self._bind_null_caches()
            size = self.vllm_config.cache_config.block_size
            rows = StepBatch(batch, self.tree_states, self.pad_rows)
            return self.step(null_inputs(rows, aux_hidden_states, size, self.max_model_len))
        if not dummy_run and self.adaptive is not None and self.adaptive.is_paused(batch):
            inputs = None
            if self.recorder is not None:
                self.recorder.rest(batch.idx_mapping_np)
            if batch.num_draft_tokens:  # of the step before the rest
                inputs = self._inputs(batch, slot_mappings, aux_hidden_states)
                self.settle(inputs)
            self.adaptive.pause(
                batch,
                lambda: self._committed(
                    inputs or self._inputs(batch, slot_mappings, aux_hidden_states)
                ),
            )
            tokens = self.draft_tokens[: batch.num_reqs]
        else:
            began = time.perf_counter()
            # vLLM's schedule by batch size may want no drafts at all.
            draft = num_speculative_tokens != 0
            graph = self.graphs.find(batch, dummy_run) if draft else None
            if graph is None:
                inputs = self._inputs(batch, slot_mappings, aux_hidden_states)
                tokens = self.step(inputs, draft)
            else:
                self.graphs.fill(graph, batch, aux_hidden_states, self.chains.among(batch))
                self.graphs.run_fullgraph(graph)
                tokens = self.draft_tokens[: batch.num_reqs]
            if self.adaptive is not None:
                self.adaptive.drafting_state.draft_seconds = time.perf_counter() - began
        if not dummy_run:
            self.counters.publish(self._more_counts)
        return tokens

    def _inputs(
        self,
        batch: InputBatch,
        slot_mappings: dict[str, torch.Tensor],
        hidden_states: list[torch.Tensor],
    ) -> StepInputs:
        """What an eager step reads of a batch."""
        chain = self.chains.among(batch)
        return StepInputs(
            StepBatch(batch, self.tree_states, self.pad_rows),
            slot_mappings[self.target_layers[0]],
            hidden_states,
            self.block_tables.input_block_tables[self.group][: batch.num_reqs],
            self.block_tables.block_sizes[self.group],
            async_tensor_h2d(chain, device=self.device) if chain.any() else None,
        )

    def step(self, inputs: StepInputs, draft: bool = True) -> torch.Tensor:
        """Commit, draft and keep the trees; the same eagerly and in a graph.

        Args:
            draft: without, the drafters only follow the target.

        Returns:
            [R, N] int64, the trees' tokens.
        """
        verified = self.settle(inputs)
        rows, req_idx = inputs.rows, inputs.rows.batch.idx_mapping
        committed = self._committed(inputs)
        if self.recorder is not None:
            self.recorder.record(rows, committed, inputs.hidden_states, verified)
        if self.adaptive is not None:
            committed = self.adaptive.catch_up(committed)
        self.clock.begin()
        self.draft_policy.advance(committed)
        if not draft:
            # Whatever is scheduled next has no verdict.
            self.tree_states.accepted.index_fill_(0, req_idx, 0)
            return self.draft_tokens[: len(req_idx)]
        proposal = self.draft_policy.combine(committed)
        # With a prompt, most of it is the drafters' reading that.
        if not rows.batch.has_prefill:
            self.clock.end()
        combined = proposal.combined
        if inputs.chain is not None:
            combined = combined.where(inputs.chain)
        if self.adaptive is not None:
            combined = self.adaptive.write_survival(req_idx, committed.temperature, combined)
        self.tree_states.store(req_idx, combined)
        self.counters.drafted(proposal.drafted, proposal.second, proposal.agreed, rows.goes_on)
        return combined.tree.token

    def _committed(self, inputs: StepInputs) -> CommittedTokens:
        return inputs.rows.committed(
            inputs.slot_mapping,
            inputs.hidden_states[: len(self.resolved.layers)],
            self.req_states.all_token_ids.gpu,
            inputs.block_table,
            inputs.block_size,
            self.temperature,
        )

    def settle(self, inputs: StepInputs) -> VerifiedTrees:
        """Commit the accepted paths, and learn from the verdicts."""
        rows = inputs.rows
        if rows.has_drafts:
            rows.move(self.target_caches, inputs.slot_mapping)
        verified = rows.verified(self.temperature)
        self.draft_policy.learn(verified)
        self.counters.verified(verified)
        if self.adaptive is not None:
            self.adaptive.learn(verified)
        return verified

    def _more_counts(self) -> Counts:
        return self.clock.counts() | ({} if self.recorder is None else self.recorder.counts())
