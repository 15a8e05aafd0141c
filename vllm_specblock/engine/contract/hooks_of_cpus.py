"""What only a CPU leans on: its platform, its worker, vLLM's attention kernels for it."""

from __future__ import annotations

from vllm_specblock.engine.contract.hook import Attributes, Has, Hook, IsClassMethod, Says, Takes

_BACKEND = "v1/attention/backends/cpu_attn.py"
_OPS = "_custom_ops.py"
_PLATFORM = "platforms/cpu.py"
_TABLES = "v1/worker/gpu/block_table.py"

ON_A_CPU: tuple[Hook, ...] = (
    IsClassMethod("cpu/install.py", _PLATFORM, "CpuPlatform.get_attn_backend_cls"),
    IsClassMethod("cpu/install.py", _PLATFORM, "CpuPlatform.check_and_update_config"),
    Takes("cpu/install.py", "triton_utils/dispatcher.py", "register_kernels", "overrides"),
    # ---- methods that are replaced ----
    Takes("cpu/install.py", _TABLES, "BlockTables.gather_block_tables",
          "self idx_mapping num_reqs_padded out out_ptrs", "first"),
    Takes("cpu/install.py", _TABLES, "BlockTables.compute_slot_mappings",
          "self idx_mapping query_start_loc positions num_tokens_padded out"),
    Takes("cpu/install.py", "v1/worker/gpu/buffer_utils.py", "FusedStagedWriter.apply",
          "self tensors output_ptrs output_strides"),
    Takes("cpu/install.py", "v1/worker/gpu/buffer_utils.py", "StagedWriteTensor.apply_write",
          "self"),
    Takes("cpu/top_k_top_p.py", "v1/sample/ops/topk_topp_sampler.py",
          "apply_top_k_top_p_pytorch", "logits k p allow_cpu_sync"),
    Says("cpu/install.py", "v1/sample/ops/topk_topp_sampler.py", "apply_top_k_top_p",
         ("if HAS_TRITON:", "return apply_top_k_top_p_pytorch(")),
    Takes("cpu/warm_up.py", "v1/worker/gpu/warmup.py", "warmup_kernels", "model_runner", "first"),
    Takes("cpu/host_budget.py", "v1/worker/cpu_worker.py", "CPUWorker.compile_or_warm_up_model",
          "self"),
    Has("cpu/host_budget.py", "v1/worker/gpu/model_runner.py", "",
        "resolve_adaptive_cudagraph_mode"),
    Takes("cpu/sleeping_waits.py", "distributed/device_communicators/shm_broadcast.py",
          "SpinCondition.wait", "self timeout_ms"),
    Says("cpu/sleeping_waits.py", "distributed/device_communicators/shm_broadcast.py",
         "SpinCondition.__init__", ("self.busy_loop_s = ",)),
    Says("cpu/compile_cache.py", "compilation/decorators.py", "",
         ("torch.compiler.load_compiled_function(", "._artifacts.compiled_fn.finalize_loading(")),
    # ---- vLLM's matrix product for AMX, which drafters use ----
    Says("../drafters/common/linear.py", _OPS, "weight_packed_linear_cpu",
         ("torch.ops._C.weight_packed_linear(output.reshape(-1, n), x.reshape(-1, x.size(-1)), "
          "packed_weight, bias, True",)),
    Says("../drafters/common/linear.py", "model_executor/layers/utils.py",
         "dispatch_cpu_unquantized_gemm", ("torch.ops._C.convert_weight_packed(layer.weight)",
                                           "layer.bias.to(torch.float32)")),
    # ---- vLLM's attention kernels, over a cache packed as its backend says ----
    Takes("cpu/attention.py", _BACKEND, "_get_attn_isa",
          "dtype block_size head_size kv_cache_dtype"),
    Has("cpu/attention.py", _BACKEND, "CPUAttentionBackend",
        "get_supported_head_sizes"),
    # ---- vLLM's backend itself, in steps without drafts ----
    Takes("cpu/attention.py", _BACKEND, "CPUAttentionMetadataBuilder.__init__",
          "self kv_cache_spec layer_names vllm_config device"),
    Attributes("cpu/attention.py", _BACKEND, "CPUAttentionMetadataBuilder", "window_size= isa="),
    Takes("attention/backend.py", _BACKEND, "CPUAttentionBackendImpl.__init__",
          "self num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype "
          "logits_soft_cap", "first"),
    Takes("attention/backend.py", _BACKEND, "CPUAttentionBackendImpl.forward",
          "self layer query key value kv_cache attn_metadata output", "first"),
    Takes("attention/backend.py", _BACKEND, "CPUAttentionBackendImpl.do_kv_cache_update",
          "self layer key value kv_cache slot_mapping"),
    Has("cpu/attention.py", "envs.py", "", "VLLM_CPU_ATTN_SPLIT_KV VLLM_USE_V2_MODEL_RUNNER"),
    Takes("cpu/attention.py", _OPS, "cpu_attn_reshape_and_cache",
          "key value key_cache value_cache slot_mapping isa", "first"),
    Takes(
        "cpu/attention.py",
        _OPS,
        "cpu_attn_get_scheduler_metadata",
        "num_reqs num_heads num_kv_heads head_dim seq_lens dtype query_start_loc causal "
        "sliding_window_size isa enable_kv_split",
        "first",
    ),
    Takes(
        "cpu/attention.py",
        _OPS,
        "cpu_attention_with_kv_cache",
        "query key_cache value_cache output query_start_loc seq_lens scale causal alibi_slopes "
        "sliding_window block_table softcap scheduler_metadata s_aux",
        "first",
    ),
    # A cache of 8 bits.
    *(
        Takes("cpu/attention.py", _OPS, name, "k_scale v_scale kv_cache_dtype", "among")
        for name in ("cpu_attn_reshape_and_cache", "cpu_attention_with_kv_cache")
    ),
    Takes("cpu/attention.py", _OPS, "cpu_attn_get_scheduler_metadata", "kv_cache_dtype", "among"),
    # ---- LoRA on the target ----
    *(
        Takes("cpu/lora.py", "lora/ops/torch_ops/lora_ops.py", name,
              "inputs lora_b_weights output_tensor lora_indices_tensor", "first")
        for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice")
    ),
    Attributes("target_lora.py", "lora/punica_wrapper/punica_base.py", "PunicaWrapperBase",
               "_sampler_indices _token_lora_indices indices_len"),
    Has("target_lora.py", "lora/layers/__init__.py", "",
        "LogitsProcessorWithLoRA VocabParallelEmbeddingWithLoRA"),
    # Adapters are mapped before the attention of a step is prepared, when ours are.
    Says("target_lora.py", "v1/worker/gpu/model_runner.py", "",
         ("self._set_active_loras(*lora_inputs)", "self.model_state.prepare_attn(")),
)  # fmt: skip
"""Beside the kernels that `cpu/kernels.py` replaces, see `imports.py`."""
