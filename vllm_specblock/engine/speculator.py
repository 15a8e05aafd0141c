"""The end of a step: commit the accepted path, let the head advance and propose, keep the trees."""

from __future__ import annotations

import time

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

from vllm_specblock.draft.head import CommittedRows
from vllm_specblock.draft.imposed import ImposedHead
from vllm_specblock.engine import deep_sleep
from vllm_specblock.engine.adaptive import AdaptiveTrees
from vllm_specblock.engine.arguments import read_back
from vllm_specblock.engine.chains import ChainRequests
from vllm_specblock.engine.counters import HeadCounters
from vllm_specblock.engine.cpu.warm_up import compile_loops
from vllm_specblock.engine.draft_clock import DraftClock
from vllm_specblock.engine.dummy import bind_null_caches, null_inputs, of_nobody
from vllm_specblock.engine.graphs import ProposalGraphs, StepInputs
from vllm_specblock.engine.heads import build_head, register_layers
from vllm_specblock.engine.metrics import make_sink
from vllm_specblock.engine.model_state import TreeModelState
from vllm_specblock.engine.proposal import LazyRoute, Proposer
from vllm_specblock.engine.proposers import head_budgets, make_proposer
from vllm_specblock.engine.rows import StepRows
from vllm_specblock.engine.slots import TreeSlots
from vllm_specblock.engine.warm_up import compile_kernels
from vllm_specblock.triton_kernels.kv_cache.commit import KVCacheSet
from vllm_specblock.verify.imposed import ImposedAcceptance
from vllm_specblock.verify.verified import Verified

READ_TEXT = ("ngram", "sps")
"""Kinds of heads that read the requests' texts on the device."""


class TreeSpeculator(DraftModelSpeculator):
    """DraftModelSpeculator that proposes trees.

    Differs from the chain drafters beside it in that it also commits: a target step over a
    tree leaves the accepted path's keys, values and hidden states scattered among rejected
    nodes, and everything after this (vLLM's bookkeeping, the head, the next step) wants them
    in a row.
    """

    proposer: Proposer

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState):
        super().__init__(vllm_config, device)
        if vllm_config.model_config.enable_sleep_mode:
            deep_sleep.install()
        self.req_states = req_states
        self.plan = read_back(vllm_config.additional_config)
        # A slot that no request gets: rows that fill up a batch belong to it.
        self.spare = self.max_num_reqs
        self.num_slots = self.max_num_reqs + 1
        texts = req_states.all_token_ids
        req_states.all_token_ids = StagedWriteTensor(
            (self.num_slots, texts.gpu.shape[1]),
            dtype=texts.dtype,
            device=device,
            # vLLM keeps the texts in host memory unless its own n-gram method reads them.
            uva_instead_of_gpu=all(head.kind not in READ_TEXT for head in self.plan.heads),
        )
        depth = vllm_config.model_config.hf_text_config.num_hidden_layers
        self.num_inner = sum(layer < depth for layer in self.plan.layers)
        self.num_nodes = self.num_speculative_steps
        self.pad_rows = device.type != "cpu"
        self.enable_adaptive_verification = self.plan.adaptive
        self.use_acceptance_estimator = False  # a chain's
        self.adaptive: AdaptiveTrees | None = None
        self.temperature = torch.zeros(self.num_slots, device=device)
        self.chains = ChainRequests(self.num_slots)

    # ---- once, at start-up ----

    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        self.target_layers = sorted(target_attn_layer_names)
        budgets = head_budgets(self.plan.combine, self.num_nodes)
        heads = [
            build_head(
                head,
                self.plan.layers,
                target_model.embed_input_ids,
                num_nodes,
                self.num_nodes,
                self.max_model_len,
                self.dtype,
                self.device,
            )
            for head, num_nodes in zip(self.plan.heads, budgets)
        ]
        self.head_layers = register_layers(self.vllm_config, heads)
        for head in heads:
            if head.sharpness is not None:
                head.sharpness.make_room(self.num_slots)
        weights = [head.drafter for plan, head in zip(self.plan.heads, heads) if plan.folder]
        rates = self.speculative_config.synthetic_acceptance_rates
        if rates is not None:  # benchmarks only, and then there is one head
            best = unconditional_to_conditional_rates(rates)
            heads = [ImposedHead(heads[0], best, self.device)]
        self.proposer = make_proposer(
            heads, self.plan.combine, self.num_nodes, self.num_slots, self.device
        )
        self.max_depth = self.proposer.max_depth
        self.slots = TreeSlots(self.num_slots, self.num_nodes, self.max_depth, self.device)
        if rates is not None:
            self.slots.imposed = ImposedAcceptance(self.num_slots, self.num_nodes, self.device)
        if self.plan.adaptive:
            self.adaptive = AdaptiveTrees(
                heads, self.req_states, self.slots, self.draft_token_confidence_probs, self.device
            )
        self.counters = HeadCounters(
            len(heads),
            self.num_nodes,
            self.max_depth,
            self.device,
            make_sink(self.vllm_config, get_tensor_model_parallel_rank()),
        )
        self.clock = DraftClock(self.device)
        return nn.ModuleList(weights)

    def load_model(self, target_model: nn.Module) -> None:
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

    def set_attn(self, *args, **kwargs) -> None:
        super().set_attn(*args, **kwargs)
        # vLLM measures graphs with caches of its own, which must go before it makes the others.
        self.target_caches = None
        self._bind_null_caches()
        wanted = {self.target_layers[0], *(name for names in self.head_layers for name in names)}
        groups = [set(group.layer_names) for group in self.kv_cache_config.kv_cache_groups]
        found = [index for index, names in enumerate(groups) if names >= wanted]
        if not found:
            raise ValueError(
                "vLLM gave the target's layers and the heads' different block tables, which "
                "SpecBlock cannot draft with: run this target without speculative_config."
            )
        self.group = found[0]

    def _bind_null_caches(self) -> None:
        size = self.vllm_config.cache_config.block_size
        bind_null_caches(self.proposer.heads, size, self.dtype, self.device)

    def bind_caches(self) -> None:
        """The paged caches exist now: hand them to the commit and to the head."""
        context = self.vllm_config.compilation_config.static_forward_context
        layers = [context[name] for name in self.target_layers]
        packing = layers[0].impl.packing(layers[0].kv_cache)
        self.target_caches = KVCacheSet([layer.kv_cache for layer in layers], packing)
        for head, names in zip(self.proposer.heads, self.head_layers):
            head.bind([context[name].kv_cache for name in names])
        # Where nothing will be captured.
        if self.device.type == "cpu" or self.vllm_config.model_config.enforce_eager:
            self._compile_kernels()

    def _compile_kernels(self) -> None:
        compile_kernels(
            self.vllm_config,
            self.target_layers,
            self.proposer.heads,
            self.num_nodes,
            self.block_tables.input_block_tables[self.group],
            self.target_caches,
        )

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        # Whether lazy routing asks its second head is a decision of the host, step by step.
        if isinstance(self.proposer, LazyRoute):
            full = False
        self.graphs = ProposalGraphs(
            self.vllm_config,
            self.device,
            CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE,
            self.enable_adaptive_verification,
            self.slots,
            len(self.plan.layers),
            self.target_input_buffers,
            self.block_tables,
            self.group,
        )

    def forget_warm_up(self) -> None:
        """vLLM's warm-up requests, which came before, are nobody's."""
        self.counters.total.zero_()
        self.clock.total.zero_()
        self.proposer.forget()
        if self.adaptive is not None:
            self.adaptive.reach.forget()

    def capture(self) -> None:
        self.forget_warm_up()
        self._compile_kernels()
        self.graphs.capture(self.step, self.draft_tokens)

    # ---- once per request ----

    def note_request(self, slot: int, params: SamplingParams | None) -> None:
        """Remember how the request in `slot` samples; nothing learned of its last one holds."""
        self.temperature[slot].fill_(0.0 if params is None else params.temperature)
        self.proposer.begin(slot)
        if self.adaptive is not None:
            self.adaptive.add(slot)
        self.chains.note(slot, params)

    # ---- once per step ----

    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata,
        slot_mappings,
        last_hidden_states,
        aux_hidden_states,
        num_sampled,
        num_rejected,
        last_sampled,
        next_prefill_tokens,
        temperature,
        seeds,
        dp_sync_state=None,
        dummy_run=False,
        skip_attn_for_dummy_run=False,
        mm_inputs=None,
        is_profile=False,
        num_speculative_tokens=None,
    ) -> torch.Tensor:
        batch = of_nobody(input_batch, self.spare) if dummy_run else input_batch
        if self.num_inner < len(self.plan.layers):
            # vLLM hands on some layers even where none was asked for.
            aux_hidden_states = [*aux_hidden_states[: self.num_inner], last_hidden_states]
        if skip_attn_for_dummy_run:
            self._bind_null_caches()
            size = self.vllm_config.cache_config.block_size
            rows = StepRows(batch, self.slots, self.pad_rows)
            return self.step(null_inputs(rows, aux_hidden_states, size, self.max_model_len))
        if not dummy_run and self.adaptive is not None and self.adaptive.rests(batch):
            inputs = None
            if batch.num_draft_tokens:  # of the step before the rest
                inputs = self._inputs(batch, slot_mappings, aux_hidden_states)
                self.settle(inputs)
            self.adaptive.sleep(
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
                self.adaptive.switch.draft_seconds = time.perf_counter() - began
        if not dummy_run:
            self.counters.publish(self.clock.counts)
        return tokens

    def _inputs(self, batch: InputBatch, slot_mappings, hidden_states) -> StepInputs:
        """What an eager step reads of a batch."""
        chain = self.chains.among(batch)
        return StepInputs(
            StepRows(batch, self.slots, self.pad_rows),
            slot_mappings[self.target_layers[0]],
            hidden_states,
            self.block_tables.input_block_tables[self.group][: batch.num_reqs],
            self.block_tables.block_sizes[self.group],
            async_tensor_h2d(chain, device=self.device) if chain.any() else None,
        )

    def step(self, inputs: StepInputs, draft: bool = True) -> torch.Tensor:
        """Commit, draft and keep the trees; the same eagerly and in a graph.

        Args:
            draft: without, the heads only follow the target.

        Returns:
            [R, N] int64, the trees' tokens.
        """
        self.settle(inputs)
        rows, slot = inputs.rows, inputs.rows.batch.idx_mapping
        committed = self._committed(inputs)
        if self.adaptive is not None:
            committed = self.adaptive.catch_up(committed)
        self.clock.begin()
        self.proposer.advance(committed)
        if not draft:
            # Whatever is scheduled next has no verdict.
            self.slots.accepted.index_fill_(0, slot, 0)
            return self.draft_tokens[: len(slot)]
        proposal = self.proposer.combine(committed)
        # With a prompt, most of it is the drafters' reading that.
        if not rows.batch.has_prefill:
            self.clock.end()
        combined = proposal.combined
        if inputs.chain is not None:
            combined = combined.where(inputs.chain)
        if self.adaptive is not None:
            combined = self.adaptive.offer(slot, committed.temperature, combined)
        self.slots.store(slot, combined)
        self.counters.drafted(proposal.drafted, proposal.second, proposal.agreed, rows.goes_on)
        return combined.tree.token

    def _committed(self, inputs: StepInputs) -> CommittedRows:
        return inputs.rows.committed(
            inputs.slot_mapping,
            inputs.hidden_states,
            self.req_states.all_token_ids.gpu,
            inputs.block_table,
            inputs.block_size,
            self.temperature,
        )

    def settle(self, inputs: StepInputs) -> None:
        """Commit the accepted paths, and learn from the verdicts."""
        rows = inputs.rows
        if rows.has_drafts:
            rows.move(self.target_caches, inputs.slot_mapping)
        verified = Verified(
            rows.batch.idx_mapping,
            rows.drafts,
            rows.accepted,
            rows.path,
            self.slots.score,
            self.slots.origin,
            self.temperature,
        )
        self.proposer.learn(verified)
        self.counters.verified(verified)
        if self.adaptive is not None:
            self.adaptive.learn(verified)
