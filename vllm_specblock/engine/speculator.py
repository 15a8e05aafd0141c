"""The end of a step: commit the accepted path, let the head advance and propose, keep the trees."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.states import RequestState

from vllm_specblock.draft import checkpoint
from vllm_specblock.draft.head import Head
from vllm_specblock.draft.specblock import SpecBlockHead
from vllm_specblock.engine.arguments import read_back
from vllm_specblock.engine.kv import DrafterAttention
from vllm_specblock.engine.model_state import TreeModelState
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

    head: Head

    def __init__(self, vllm_config: VllmConfig, device: torch.device, req_states: RequestState):
        super().__init__(vllm_config, device)
        self.req_states = req_states
        self.drafter_dir, self.options = read_back(vllm_config.additional_config)
        config = checkpoint.read_config(self.drafter_dir)
        self.num_nodes = self.num_speculative_steps
        self.max_depth = min(self.num_nodes, self.options.num_blocks * config.block_size)
        self.slots = TreeSlots(self.max_num_reqs, self.num_nodes, self.max_depth, device)
        self.pad_rows = device.type != "cpu"
        # Requests whose sampling looks at the order of the output so far verify a chain.
        self.needs_chain = np.zeros(self.max_num_reqs, dtype=bool)
        self.all_need_chain = False

    # ---- once, at start-up ----

    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        self.target_layers = sorted(target_attn_layer_names)
        drafter = checkpoint.load(self.drafter_dir, dtype=self.dtype, device=self.device).eval()
        config = drafter.config
        # Numbered on from the target's layers, as vLLM's own drafters are.
        first = self.vllm_config.model_config.get_num_layers(self.vllm_config.parallel_config)
        self.drafter_layers = [
            f"specblock.layers.{first + index}.attn" for index in range(config.num_hidden_layers)
        ]
        for name in self.drafter_layers:
            DrafterAttention(
                self.vllm_config,
                name,
                config.num_key_value_heads,
                config.head_dim,
                config.block_size,
            )
        self.head = SpecBlockHead(
            drafter,
            target_model.embed_input_ids,
            self.options,
            self.num_nodes,
            self.max_model_len,
        )
        return drafter

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
        self.group = next(
            index
            for index, group in enumerate(self.kv_cache_config.kv_cache_groups)
            if self.drafter_layers[0] in group.layer_names
        )

    def bind_caches(self) -> None:
        """The paged caches exist now: hand them to the commit and to the head."""
        context = self.vllm_config.compilation_config.static_forward_context
        self.target_caches = KVCacheSet([context[name].kv_cache for name in self.target_layers])
        self.head.bind([context[name].kv_cache for name in self.drafter_layers])

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
                or bool(params.bad_words)
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
        tree = self.head.propose(committed)
        chain = self.needs_chain[batch.idx_mapping_np]
        if chain.any():
            tree = tree.where(torch.from_numpy(chain).to(self.device), tree.best_chain())
        self.slots.store(batch.idx_mapping, tree)
        return tree.token
