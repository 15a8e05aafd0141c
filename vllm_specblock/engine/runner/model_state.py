"""Model state of vLLM's runner: positions, tree mask, new requests."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.utils import AttentionGroup

from vllm_specblock.engine.attention import ReadsTreeMask
from vllm_specblock.engine.step_observer import WARM_UP
from vllm_specblock.triton_kernels.verify.build_tree_mask import BatchRows
from vllm_specblock.verify.tree_mask import TreeMask


class TreeModelState(DefaultModelState):
    """DefaultModelState for draft trees: their mask, and positions that follow node depth.

    `input_batch.positions` and cache slots stay consecutive.
    """

    speculator: Any = None  # set on a subclass per engine: vLLM builds this object from its class
    plain = False  # no request has drafts, so the step runs vLLM's own code

    def __init__(self, vllm_config: VllmConfig, model: nn.Module, *rest: Any) -> None:
        super().__init__(vllm_config, model, *rest)
        self.tree_states = self.speculator.tree_states
        lora = (each for each in model.modules() if isinstance(each, LogitsProcessorWithLoRA))
        self.lora_mappings = {each.punica_wrapper for each in lora}
        self.mapped = np.zeros(0)  # numbers of rows that they were made for
        self.tree_mask = TreeMask(
            self.max_num_tokens,
            self.max_num_reqs,
            self.tree_states.num_nodes,
            self.device,
            self.speculator.enable_adaptive_verification,
        )

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)
        self.tree_states.reset(req_index)
        self.speculator.note_request(req_index, new_req_data.sampling_params)
        if not new_req_data.req_id.startswith(WARM_UP):
            self.speculator.recorder.begin(req_index, new_req_data)

    def remove_request(self, req_id: str) -> None:
        super().remove_request(req_id)
        self.speculator.end_request(req_id)
        self.speculator.recorder.end(req_id)

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, block_tables)
        self.speculator.bind_caches()

    def map_logits(self, batch: InputBatch) -> None:
        """Map each row of logits to its adapter; vLLM maps one row per request.

        It maps anew, which shortens the mapping, only when its requests or adapters change.
        """
        logits = batch.logits_indices
        rows = np.append(batch.num_scheduled_tokens, batch.cu_num_logits_np)
        known, self.mapped = np.array_equal(rows, self.mapped), rows
        for mapping in self.lora_mappings:
            if known and mapping.indices_len[1] == len(logits):
                continue
            mapping._sampler_indices[: len(logits)] = mapping._token_lora_indices[logits]
            mapping.indices_len[1] = len(logits)
            if hasattr(mapping, "prompt_mapping_meta"):  # of kernels for a GPU
                with gpu_sync_allowed():
                    mapping.prompt_mapping_meta.prepare_tensors(mapping.sampler_indices)

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: list[list[AttentionGroup]],
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        batch, mask = input_batch, self.tree_mask
        if self.lora_mappings:
            self.map_logits(batch)
        # Full graphs serve decode steps only, and are captured with dummy batches without drafts.
        graph = kwargs.get("for_capture", False) or cudagraph_mode == CUDAGraphMode.FULL
        mask.num_trees = None if graph else 0
        recurrent, trees = self.speculator.recurrent, None
        if batch.num_draft_tokens and not graph:
            drafts = batch.num_draft_tokens_per_req[: batch.num_reqs]
            mask.num_trees = count = int(np.count_nonzero(drafts))  # a host array
            if recurrent:
                from vllm_specblock.engine.recurrent import TreeRows

                trees = TreeRows(batch, count, self.tree_states.parent)
        # A piecewise graph reads positions in the mask's buffer.
        self.plain = mask.num_trees == 0 and cudagraph_mode == CUDAGraphMode.NONE
        for groups in attn_groups:
            for group in groups:
                builder = group.get_metadata_builder(0)
                if isinstance(builder, ReadsTreeMask):
                    builder.tree_mask = mask
                    self.plain = self.plain and not builder.needs_mask
                elif recurrent:
                    builder.trees = trees
        if not self.plain:
            rows = BatchRows(
                batch.positions,
                batch.query_start_loc,
                batch.seq_lens,
                batch.idx_mapping,
                batch.cu_num_logits,
                batch.logits_indices,
                batch.expanded_idx_mapping,
                batch.expanded_local_pos,
            )
            mask.fill(rows, self.tree_states.depth, self.tree_states.ancestors)
        given = batch, cudagraph_mode, block_tables, slot_mappings, attn_groups
        return super().prepare_attn(*given, *args, **kwargs)

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        adaptive = self.speculator.adaptive
        if adaptive is not None and input_batch.num_draft_tokens_per_req is None:
            adaptive.decide(input_batch)
        inputs = super().prepare_inputs(input_batch, req_states)
        if self.plain:
            return inputs
        position, rows = self.tree_mask.position, input_batch.num_tokens
        if self.rope_state is None:
            return {**inputs, "positions": position[: input_batch.num_tokens_after_padding]}
        # M-RoPE: shift all axes by the same amount, in the buffer that a CUDA graph reads.
        inputs["positions"][:, :rows] += position[:rows] - input_batch.positions[:rows]
        return inputs

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        inputs = super().prepare_dummy_inputs(num_reqs, num_tokens)
        return {"positions": self.tree_mask.position[:num_tokens], **inputs}

    def custom_sampler(self, sampler: Sampler) -> tuple[Any, Any]:
        # vLLM has three logits processors of its own; custom ones may read earlier output tokens.
        self.speculator.all_chains = len(sampler.logits_processors) > 3
        combine = self.speculator.resolved.combine
        if combine is not None and (combine.draft_policy, combine.merge) == ("merge", "disjoint"):
            # Nodes with equal text must draw the same token; FlashInfer draws per row.
            sampler.use_flashinfer = False
        make = resolve_name(self.speculator.parts.sampler)
        trees = self.tree_states, self.tree_mask, self.speculator.chains
        return sampler, make(sampler, self.vllm_config.speculative_config, self.device, *trees)
