"""The end of a step: commit the accepted path, let the head advance and propose, keep the trees."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.states import RequestState

from vllm_specblock.engine.arguments import read_back
from vllm_specblock.engine.counters import HeadCounters
from vllm_specblock.engine.heads import build_head, register_layers
from vllm_specblock.engine.metrics import make_sink
from vllm_specblock.engine.model_state import TreeModelState
from vllm_specblock.engine.proposal import Proposer, Verified, head_budgets, make_proposer
from vllm_specblock.engine.rows import StepRows
from vllm_specblock.engine.slots import TreeSlots
from vllm_specblock.triton_kernels.commit import KVCacheSet, move_kv


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
        self.req_states = req_states
        self.plan = read_back(vllm_config.additional_config)
        if any(head.kind == "ngram" for head in self.plan.heads):
            # vLLM keeps the texts in host memory unless its own n-gram method reads them.
            states = req_states.all_token_ids
            req_states.all_token_ids = StagedWriteTensor(
                states.gpu.shape, dtype=states.dtype, device=device
            )
        self.num_nodes = self.num_speculative_steps
        self.pad_rows = device.type != "cpu"
        # Requests whose sampling looks at the order of the output so far verify a chain.
        self.needs_chain = np.zeros(self.max_num_reqs, dtype=bool)
        self.all_need_chain = False

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
        self.proposer = make_proposer(
            heads, self.plan.combine, self.num_nodes, self.max_num_reqs, self.device
        )
        self.max_depth = self.proposer.max_depth
        self.slots = TreeSlots(self.max_num_reqs, self.num_nodes, self.max_depth, self.device)
        self.counters = HeadCounters(
            len(heads),
            self.num_nodes,
            self.max_depth,
            self.device,
            make_sink(self.vllm_config, get_tensor_model_parallel_rank()),
        )
        weights = [head.drafter for head in heads if head.cache_layers()]
        return nn.ModuleList(weights)

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        if hasattr(target_model, "get_model_state_cls"):
            raise ValueError(
                f"{type(target_model).__name__} keeps a model state of its own, which SpecBlock "
                "cannot verify trees with: run it without speculative_config."
            )
        # vLLM asks the model for its state's class next. It takes no argument of ours, hence
        # a class per engine.
        state = type("TreeModelState", (TreeModelState,), {"speculator": self})
        target_model.get_model_state_cls = lambda: state

    def set_attn(self, *args, **kwargs) -> None:
        super().set_attn(*args, **kwargs)
        wanted = {self.target_layers[0], *(name for names in self.head_layers for name in names)}
        groups = [set(group.layer_names) for group in self.kv_cache_config.kv_cache_groups]
        found = [index for index, names in enumerate(groups) if names >= wanted]
        if not found:
            raise ValueError(
                "vLLM gave the target's layers and the heads' different block tables, which "
                "SpecBlock cannot draft with: run this target without speculative_config."
            )
        self.group = found[0]

    def bind_caches(self) -> None:
        """The paged caches exist now: hand them to the commit and to the head."""
        context = self.vllm_config.compilation_config.static_forward_context
        self.target_caches = KVCacheSet([context[name].kv_cache for name in self.target_layers])
        for head, names in zip(self.proposer.heads, self.head_layers):
            head.bind([context[name].kv_cache for name in names])

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """No graph of its own yet; the target's verification runs in vLLM's."""

    def capture(self) -> None:
        """See init_cudagraph_manager."""

    # ---- once per request ----

    def note_request(self, slot: int, params: SamplingParams | None) -> None:
        """Remember whether the request in `slot` has to verify a chain.

        Penalties, bad words, thinking budgets and grammars depend on the tokens before a
        position, which vLLM's processors take from the rows before it: true of a chain, not
        of a tree.
        """
        self.needs_chain[slot] = self.all_need_chain or (
            params is not None
            and (
                params.repetition_penalty != 1.0
                or params.presence_penalty != 0.0
                or params.frequency_penalty != 0.0
                or bool(params.bad_words)  # a host list
                or params.structured_outputs is not None
                or params.thinking_token_budget is not None
            )
        )

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
        batch = input_batch
        if dummy_run:
            return self.draft_tokens[: batch.num_reqs]
        rows = StepRows(batch, self.slots, self.pad_rows)
        slot_mapping = slot_mappings[self.target_layers[0]]
        if rows.has_drafts:
            source, target, moves = rows.moves()
            move_kv(self.target_caches, slot_mapping[source], slot_mapping[target], moves)
        committed = rows.committed(
            slot_mapping,
            aux_hidden_states,
            self.req_states.all_token_ids.gpu,
            self.block_tables.input_block_tables[self.group][: batch.num_reqs],
            self.block_tables.block_sizes[self.group],
        )
        slot = batch.idx_mapping
        origin = self.slots.origin[slot]
        # Drafts of ours that the target ran on: placeholders have no origin.
        live = (rows.drafts > 0) & (origin[:, 0] > 0)
        self.proposer.learn(Verified(slot, live, rows.accepted))
        self.counters.verified(origin, rows.drafts, rows.path)

        proposal = self.proposer.propose(committed)
        combined = proposal.combined
        chain = self.needs_chain[batch.idx_mapping_np]
        if chain.any():
            combined = combined.where(async_tensor_h2d(chain, device=self.device))
        self.slots.store(slot, combined)
        self.counters.drafted(proposal.drafted, proposal.second, proposal.agreed, rows.goes_on)
        self.counters.publish()
        return combined.tree.token
