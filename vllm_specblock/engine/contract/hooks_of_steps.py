"""What a step leans on: runner, model state, samplers, speculators, attention and its caches."""

from __future__ import annotations

from vllm_specblock.engine.contract.hook import Attributes, Has, Hook, Says, Takes, on

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
    *on("config/registration.py", _GPU + "spec_decode/__init__.py",
        Takes("init_speculator", "vllm_config device req_states")),
    *on("config/registration.py", _RUNNER,
        Says("", ("from vllm.v1.worker.gpu.spec_decode import init_speculator",))),
    *on("runner/speculator.py", _SPECULATOR,
        Takes("BaseSpeculator.propose",
              "self input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states "
              "num_sampled num_rejected last_sampled next_prefill_tokens temperature seeds",
              "first"),
        Takes("BaseSpeculator.propose",
              "num_speculative_tokens dummy_run skip_attn_for_dummy_run dp_sync_state mm_inputs",
              "among")),
    *on("runner/speculator_setup.py", _SPECULATOR,
        Has("DraftModelSpeculator",
            "load_draft_model load_model set_attn init_cudagraph_manager capture"),
        Takes("DraftModelSpeculator.__init__", "self vllm_config device")),
    *on("runner/speculator.py", _RUNNER,
        Says("", ("self.speculator.propose(",))),
    # ---- model state ----
    *on("runner/model_state.py", _GPU + "model_states/__init__.py",
        Says("resolve_model_state_cls", ("get_model_state_cls",))),
    *on("runner/model_state.py", _STATE,
        Takes(f"{_STATE_CLASS}.prepare_attn",
              "self input_batch cudagraph_mode block_tables slot_mappings attn_groups "
              "kv_cache_config", "first"),
        Takes(f"{_STATE_CLASS}.prepare_inputs", "self input_batch req_states"),
        Takes(f"{_STATE_CLASS}.prepare_dummy_inputs", "self num_reqs num_tokens"),
        Takes(f"{_STATE_CLASS}.add_request", "self req_index new_req_data"),
        Takes(f"{_STATE_CLASS}.remove_request", "self req_id"),
        Takes(f"{_STATE_CLASS}.initialize_kv_cache", "self kv_cache_config block_tables"),
        Takes(f"{_STATE_CLASS}.custom_sampler", "self sampler")),
    *on("runner/model_state.py", _RUNNER,
        # Requests with drafts come first: `model_state.py` counts on it.
        Says("sort_batch_req_ids", ("not draft_tokens.get(r)", "decode_query_len, num"))),
    # ---- samplers ----
    *on("runner/sampler.py", _REJECTION,
        Takes("RejectionSampler._verify",
              "self logits draft_logits draft_sampled pos cu_num_logits idx_mapping "
              "idx_mapping_np expanded_idx_mapping expanded_local_pos seq_lens_upper_bound_np "
              "verify_draft_sampled"),
        # Handed on by position.
        Takes("RejectionSampler._verify_in_chunks",
              "self logits input_batch draft_logits draft_sampled pos", "first"),
        Says("RejectionSampler.__call__",
             ("self._verify_in_chunks(logits,input_batch,draft_logits,draft_sampled,pos,",)),
        Takes("RejectionSampler.__init__", "self sampler spec_config device", "first"),
        Attributes("RejectionSampler", "enable_adaptive_verification sampler")),
    *on("runner/sampler.py", _GPU + "sample/sampler.py",
        Takes("Sampler.sample",
              "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids "
              "expanded_local_pos seq_lens_upper_bound_np return_logprobs")),
    *on("runner/sampler.py", _GPU + "sample/states.py",
        Attributes("SamplingStates", "seeds="),
        Has("SamplingStates", "max_num_logprobs")),
    *on("runner/model_state.py", _GPU + "sample/sampler.py",
        # Beyond these three are the user's own, which may look at the order of the output.
        Says("Sampler.__init__", ("_state,", "_state,", "_state,"))),
    # ---- adaptive verification ----
    *on("adaptive/budget.py", _ADAPTIVE,
        Takes(f"{_MANAGER}.__init__", "self req_states", "first"),
        Takes(f"{_MANAGER}.get_num_tokens", "self num_tokens_per_req draft_tokens"),
        Takes(f"{_MANAGER}.record_confidences", "self confidence_probs input_batch"),
        Takes(f"{_MANAGER}.set_initial_cost_curves", "self samples"),
        Takes(f"{_MANAGER}.reallocate_drafts", "self req_ids idx_mapping"),
        Takes(f"{_MANAGER}.batches_to_profile", "self capture_sizes"),
        Says(f"{_MANAGER}.batches_to_profile", ('"num_tokens": num_tokens',)),
        Attributes(_MANAGER,
                   "req_states num_speculative_steps cost_tables _batch_budget _max_total_logits "
                   "_confidence_probs _stale_confidences _stale_idx num_bonus_tokens "
                   "query_start_loc _cu_num_logits"),
        # By its name in its own module, whichever class that is by then.
        Says("maybe_create_adaptive_verification_manager", (f"return {_MANAGER}(req_states,",))),
    *on("releases.py", _ADAPTIVE,
        # As `releases.py` has it.
        Says(f"{_MANAGER}.reallocate_drafts",
             ("return (self._cu_num_logits[: num_reqs + 1], self.query_start_loc, draft_budget,)",
              "return (self._cu_num_logits[: num_reqs + 1], self.query_start_loc, draft_budget, "
              "admitted_drafts,)"), one=True)),
    *on("releases.py", _RUNNER,
        Says("",
             ("cu_num_logits, query_start_loc, total_num_draft_tokens = "
              "(adaptive_verification.reallocate_drafts(",
              "(cu_num_logits, query_start_loc, total_num_draft_tokens = "
              "(adaptive_verification.reallocate_drafts(",
              "(cu_num_logits, query_start_loc, total_num_draft_tokens) = "
              "(adaptive_verification.reallocate_drafts(",
              "(cu_num_logits, query_start_loc, total_num_draft_tokens, num_admitted_draft_tokens,)"
              " = adaptive_verification.reallocate_drafts("), one=True)),
    *on("adaptive/trees.py", _RUNNER,
        Says("", ("self.speculator.draft_token_confidence_probs",)),
        Says("", ('self.speculator, "enable_adaptive_verification", False',))),
    *on("adaptive/budget.py", _GPU + "async_utils.py",
        Has("StepTimingSample", "forward_ms num_target_tokens num_reqs"),
        Attributes("AsyncOutput", "model_runner_output=")),
    *on("adaptive/budget.py", _RUNNER,
        Takes("GPUModelRunner._dummy_run", "uniform_decode", "among"),
        Takes("GPUModelRunner.sample_tokens", "self grammar_output"),
        Attributes("GPUModelRunner", "execute_model_state req_states")),
    *on("adaptive/budget.py", _GPU + "states.py",
        Attributes("RequestState", "prefill_len= num_computed_prefill_tokens=")),
    # ---- batches and requests ----
    *on("runner/step_batch.py", _GPU + "input_batch.py",
        Has("InputBatch",
            "num_reqs idx_mapping idx_mapping_np expanded_idx_mapping expanded_local_pos "
            "num_scheduled_tokens num_tokens num_tokens_after_padding num_draft_tokens "
            "num_draft_tokens_per_req query_start_loc seq_lens seq_lens_cpu_upper_bound "
            "positions logits_indices cu_num_logits is_prefilling_np prefill_len_np "
            "num_computed_prefill_tokens_np has_prefill make_dummy")),
    *on("runner/step_batch.py", _GPU + "states.py",
        Attributes("RequestState",
                   "all_token_ids= total_len= prompt_len= draft_tokens= req_id_to_index")),
    *on("runner/speculator_setup.py", _GPU + "buffer_utils.py",
        Takes("StagedWriteTensor.__init__", "dtype device uva_instead_of_gpu", "among")),
    # ---- attention and caches ----
    *on("attention/backend.py", "v1/attention/backends/registry.py",
        Has("", "AttentionBackendEnum.CUSTOM register_backend")),
    *on("attention/backend.py", "v1/kv_cache_layout.py",
        Says("", ("LBNHC = (0, 1, 3, 2, 4)",))),
    *on("attention/draft_attention_layer.py", "v1/kv_cache_interface.py",
        Has("FullAttentionSpec", "tokens_per_state block_size num_kv_heads head_size dtype")),
    *on("attention/backend.py", "v1/attention/backend.py",
        Has("CommonAttentionMetadata",
            "query_start_loc query_start_loc_cpu seq_lens seq_lens_cpu_upper_bound "
            "block_table_tensor slot_mapping num_actual_tokens num_reqs max_seq_len max_query_len"),
        Takes("AttentionImpl.forward", "self layer query key value kv_cache attn_metadata output",
              "first")),
    *on("attention/flash_causal.py", "vllm_flash_attn/flash_attn_interface.py",
        # Of a CUDA build, which cannot be imported without a GPU: its source lies in every wheel.
        Takes("flash_attn_varlen_func",
              "max_seqlen_q cu_seqlens_q max_seqlen_k seqused_k softmax_scale causal window_size "
              "softcap block_table out fa_version", "among")),
    *on("attention/flash_causal.py", "v1/attention/backends/fa_utils.py",
        Takes("get_flash_attn_version", "head_size", "among")),
    # ---- graphs ----
    *on("runner/graphs.py", _GPU + "cudagraph_utils.py",
        Takes("CudaGraphManager.__init__",
              "self vllm_config device cudagraph_mode decode_query_len", "first"),
        Takes("CudaGraphManager.dispatch", "self num_reqs num_tokens uniform_token_count", "first"),
        Takes("CudaGraphManager.capture", "self create_forward_fn", "first")),
)  # fmt: skip
"""In the order in which a token travels."""
