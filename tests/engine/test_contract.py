"""Every name and signature of vLLM that `engine/` leans on.

When this file passes with a new release, and `test_exactness.py` does, the release is supported.
"""

from __future__ import annotations

import dataclasses
import inspect

import pytest


def arguments_of(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_entry_to_the_config():
    from vllm.engine.arg_utils import EngineArgs

    from vllm_specblock.engine.registration import PATCHES

    (name,) = [name for name in PATCHES if name.endswith("create_speculative_config")]
    assert arguments_of(PATCHES[name]) == ["self", "target_model_config", "target_parallel_config"]
    fields = {field.name for field in dataclasses.fields(EngineArgs)}
    assert fields >= {
        "speculative_config", "additional_config", "attention_backend", "attention_config",
        "max_num_batched_tokens", "kv_cache_dtype",
    }  # fmt: skip


def test_entry_to_the_speculator():
    from vllm.v1.worker.gpu import model_runner, spec_decode
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator, DraftModelSpeculator

    from vllm_specblock.engine.registration import PATCHES

    assert model_runner.init_speculator is spec_decode.init_speculator
    original = PATCHES["vllm.v1.worker.gpu.spec_decode.init_speculator"]
    assert arguments_of(original) == ["vllm_config", "device", "req_states"]
    assert arguments_of(BaseSpeculator.propose)[1:9] == [
        "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states",
        "aux_hidden_states", "num_sampled", "num_rejected", "last_sampled",
    ]  # fmt: skip
    for name in ("load_draft_model", "load_model", "set_attn", "init_cudagraph_manager", "capture"):
        assert callable(getattr(DraftModelSpeculator, name))


def test_model_state():
    from vllm.v1.worker.gpu.model_states import resolve_model_state_cls
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    assert "get_model_state_cls" in inspect.getsource(resolve_model_state_cls)
    assert arguments_of(DefaultModelState.prepare_attn)[1:7] == [
        "input_batch", "cudagraph_mode", "block_tables", "slot_mappings", "attn_groups",
        "kv_cache_config",
    ]  # fmt: skip
    assert arguments_of(DefaultModelState.prepare_inputs) == ["self", "input_batch", "req_states"]
    assert arguments_of(DefaultModelState.prepare_dummy_inputs) == [
        "self", "num_reqs", "num_tokens",
    ]  # fmt: skip
    assert arguments_of(DefaultModelState.add_request) == ["self", "req_index", "new_req_data"]
    assert arguments_of(DefaultModelState.initialize_kv_cache) == [
        "self", "kv_cache_config", "block_tables",
    ]  # fmt: skip
    assert arguments_of(DefaultModelState.custom_sampler) == ["self", "sampler"]


def test_samplers():
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    from vllm_specblock.engine.sampler import TreeSampler

    assert arguments_of(TreeSampler._verify) == arguments_of(RejectionSampler._verify)
    assert arguments_of(Sampler.sample) == [
        "self", "logits", "expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "pos",
        "input_ids", "expanded_local_pos", "seq_lens_upper_bound_np", "return_logprobs",
    ]  # fmt: skip
    # Beyond these three are the user's own, which may look at the order of the output.
    assert inspect.getsource(Sampler.__init__).count("_state,\n") >= 3


def test_input_batch_and_request_states():
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState

    fields = {field.name for field in dataclasses.fields(InputBatch)}
    assert fields >= {
        "num_reqs", "idx_mapping", "idx_mapping_np", "expanded_idx_mapping", "expanded_local_pos",
        "num_scheduled_tokens", "num_tokens", "num_tokens_after_padding", "num_draft_tokens",
        "num_draft_tokens_per_req", "query_start_loc", "seq_lens", "seq_lens_cpu_upper_bound",
        "positions", "logits_indices", "cu_num_logits",
    }  # fmt: skip
    source = inspect.getsource(RequestState)
    for name in ("all_token_ids", "total_len", "prompt_len", "draft_tokens"):
        assert f"self.{name} =" in source


def test_attention_and_caches():
    from vllm.v1.attention.backend import AttentionImpl, CommonAttentionMetadata
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout

    assert AttentionBackendEnum.CUSTOM and callable(register_backend)
    assert KVCacheLayout.LBNHC.value == (0, 1, 3, 2, 4)
    assert "tokens_per_state" in {field.name for field in dataclasses.fields(FullAttentionSpec)}
    fields = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    assert fields >= {
        "query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound",
        "block_table_tensor", "slot_mapping", "num_actual_tokens",
    }  # fmt: skip
    from vllm_specblock.engine.attention import TreeAttentionImpl

    assert arguments_of(TreeAttentionImpl.forward) == [
        *arguments_of(AttentionImpl.forward)[:8], "output_scale", "output_block_scale",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["get_attn_backend_cls", "check_and_update_config"])
def test_cpu_platform(name):
    from vllm.platforms.cpu import CpuPlatform

    assert isinstance(inspect.getattr_static(CpuPlatform, name), classmethod)


def test_kernels_that_are_replaced_on_a_cpu_are_there():
    from vllm.triton_utils.dispatcher import _registry

    from vllm_specblock.engine.cpu_kernels import KERNELS

    assert set(KERNELS) <= set(_registry)
