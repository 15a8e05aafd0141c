"""Every name and signature of vLLM that `engine/` leans on.

When this file passes with a new release, and `test_exactness.py` does, the release is supported.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import vllm
from vllm.platforms import current_platform


def arguments_of(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_entry_to_the_config():
    from vllm.engine.arg_utils import EngineArgs

    from vllm_specblock.engine.patches import PATCHES

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

    from vllm_specblock.engine.patches import PATCHES

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
    from vllm.v1.worker.gpu.sample.states import SamplingStates
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    from vllm_specblock.engine.runner.sampler import TreeSampler

    assert arguments_of(TreeSampler._verify) == arguments_of(RejectionSampler._verify)
    # Handed on by position.
    chunks = arguments_of(RejectionSampler._verify_in_chunks)
    mine = arguments_of(TreeSampler._verify_in_chunks)
    assert mine[:-1] == chunks[: len(mine) - 1] and mine[-2:] == ["pos", "rest"]
    call = inspect.getsource(RejectionSampler.__call__).split("self._verify_in_chunks(")[1]
    assert "=" not in call.split(")")[0]
    assert arguments_of(Sampler.sample) == [
        "self", "logits", "expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "pos",
        "input_ids", "expanded_local_pos", "seq_lens_upper_bound_np", "return_logprobs",
    ]  # fmt: skip
    assert "self.seeds = " in inspect.getsource(SamplingStates)
    # Beyond these three are the user's own, which may look at the order of the output.
    assert inspect.getsource(Sampler.__init__).count("_state,\n") >= 3


def test_imposed_acceptance():
    from vllm.config import SpeculativeConfig
    from vllm.v1.spec_decode.utils import unconditional_to_conditional_rates

    assert unconditional_to_conditional_rates([0.5, 0.25, 0.0, 0.0]) == [0.5, 0.5, 0.0, 0.0]
    fields = {field.name: field for field in dataclasses.fields(SpeculativeConfig)}
    assert fields["rejection_sample_method"].default == "standard"
    assert fields["synthetic_acceptance_rates"].default is None


def test_adaptive_verification():
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    from vllm_specblock.engine.patches import PATCHES

    name = "AdaptiveVerificationManager"
    manager = PATCHES.get(f"{adaptive_verification.__name__}.{name}")
    manager = manager or getattr(adaptive_verification, name)
    assert arguments_of(manager.__init__)[:2] == ["self", "req_states"]
    assert arguments_of(manager.get_num_tokens) == ["self", "num_tokens_per_req", "draft_tokens"]
    assert arguments_of(manager.record_confidences) == ["self", "confidence_probs", "input_batch"]
    assert arguments_of(manager.set_initial_cost_curves) == ["self", "samples"]
    assert arguments_of(manager.reallocate_drafts) == ["self", "req_ids", "idx_mapping"]
    assert arguments_of(manager.batches_to_profile) == ["self", "capture_sizes"]
    yields = inspect.getsource(manager.batches_to_profile)
    assert '"num_tokens": num_tokens' in yields and "uniform_decode" not in yields
    from vllm.v1.worker.gpu.async_utils import StepTimingSample

    assert {field.name for field in dataclasses.fields(StepTimingSample)} >= {
        "forward_ms", "num_target_tokens", "num_reqs",
    }  # fmt: skip
    assert "uniform_decode" in arguments_of(model_runner.GPUModelRunner._dummy_run)
    given = "self._cu_num_logits[:num_reqs+1],self.query_start_loc,draft_budget,"
    assert f"return({given})" in "".join(inspect.getsource(manager.reallocate_drafts).split())
    source = inspect.getsource(manager)
    for attribute in (
        "req_states", "num_speculative_steps", "cost_tables", "_batch_budget", "_max_total_logits",
        "_confidence_probs", "_stale_confidences", "_stale_idx", "num_bonus_tokens",
        "query_start_loc", "_cu_num_logits",
    ):  # fmt: skip
        assert f"self.{attribute}" in source
    # By its name in its own module, whichever class that is by then.
    build = inspect.getsource(adaptive_verification.maybe_create_adaptive_verification_manager)
    assert f"return {name}(\n        req_states," in build
    runner = inspect.getsource(model_runner)
    assert "self.speculator.draft_token_confidence_probs" in runner
    assert 'self.speculator, "enable_adaptive_verification", False' in runner


def test_input_batch_and_request_states():
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.states import RequestState

    fields = {field.name for field in dataclasses.fields(InputBatch)}
    assert fields >= {
        "num_reqs", "idx_mapping", "idx_mapping_np", "expanded_idx_mapping", "expanded_local_pos",
        "num_scheduled_tokens", "num_tokens", "num_tokens_after_padding", "num_draft_tokens",
        "num_draft_tokens_per_req", "query_start_loc", "seq_lens", "seq_lens_cpu_upper_bound",
        "positions", "logits_indices", "cu_num_logits", "is_prefilling_np",
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
    from vllm_specblock.engine.attention.backend import TreeAttentionImpl

    assert arguments_of(TreeAttentionImpl.forward) == [
        *arguments_of(AttentionImpl.forward)[:8], "output_scale", "output_block_scale",
    ]  # fmt: skip


def test_flash_attention():
    """Of a CUDA build, which cannot be imported without a GPU: its source lies in every wheel."""
    file = Path(vllm.__file__).parent / "vllm_flash_attn/flash_attn_interface.py"
    (function,) = (
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "flash_attn_varlen_func"
    )
    assert {argument.arg for argument in function.args.args} >= {
        "max_seqlen_q", "cu_seqlens_q", "max_seqlen_k", "seqused_k", "softmax_scale", "causal",
        "window_size", "softcap", "block_table", "return_softmax_lse", "out", "fa_version",
    }  # fmt: skip
    from vllm.v1.attention.backends import fa_utils

    assert "head_size" in arguments_of(fa_utils.get_flash_attn_version)
    from vllm.v1.worker.gpu import model_runner

    # Requests with drafts come first: `model_state.py` counts on it.
    order = inspect.getsource(model_runner.sort_batch_req_ids)
    assert order.index("not draft_tokens.get(r)") < order.index("decode_query_len,\n        num")


def test_sizes_and_sleep():
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.gpu_worker import Worker

    assert arguments_of(EngineArgs.get_batch_defaults) == ["world_size"]
    fields = {field.name for field in dataclasses.fields(EngineArgs)}
    assert fields >= {
        "max_num_batched_tokens", "max_num_seqs", "cudagraph_capture_sizes",
        "max_cudagraph_capture_size", "enable_chunked_prefill", "kv_transfer_config",
        "kv_offloading_size",
    }  # fmt: skip
    # The plugin is asked before vLLM fills in what is unset.
    source = inspect.getsource(EngineArgs.create_engine_config)
    ours, theirs = "self.create_speculative_config(", "self._set_default_max_num_seqs_and_batched"
    assert source.index(ours) < source.index(theirs)
    assert list(inspect.signature(Worker.sleep).parameters) == ["self", "level"]


def test_vllms_attention_on_a_cpu():
    """`engine/cpu/attention.py` calls its two kernels over a cache packed as its backend says."""
    from vllm import _custom_ops, envs
    from vllm.v1.attention.backends import cpu_attn

    assert arguments_of(cpu_attn._get_attn_isa) == [
        "dtype", "block_size", "head_size", "kv_cache_dtype",
    ]  # fmt: skip
    assert 64 in cpu_attn.CPUAttentionBackend.get_supported_head_sizes()
    assert isinstance(envs.VLLM_CPU_ATTN_SPLIT_KV, bool)
    assert arguments_of(_custom_ops.cpu_attn_reshape_and_cache)[:6] == [
        "key", "value", "key_cache", "value_cache", "slot_mapping", "isa",
    ]  # fmt: skip
    assert arguments_of(_custom_ops.cpu_attn_get_scheduler_metadata)[:11] == [
        "num_reqs", "num_heads", "num_kv_heads", "head_dim", "seq_lens", "dtype",
        "query_start_loc", "causal", "sliding_window_size", "isa", "enable_kv_split",
    ]  # fmt: skip
    assert arguments_of(_custom_ops.cpu_attention_with_kv_cache)[:14] == [
        "query", "key_cache", "value_cache", "output", "query_start_loc", "seq_lens", "scale",
        "causal", "alibi_slopes", "sliding_window", "block_table", "softcap",
        "scheduler_metadata", "s_aux",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["get_attn_backend_cls", "check_and_update_config"])
def test_cpu_platform(name):
    from vllm.platforms.cpu import CpuPlatform

    assert isinstance(inspect.getattr_static(CpuPlatform, name), classmethod)


@pytest.mark.skipif(not current_platform.is_cpu(), reason="nothing is replaced elsewhere")
def test_kernels_that_are_replaced_on_a_cpu_are_there():
    from vllm.triton_utils.dispatcher import _registry

    from vllm_specblock.engine.cpu.kernels import KERNELS

    assert set(KERNELS) <= set(_registry)


def test_extraction_of_hidden_states():
    """`engine/offline/extract.py`: the states that are kept, and what is added to them."""
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.config.speculative import SpeculativeConfig
    from vllm.v1.worker.gpu.spec_decode import extract_hidden_states

    speculator = extract_hidden_states.ExtractHiddenStatesSpeculator
    assert arguments_of(speculator.propose)[:6] == [
        "self", "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states",
        "aux_hidden_states",
    ]  # fmt: skip
    assert "eagle_aux_hidden_state_layer_ids" in inspect.getsource(extract_hidden_states)
    assert "extract_hidden_states" in inspect.getsource(SpeculativeConfig)
    fields = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    assert fields >= {"draft_model_config", "num_speculative_tokens"}
    fields = {field.name for field in dataclasses.fields(KVTransferConfig)}
    assert fields >= {
        "kv_connector", "kv_connector_module_path", "kv_role", "kv_connector_extra_config",
    }  # fmt: skip


def test_connector_of_hidden_states():
    """`engine/offline/extract.py`: what its connector takes over, and what it replaces off a
    GPU."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import (
        example_hidden_states_connector as example,
    )

    original = example.ExampleHiddenStatesConnector
    assert arguments_of(original.__init__) == ["self", "vllm_config", "role", "kv_cache_config"]
    assert arguments_of(original.register_kv_caches) == ["self", "kv_caches"]
    assert arguments_of(original._submit_async_write) == ["self", "pending"]
    assert isinstance(inspect.getattr_static(original, "_write_tensors"), staticmethod)
    assert arguments_of(original._write_tensors) == ["tensors", "event", "filename", "lock_fd"]
    assert [field.name for field in dataclasses.fields(example.PendingSave)] == [
        "req_id", "filename", "token_ids", "block_ids",
    ]  # fmt: skip
    source = inspect.getsource(original)
    for name in ("_kv_cache", "_lock_fds", "_req_copy_events"):
        assert re.search(rf"self\.{name}: .+ =", source), name
    # The stand-in for a copy's event answers to these two and to nothing else.
    used = set(re.findall(r"\bevent\.(\w+)\(", source))
    assert used <= {"synchronize", "query", "record"} and "synchronize" in used
    assert '"shared_storage_path"' in source and '"hidden_states_path"' in source
    assert arguments_of(example.load_hidden_states) == ["path"]
    assert arguments_of(example.cleanup_hidden_states)[0] == "path"


def test_an_engine_in_this_process_can_be_stepped():
    """`engine/offline/extract.py` lets it go on until its connector was told of every request."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import InprocClient, MPClient

    assert "self.engine_core = EngineCore(" in inspect.getsource(InprocClient.__init__)
    assert arguments_of(InprocClient.get_output) == ["self"]
    assert arguments_of(InprocClient.shutdown)[0] == "self"
    assert "self.scheduler" in inspect.getsource(EngineCore.__init__)
    assert arguments_of(Scheduler.has_requests) == ["self"]
    assert "self.engine_core =" not in inspect.getsource(MPClient)


def test_generation():
    """`engine/offline/generate.py`: token prompts in, token ids out, each request with its own
    seed."""
    from vllm import LLM, SamplingParams
    from vllm.outputs import CompletionOutput

    fields = set(SamplingParams.__struct_fields__)
    assert fields >= {"temperature", "top_p", "max_tokens", "seed", "detokenize"}
    assert arguments_of(LLM.generate)[:3] == ["self", "prompts", "sampling_params"]
    assert "use_tqdm" in arguments_of(LLM.generate)
    (_, *reset) = inspect.signature(LLM.reset_prefix_cache).parameters.values()
    assert all(parameter.default is not parameter.empty for parameter in reset)
    assert "token_ids" in {field.name for field in dataclasses.fields(CompletionOutput)}
