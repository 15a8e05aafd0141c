"""What only a CPU leans on: its platform, its worker, vLLM's attention kernels for it."""

from __future__ import annotations

from vllm_specblock.engine.contract.hook import (
    Attributes,
    Has,
    Hook,
    IsClassMethod,
    Says,
    Takes,
    on,
)

_BACKEND = "v1/attention/backends/cpu_attn.py"
_OPS = "_custom_ops.py"
_PLATFORM = "platforms/cpu.py"
_TABLES = "v1/worker/gpu/block_table.py"

ON_A_CPU: tuple[Hook, ...] = (
    *on("cpu/install.py", _PLATFORM,
        IsClassMethod("CpuPlatform.get_attn_backend_cls"),
        IsClassMethod("CpuPlatform.check_and_update_config")),
    *on("cpu/install.py", "triton_utils/dispatcher.py",
        Takes("register_kernels", "overrides")),
    # ---- methods that are replaced ----
    *on("cpu/install.py", _TABLES,
        Takes("BlockTables.gather_block_tables", "self idx_mapping num_reqs_padded out out_ptrs",
              "first"),
        Takes("BlockTables.compute_slot_mappings",
              "self idx_mapping query_start_loc positions num_tokens_padded out")),
    *on("cpu/install.py", "v1/worker/gpu/buffer_utils.py",
        Takes("FusedStagedWriter.apply", "self tensors output_ptrs output_strides"),
        Takes("StagedWriteTensor.apply_write", "self")),
    *on("cpu/top_k_top_p.py", "v1/sample/ops/topk_topp_sampler.py",
        Takes("apply_top_k_top_p_pytorch", "logits k p allow_cpu_sync")),
    *on("cpu/install.py", "v1/sample/ops/topk_topp_sampler.py",
        Says("apply_top_k_top_p", ("if HAS_TRITON:", "return apply_top_k_top_p_pytorch("))),
    *on("cpu/warm_up.py", "v1/worker/gpu/warmup.py",
        Takes("warmup_kernels", "model_runner", "first")),
    *on("cpu/host_budget.py", "v1/worker/cpu_worker.py",
        Takes("CPUWorker.compile_or_warm_up_model", "self")),
    *on("cpu/host_budget.py", "v1/worker/gpu/model_runner.py",
        Has("", "resolve_adaptive_cudagraph_mode")),
    *on("cpu/sleeping_waits.py", "distributed/device_communicators/shm_broadcast.py",
        Takes("SpinCondition.wait", "self timeout_ms"),
        Says("SpinCondition.__init__", ("self.busy_loop_s = ",))),
    *on("cpu/compile_cache.py", "compilation/decorators.py",
        Says("",
             ("torch.compiler.load_compiled_function(",
              "._artifacts.compiled_fn.finalize_loading("))),
    # ---- vLLM's matrix product for AMX, which drafters use ----
    *on("../drafters/common/linear.py", _OPS,
        Says("weight_packed_linear_cpu",
             ("torch.ops._C.weight_packed_linear(output.reshape(-1, n), x.reshape(-1, x.size(-1)), "
              "packed_weight, bias, True",))),
    *on("../drafters/common/linear.py", "model_executor/layers/utils.py",
        Says("dispatch_cpu_unquantized_gemm",
             ("torch.ops._C.convert_weight_packed(layer.weight)", "layer.bias.to(torch.float32)"))),
    # ---- vLLM's attention kernels, over a cache packed as its backend says ----
    *on("cpu/attention.py", _BACKEND,
        Takes("_get_attn_isa", "dtype block_size head_size kv_cache_dtype"),
        Has("CPUAttentionBackend", "get_supported_head_sizes")),
    # ---- vLLM's backend itself, in steps without drafts ----
    *on("cpu/attention.py", _BACKEND,
        Takes("CPUAttentionMetadataBuilder.__init__",
              "self kv_cache_spec layer_names vllm_config device"),
        Attributes("CPUAttentionMetadataBuilder", "window_size= isa=")),
    *on("attention/backend.py", _BACKEND,
        Takes("CPUAttentionBackendImpl.__init__",
              "self num_heads head_size scale num_kv_heads alibi_slopes sliding_window "
              "kv_cache_dtype logits_soft_cap", "first"),
        Takes("CPUAttentionBackendImpl.forward",
              "self layer query key value kv_cache attn_metadata output", "first"),
        Takes("CPUAttentionBackendImpl.do_kv_cache_update",
              "self layer key value kv_cache slot_mapping")),
    *on("cpu/attention.py", "envs.py",
        Has("", "VLLM_CPU_ATTN_SPLIT_KV VLLM_USE_V2_MODEL_RUNNER")),
    *on("cpu/attention.py", _OPS,
        Takes("cpu_attn_reshape_and_cache", "key value key_cache value_cache slot_mapping isa",
              "first"),
        Takes("cpu_attn_get_scheduler_metadata",
              "num_reqs num_heads num_kv_heads head_dim seq_lens dtype query_start_loc causal "
              "sliding_window_size isa enable_kv_split", "first"),
        Takes("cpu_attention_with_kv_cache",
              "query key_cache value_cache output query_start_loc seq_lens scale causal "
              "alibi_slopes sliding_window block_table softcap scheduler_metadata s_aux", "first"),
        # A cache of 8 bits.
        Takes("cpu_attn_reshape_and_cache", "k_scale v_scale kv_cache_dtype", "among"),
        Takes("cpu_attention_with_kv_cache", "k_scale v_scale kv_cache_dtype", "among"),
        Takes("cpu_attn_get_scheduler_metadata", "kv_cache_dtype", "among")),
    # ---- LoRA on the target ----
    *on("cpu/lora.py", "lora/ops/torch_ops/lora_ops.py",
        *(Takes(name, "inputs lora_b_weights output_tensor lora_indices_tensor", "first")
          for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"))),
    *on("target_lora.py", "lora/punica_wrapper/punica_base.py",
        Attributes("PunicaWrapperBase", "_sampler_indices _token_lora_indices indices_len")),
    *on("target_lora.py", "lora/layers/__init__.py",
        Has("", "LogitsProcessorWithLoRA VocabParallelEmbeddingWithLoRA")),
    *on("target_lora.py", "v1/worker/gpu/model_runner.py",
        # Adapters are mapped before the attention of a step is prepared, when ours are.
        Says("", ("self._set_active_loras(*lora_inputs)", "self.model_state.prepare_attn("))),
)  # fmt: skip
"""Beside the kernels that `cpu/kernels.py` replaces, see `imports.py`."""
