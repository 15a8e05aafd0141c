"""What a step leans on: runner, model state, samplers, speculators, attention and its caches."""

from __future__ import annotations

from vllm_specblock.engine.contract.hook import Attributes, Has, Hook, Says, Takes

_GPU = "v1/worker/gpu/"
_RUNNER = _GPU + "model_runner.py"
_STATE = _GPU + "model_states/default.py"
_SPECULATOR = _GPU + "spec_decode/speculator.py"
_REJECTION = _GPU + "spec_decode/rejection_sampler.py"
_ADAPTIVE = _GPU + "spec_decode/adaptive_verification.py"
_MANAGER = "AdaptiveVerificationManager"
_STATE_CLASS = "DefaultModelState"

OF_STEPS: tuple[Hook, ...] = (
    # ---- speculator ----
    Takes(
        "config/registration.py",
        _GPU + "spec_decode/__init__.py",
        "init_speculator",
        "vllm_config device req_states",
    ),
    Says(
        "config/registration.py",
        _RUNNER,
        "",
        ("from vllm.v1.worker.gpu.spec_decode import init_speculator",),
    ),
    Takes(
        "runner/speculator.py",
        _SPECULATOR,
        "BaseSpeculator.propose",
        "self input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states "
        "num_sampled num_rejected last_sampled next_prefill_tokens temperature seeds",
        "first",
    ),
    Takes(
        "runner/speculator.py",
        _SPECULATOR,
        "BaseSpeculator.propose",
        "num_speculative_tokens dummy_run skip_attn_for_dummy_run dp_sync_state mm_inputs",
        "among",
    ),
    Has(
        "runner/speculator_setup.py",
        _SPECULATOR,
        "DraftModelSpeculator",
        "load_draft_model load_model set_attn init_cudagraph_manager capture",
    ),
    Takes("runner/speculator_setup.py", _SPECULATOR, "DraftModelSpeculator.__init__",
          "self vllm_config device"),
    Says("runner/speculator.py", _RUNNER, "", ("self.speculator.propose(",)),
    # ---- model state ----
    Says(
        "runner/model_state.py",
        _GPU + "model_states/__init__.py",
        "resolve_model_state_cls",
        ("get_model_state_cls",),
    ),
    Takes(
        "runner/model_state.py",
        _STATE,
        f"{_STATE_CLASS}.prepare_attn",
        "self input_batch cudagraph_mode block_tables slot_mappings attn_groups kv_cache_config",
        "first",
    ),
    Takes("runner/model_state.py", _STATE, f"{_STATE_CLASS}.prepare_inputs",
          "self input_batch req_states"),
    Takes("runner/model_state.py", _STATE, f"{_STATE_CLASS}.prepare_dummy_inputs",
          "self num_reqs num_tokens"),
    Takes("runner/model_state.py", _STATE, f"{_STATE_CLASS}.add_request",
          "self req_index new_req_data"),
    Takes("runner/model_state.py", _STATE, f"{_STATE_CLASS}.remove_request", "self req_id"),
    Takes("runner/model_state.py", _STATE, f"{_STATE_CLASS}.initialize_kv_cache",
          "self kv_cache_config block_tables"),
    Takes("runner/model_state.py", _STATE, f"{_STATE_CLASS}.custom_sampler", "self sampler"),
    # Requests with drafts come first: `model_state.py` counts on it.
    Says(
        "runner/model_state.py",
        _RUNNER,
        "sort_batch_req_ids",
        ("not draft_tokens.get(r)", "decode_query_len, num"),
    ),
    # ---- samplers ----
    Takes(
        "runner/sampler.py",
        _REJECTION,
        "RejectionSampler._verify",
        "self logits draft_logits draft_sampled pos cu_num_logits idx_mapping idx_mapping_np "
        "expanded_idx_mapping expanded_local_pos seq_lens_upper_bound_np verify_draft_sampled",
    ),
    # Handed on by position.
    Takes("runner/sampler.py", _REJECTION, "RejectionSampler._verify_in_chunks",
          "self logits input_batch draft_logits draft_sampled pos", "first"),
    Says("runner/sampler.py", _REJECTION, "RejectionSampler.__call__",
         ("self._verify_in_chunks(logits,input_batch,draft_logits,draft_sampled,pos,",)),
    Takes("runner/sampler.py", _REJECTION, "RejectionSampler.__init__",
          "self sampler spec_config device", "first"),
    Attributes("runner/sampler.py", _REJECTION, "RejectionSampler",
               "enable_adaptive_verification sampler"),
    Takes(
        "runner/sampler.py",
        _GPU + "sample/sampler.py",
        "Sampler.sample",
        "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids "
        "expanded_local_pos seq_lens_upper_bound_np return_logprobs",
    ),
    Attributes("runner/sampler.py", _GPU + "sample/states.py", "SamplingStates", "seeds="),
    Has("runner/sampler.py", _GPU + "sample/states.py", "SamplingStates", "max_num_logprobs"),
    # Beyond these three are the user's own, which may look at the order of the output.
    Says("runner/model_state.py", _GPU + "sample/sampler.py", "Sampler.__init__",
         ("_state,", "_state,", "_state,")),
    # ---- adaptive verification ----
    Takes("adaptive/budget.py", _ADAPTIVE, f"{_MANAGER}.__init__", "self req_states", "first"),
    Takes("adaptive/budget.py", _ADAPTIVE, f"{_MANAGER}.get_num_tokens",
          "self num_tokens_per_req draft_tokens"),
    Takes("adaptive/budget.py", _ADAPTIVE, f"{_MANAGER}.record_confidences",
          "self confidence_probs input_batch"),
    Takes("adaptive/budget.py", _ADAPTIVE, f"{_MANAGER}.set_initial_cost_curves", "self samples"),
    Takes("adaptive/budget.py", _ADAPTIVE, f"{_MANAGER}.reallocate_drafts",
          "self req_ids idx_mapping"),
    Takes("adaptive/budget.py", _ADAPTIVE, f"{_MANAGER}.batches_to_profile", "self capture_sizes"),
    Says("adaptive/budget.py", _ADAPTIVE, f"{_MANAGER}.batches_to_profile",
         ('"num_tokens": num_tokens',)),
    # As `releases.py` has it.
    Says(
        "releases.py",
        _ADAPTIVE,
        f"{_MANAGER}.reallocate_drafts",
        (
            "return (self._cu_num_logits[: num_reqs + 1], self.query_start_loc, draft_budget,)",
            "return (self._cu_num_logits[: num_reqs + 1], self.query_start_loc, draft_budget, "
            "admitted_drafts,)",
        ),
        one=True,
    ),
    Says(
        "releases.py",
        _RUNNER,
        "",
        (
            "cu_num_logits, query_start_loc, total_num_draft_tokens = "
            "(adaptive_verification.reallocate_drafts(",
            "(cu_num_logits, query_start_loc, total_num_draft_tokens = "
            "(adaptive_verification.reallocate_drafts(",
            "(cu_num_logits, query_start_loc, total_num_draft_tokens) = "
            "(adaptive_verification.reallocate_drafts(",
            "(cu_num_logits, query_start_loc, total_num_draft_tokens, num_admitted_draft_tokens,)"
            " = adaptive_verification.reallocate_drafts(",
        ),
        one=True,
    ),
    Attributes(
        "adaptive/budget.py",
        _ADAPTIVE,
        _MANAGER,
        "req_states num_speculative_steps cost_tables _batch_budget _max_total_logits "
        "_confidence_probs _stale_confidences _stale_idx num_bonus_tokens query_start_loc "
        "_cu_num_logits",
    ),
    # By its name in its own module, whichever class that is by then.
    Says("adaptive/budget.py", _ADAPTIVE, "maybe_create_adaptive_verification_manager",
         (f"return {_MANAGER}(req_states,",)),
    Says("adaptive/trees.py", _RUNNER, "", ("self.speculator.draft_token_confidence_probs",)),
    Says("adaptive/trees.py", _RUNNER, "",
         ('self.speculator, "enable_adaptive_verification", False',)),
    Has("adaptive/budget.py", _GPU + "async_utils.py", "StepTimingSample",
        "forward_ms num_target_tokens num_reqs"),
    Takes("adaptive/budget.py", _RUNNER, "GPUModelRunner._dummy_run", "uniform_decode", "among"),
    Takes("adaptive/budget.py", _RUNNER, "GPUModelRunner.sample_tokens", "self grammar_output"),
    Attributes("adaptive/budget.py", _RUNNER, "GPUModelRunner", "execute_model_state req_states"),
    Attributes("adaptive/budget.py", _GPU + "async_utils.py", "AsyncOutput",
               "model_runner_output="),
    Attributes("adaptive/budget.py", _GPU + "states.py", "RequestState",
               "prefill_len= num_computed_prefill_tokens="),
    # ---- batches and requests ----
    Has(
        "runner/step_batch.py",
        _GPU + "input_batch.py",
        "InputBatch",
        "num_reqs idx_mapping idx_mapping_np expanded_idx_mapping expanded_local_pos "
        "num_scheduled_tokens num_tokens num_tokens_after_padding num_draft_tokens "
        "num_draft_tokens_per_req query_start_loc seq_lens seq_lens_cpu_upper_bound positions "
        "logits_indices cu_num_logits is_prefilling_np prefill_len_np "
        "num_computed_prefill_tokens_np has_prefill make_dummy",
    ),
    Attributes("runner/step_batch.py", _GPU + "states.py", "RequestState",
               "all_token_ids= total_len= prompt_len= draft_tokens= req_id_to_index"),
    Takes("runner/speculator_setup.py", _GPU + "buffer_utils.py", "StagedWriteTensor.__init__",
          "dtype device uva_instead_of_gpu", "among"),
    # ---- attention and caches ----
    Has("attention/backend.py", "v1/attention/backends/registry.py", "",
        "AttentionBackendEnum.CUSTOM register_backend"),
    Says("attention/backend.py", "v1/kv_cache_layout.py", "", ("LBNHC = (0, 1, 3, 2, 4)",)),
    Has("attention/draft_attention_layer.py", "v1/kv_cache_interface.py", "FullAttentionSpec",
        "tokens_per_state block_size num_kv_heads head_size dtype"),
    Has(
        "attention/backend.py",
        "v1/attention/backend.py",
        "CommonAttentionMetadata",
        "query_start_loc query_start_loc_cpu seq_lens seq_lens_cpu_upper_bound "
        "block_table_tensor slot_mapping num_actual_tokens num_reqs max_seq_len max_query_len",
    ),
    Takes("attention/backend.py", "v1/attention/backend.py", "AttentionImpl.forward",
          "self layer query key value kv_cache attn_metadata output", "first"),
    # Of a CUDA build, which cannot be imported without a GPU: its source lies in every wheel.
    Takes(
        "attention/flash_causal.py",
        "vllm_flash_attn/flash_attn_interface.py",
        "flash_attn_varlen_func",
        "max_seqlen_q cu_seqlens_q max_seqlen_k seqused_k softmax_scale causal window_size "
        "softcap block_table return_softmax_lse out fa_version",
        "among",
    ),
    Takes("attention/flash_prefix.py", "v1/attention/backends/fa_utils.py",
          "get_flash_attn_version", "head_size", "among"),
    # ---- graphs ----
    Takes("runner/graphs.py", _GPU + "cudagraph_utils.py", "CudaGraphManager.__init__",
          "self vllm_config device cudagraph_mode decode_query_len", "first"),
    Takes("runner/graphs.py", _GPU + "cudagraph_utils.py", "CudaGraphManager.dispatch",
          "self num_reqs num_tokens uniform_token_count", "first"),
    Takes("runner/graphs.py", _GPU + "cudagraph_utils.py", "CudaGraphManager.capture",
          "self create_forward_fn", "first"),
)  # fmt: skip
"""In the order in which a token travels."""
