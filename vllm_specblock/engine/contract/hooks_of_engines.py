"""What an engine leans on before and beside its steps: arguments, sizes, sleep, offline use."""

from __future__ import annotations

from vllm_specblock.engine.contract.hook import Attributes, Has, Hook, Says, SaysNot, Takes, on

_ARGS = "engine/arg_utils.py"
_SPECULATIVE = "config/speculative.py"
_WORKER = "v1/worker/gpu_worker.py"
_EXTRACT = "v1/worker/gpu/spec_decode/extract_hidden_states.py"
_CONNECTOR = "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"
_EXAMPLE = "ExampleHiddenStatesConnector"
_CLIENT = "v1/engine/core_client.py"
_SCHEDULER = "v1/core/sched/scheduler.py"

OF_ENGINES: tuple[Hook, ...] = (
    # ---- arguments ----
    *on("config/registration.py", _ARGS,
        Takes("EngineArgs.create_speculative_config",
              "self target_model_config target_parallel_config"),
        Says("EngineArgs.create_engine_config",
             ("maybe_override_with_speculators(",
              "vllm_speculative_config=self.speculative_config"))),
    *on("config/registration.py", "transformers_utils/config.py",
        Takes("maybe_override_with_speculators",
              "model tokenizer revision trust_remote_code vllm_speculative_config hf_token",
              "among")),
    *on("config/vllm_args.py", _ARGS,
        Has("EngineArgs",
            "speculative_config additional_config attention_backend attention_config "
            "max_num_batched_tokens kv_cache_dtype disable_log_stats hf_token download_dir "
            "enable_lora disable_hybrid_kv_cache_manager kv_sharing_fast_prefill")),
    *on("config/batch_sizes.py", _ARGS,
        Has("EngineArgs",
            "max_num_batched_tokens max_num_seqs cudagraph_capture_sizes "
            "max_cudagraph_capture_size enable_chunked_prefill kv_transfer_config "
            "kv_offloading_size compilation_config enforce_eager"),
        Takes("EngineArgs.get_batch_defaults", "cls world_size"),
        # The plugin is asked before vLLM fills in what is unset.
        Says("EngineArgs.create_engine_config",
             ("self.create_speculative_config(", "self._set_default_max_num_seqs_and_batched"))),
    *on("config/registration.py", "sampling_params.py",
        Takes("SamplingParams._validate_spec_decode", "self speculative_config")),
    # ---- requests without drafts ----
    *on("scheduler.py", _SCHEDULER,
        Takes("Scheduler._update_after_schedule", "self scheduler_output"),
        Takes("Scheduler.update_draft_token_ids", "self draft_token_ids")),
    *on("scheduler.py", "v1/core/sched/async_scheduler.py",
        Says("AsyncScheduler",
             ("super()._update_after_schedule(scheduler_output)", "request.spec_token_ids = "))),
    *on("scheduler.py", "v1/core/sched/output.py",
        Has("SchedulerOutput",
            "num_scheduled_tokens total_num_scheduled_tokens scheduled_spec_decode_tokens")),
    *on("undrafted.py", "sampling_params.py",
        Has("SamplingParams", "extra_args")),
    # ---- what is refused ----
    *on("config/validate.py", "config/model.py",
        Has("ModelConfig",
            "is_encoder_decoder use_mla is_hybrid is_attention_free supports_multimodal_inputs "
            "uses_alibi hf_text_config get_hidden_size get_vocab_size max_model_len"),
        Attributes("ModelConfig", "attention_chunk_size= runner_type=")),
    *on("target_model.py", "model_executor/model_loader/base_loader.py",
        Takes("BaseModelLoader.create_model", "self vllm_config", "first"),
        Says("BaseModelLoader.load_model", ("self.create_model(", "self.load_weights("))),
    *on("target_model.py", "model_executor/layers/attention/attention.py",
        Attributes("Attention", "head_size= head_size_v=")),
    *on("config/validate.py", "config/parallel.py",
        Has("ParallelConfig",
            "pipeline_parallel_size decode_context_parallel_size prefill_context_parallel_size "
            "tensor_parallel_size world_size data_parallel_size_local use_ubatching "
            "enable_batch_sharded_sampling distributed_executor_backend nnodes")),
    *on("runner/model_state.py", "config/vllm.py",
        Has("VllmConfig",
            "num_speculative_tokens additional_config kernel_config speculative_config "
            "compilation_config scheduler_config cache_config use_v2_model_runner")),
    # ---- speculative config ----
    *on("config/resolved_config.py", _SPECULATIVE,
        Says("", ('"standard", "synthetic"',))),
    *on("config/vllm_args.py", _SPECULATIVE,
        Has("SpeculativeConfig",
            "rejection_sample_method synthetic_acceptance_rates draft_model_config "
            "num_speculative_tokens num_speculative_tokens_per_batch_size update_arch_"),
        Has("SpeculativeConfig", "use_eagle_block_drop disable_eagle_block_drop")),
    *on("config/validate.py", _SPECULATIVE,
        Says("", ('rejection_sample_method: RejectionSampleMethod = "standard"',))),
    *on("runner/speculator_setup.py", _SPECULATIVE,
        Says("", ("synthetic_acceptance_rates: list[float] | None = None",))),
    *on("runner/speculator_setup.py", "v1/spec_decode/utils.py",
        Takes("unconditional_to_conditional_rates", "rates")),
    *on("config/vllm_args.py", "v1/worker/gpu/model_runner.py",
        # Ours is an "eagle3" to vLLM: the target hands out inner states, and a request is given no
        # cached block whose last row in a drafter's cache is of another text.
        Says("",
             ('if self.speculative_config.method in ("eagle3",',
              "self.use_aux_hidden_state_outputs = requires_aux_hidden_states("), one=True)),
    # ---- scheduler and counts ----
    *on("config/registration.py", "config/scheduler.py",
        Takes("SchedulerConfig.get_scheduler_cls", "self")),
    *on("config/registration.py", "v1/engine/core.py",
        Says("EngineCore.__init__",
             (".scheduler_config.get_scheduler_cls()", "Scheduler(vllm_config=vllm_config,"))),
    *on("scheduler.py", _SCHEDULER,
        Takes("Scheduler.update_from_output", "self scheduler_output model_runner_output"),
        Takes("Scheduler._update_request_with_output", "self request new_token_ids", "first"),
        Takes("Scheduler.make_spec_decoding_stats",
              "self spec_decoding_stats num_draft_tokens num_accepted_tokens "
              "num_invalid_spec_tokens request_id"),
        # Counted in this order, where the request has new tokens.
        Says("Scheduler.update_from_output",
             ("self.make_spec_decoding_stats(", "request.spec_decode_metrics.observe(",
              "self._update_request_with_output(", "self.make_stats(spec_decoding_stats,")),
        Takes("Scheduler._preempt_request", "self request timestamp drop_stale_output"),
        Takes("Scheduler._handle_stopped_request", "self request"),
        Says("Scheduler._handle_stopped_request",
             ("safe_frontier = request.num_computed_tokens - request.num_output_placeholders",)),
        Attributes("Scheduler",
                   "requests running num_spec_tokens log_stats spec_decode_metrics_level")),
    *on("scheduler.py", "v1/core/sched/output.py",
        Has("SchedulerOutput", "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens")),
    *on("scheduler.py", "v1/request.py",
        Has("Request", "num_output_tokens"),
        Attributes("Request", "spec_token_ids spec_decode_metrics")),
    *on("scheduler.py", "v1/metrics/stats.py",
        Takes("RequestSpecDecodeMetrics.observe", "self num_draft_tokens num_accepted detailed")),
    *on("scheduler.py", "v1/spec_decode/metrics.py",
        Takes("SpecDecodingStats.observe_draft", "self num_draft_tokens num_accepted_tokens")),
    *on("metrics/stop_strings.py", "v1/engine/output_processor.py",
        Takes("OutputProcessor.process_outputs",
              "self engine_core_outputs engine_core_timestamp iteration_stats", "first")),
    # ---- sleep and weights ----
    *on("deep_sleep.py", _WORKER,
        Takes("Worker.sleep", "self level")),
    *on("made_up_requests.py", _WORKER,
        Takes("Worker.compile_or_warm_up_model", "self")),
    *on("draft_updates.py", _WORKER,
        Takes("Worker.start_draft_weight_update", "self"),
        Takes("Worker.finish_weight_update", "self"),
        Takes("Worker.get_draft_model", "self"),
        Attributes("Worker", "_weight_update_is_draft")),
    # ---- ranks ----
    *on("ranks.py", "distributed/parallel_state.py",
        Attributes("GroupCoordinator", "cpu_group=")),
    # ---- offline ----
    *on("offline/extract.py", _EXTRACT,
        Takes("ExtractHiddenStatesSpeculator.propose",
              "self input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states",
              "first"),
        Says("", ("eagle_aux_hidden_state_layer_ids",))),
    *on("offline/extract.py", _SPECULATIVE,
        Says("", ("extract_hidden_states",))),
    *on("offline/extract.py", "config/kv_transfer.py",
        Has("KVTransferConfig",
            "kv_connector kv_connector_module_path kv_role kv_connector_extra_config")),
    *on("offline/extract.py", _CONNECTOR,
        Takes(f"{_EXAMPLE}.__init__", "self vllm_config role kv_cache_config"),
        Takes(f"{_EXAMPLE}.register_kv_caches", "self kv_caches"),
        Takes(f"{_EXAMPLE}._submit_async_write", "self pending"),
        Takes(f"{_EXAMPLE}._write_tensors", "tensors event filename lock_fd"),
        Has("PendingSave", "req_id filename token_ids block_ids"),
        Attributes(_EXAMPLE, "_kv_cache: _lock_fds: _req_copy_events:"),
        # The stand-in for a copy's event answers to these and to nothing else.
        Says("", ("event.synchronize(",)),
        SaysNot("", "event.wait("),
        SaysNot("", "event.elapsed_time("),
        Says(_EXAMPLE, ('"shared_storage_path"',)),
        Says(_EXAMPLE, ('"hidden_states_path"',)),
        Takes("load_hidden_states", "path"),
        Takes("cleanup_hidden_states", "path", "first")),
    *on("offline/extract.py", _CLIENT,
        # An engine in this process can be stepped until its connector was told of every request.
        Says("InprocClient.__init__", ("self.engine_core = EngineCore(",)),
        Takes("InprocClient.get_output", "self"),
        Takes("InprocClient.shutdown", "self", "first"),
        SaysNot("MPClient", "self.engine_core =")),
    *on("offline/extract.py", "v1/engine/core.py",
        Says("EngineCore.__init__", ("self.scheduler",))),
    *on("offline/extract.py", "v1/core/sched/interface.py",
        Takes("SchedulerInterface.has_requests", "self")),
    *on("offline/generate.py", "sampling_params.py",
        Has("SamplingParams", "temperature top_p max_tokens seed detokenize")),
    *on("offline/generate.py", "entrypoints/llm.py",
        Takes("LLM.generate", "self prompts sampling_params", "first"),
        Takes("LLM.generate", "use_tqdm", "among")),
    *on("offline/generate.py", "outputs.py",
        Has("CompletionOutput", "token_ids")),
)  # fmt: skip
"""In the order in which they are used."""
