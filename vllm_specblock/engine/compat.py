"""What we rely on in vLLM's internals, and differences between its releases.

`HOOKS` is checked against source text, which is never imported: the installed release when an
engine starts and in `specblock doctor`, any other with `make contract VLLM=0.33.0`.

No other module depends on the release. An argument that a release only adds is accepted and ignored
where it occurs. To drop a release, drop its branches at the end of this file.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
import re
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.gpu.block_table import BlockTables

logger = logging.getLogger("vllm.specblock")

PACKAGE = "vllm"
PLUGIN = Path(__file__).resolve().parents[1]


class Hook(NamedTuple):
    """A part of vLLM that we rely on.

    Attributes:
        file: in the folder `vllm`; "" for an import.
        need: one of
            `name(a, b)`: a function with these parameters; a last `...` stands for others;
            `name: a b`: a class that defines these names or sets them on `self`, or a function with
                these parameters, a kernel's without `_ptr`;
            `name ~ text ... text`: source with these pieces in this order, white space aside;
            `name ~ text || text`: source with one of them; `name !~ text`: source without it;
            `from vllm.module import name`. Without a name the whole file is meant.
        breaks: what fails without it.
    """

    file: str
    need: str
    breaks: str

    def trouble(self, sources: Sources) -> str | None:
        """Return how `need` is not met, in a clause; None: it is met."""
        if self.need.startswith("from "):
            _, module, _, name = self.need.split()
            return sources.import_trouble(module, name)
        name, kind, rest = re.split(r" ?(\(|:|!?~) ?", self.need, maxsplit=1)
        part = sources.find(self.file, name)
        if isinstance(part, str):
            return part
        trouble: str | None = None
        if kind == "(":
            wanted, found = re.findall(r"\.\.\.|\w+", rest), part.parameters
            if wanted[-1] == "...":
                wanted, found = wanted[:-1], found[: len(wanted) - 1]
            if wanted != found:
                trouble = f"takes ({', '.join(part.parameters)}), not ({rest}"
        elif kind == ":":
            missing = [each for each in rest.split() if each not in part.members]
            trouble = f"has no {', '.join(missing)}" if missing else None
        elif kind == "!~":
            trouble = f"says {rest!r} now" if _says(part.text, rest) else None
        elif not any(_says(part.text, each) for each in rest.split(" || ")):
            trouble = f"does not say {rest!r}"
        return trouble and f"{name or self.file} {trouble}"


def _says(text: str, pieces: str) -> bool:
    """Return whether the pieces, `...` between them, stand in this order in `text`."""
    text, place = _squeezed(text), 0
    for piece in map(_squeezed, pieces.split(" ... ")):
        place = text.find(piece, place)
        if place < 0:
            return False
    return True


def _squeezed(text: str) -> str:
    return "".join(text.split())


class Part:
    """A class, a function or a whole module, and its source."""

    def __init__(self, node: Any, text: str) -> None:
        self.node, self.text = node, text

    @property
    def parameters(self) -> list[str]:
        """Names of a function's parameters, in the order of its signature."""
        given = getattr(self.node, "args", ast.arguments([], [], None, [], [], None, []))
        found = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
        return [argument.arg for argument in found if argument is not None]

    @cached_property
    def members(self) -> set[str]:
        """Parameters of a function, a kernel's without `_ptr`; names that a class defines."""
        if isinstance(self.node, ast.FunctionDef):
            return {*self.parameters, *(each.removesuffix("_ptr") for each in self.parameters)}
        return set(re.findall(r"(?m)(?:def |self\.|^\s+(?=\w+\s*[:=]))(\w+)", self.text))


class Sources:
    """The folder `vllm` of an installation, or of a wheel that was unpacked."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, Part] = {}

    def find(self, file: str, name: str) -> Part | str:
        """Return what `file` defines as `name`, such as "Class.method"; a clause if it does not.

        Of what is defined twice, as overloads are, the last counts.
        """
        if not (self.root / file).is_file():
            return f"there is no {PACKAGE}/{file}"
        if file not in self._modules:
            text = (self.root / file).read_text(encoding="utf-8")
            self._modules[file] = Part(ast.parse(text), text)
        part = module = self._modules[file]
        for each in name.split(".") if name else ():
            found = [node for node in _definitions(part.node) if node.name == each]
            if not found:
                return f"{file} has no {name!r}"
            node = found[-1]
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            lines = module.text.splitlines(keepends=True)[first - 1 : node.end_lineno]
            part = Part(node, "".join(lines))
        return part

    def import_trouble(self, module: str, name: str) -> str | None:
        """Return why `name` cannot be imported from `module`, in a clause; None: it can."""
        folder = self.root.joinpath(*module.split(".")[1:])
        files = [*filter(Path.is_file, (folder.with_suffix(".py"), folder / "__init__.py"))]
        if not files:
            return f"there is no module {module}"
        if (folder / name).is_dir() or (folder / f"{name}.py").is_file():
            return None
        # Names that a module imports, or loads when they are asked for, are in its text.
        text = files[0].read_text(encoding="utf-8")
        if "import *" in text:
            text = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
        return None if re.search(rf"\b{name}\b", text) else f"{module} has no {name!r}"


def _definitions(node: ast.AST) -> Iterator[Any]:
    """Yield the classes and functions of a module or class, those under `if` and `try` included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif isinstance(child, ast.If | ast.Try | ast.ExceptHandler):
            yield from _definitions(child)


def installed() -> Path | None:
    """Return the folder of the vLLM that Python would import; None: there is none."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return Path(folders[0]) if folders else None


@cache
def hooks() -> tuple[Hook, ...]:
    """Return all hooks: the table, the kernels that are replaced on a CPU, and our imports."""
    return (*HOOKS, *replaced_kernels(), *our_imports())


def broken(root: Path) -> Iterator[str]:
    """Yield a line for every hook that does not hold in the folder `vllm` at `root`."""
    sources = Sources(root)
    for hook in hooks():
        trouble = hook.trouble(sources)
        if trouble is not None:
            where = f" ({hook.file})" if hook.file else ""
            yield f"{hook.breaks}: {trouble}{where}"


@cache
def warn_of_broken_hooks() -> None:
    """Warn of hooks that do not hold in the installed vLLM, once per process."""
    for line in broken(installed() or Path()):
        logger.warning("This vLLM is not as SpecBlock needs it, which may break %s", line)


def replaced_kernels() -> Iterator[Hook]:
    """Yield a hook on the arguments that each replacement of a kernel in `cpu/` reads."""
    for path in sorted((PLUGIN / "cpu").glob("*.py")):
        for node in _definitions(ast.parse(path.read_text(encoding="utf-8"))):
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and "replaces_kernel" in ast.dump(decorator):
                    module, _, kernel = ast.literal_eval(decorator.args[0]).rpartition(".")
                    wanted = " ".join(Part(node, "").parameters)
                    file = f"{_GPU}{module.replace('.', '/')}.py"
                    yield Hook(file, f"{kernel}: {wanted}", _CPU)


def our_imports() -> Iterator[Hook]:
    """Yield a hook on every name of vLLM's that we import, type checkers' imports included."""
    for path in sorted([*PLUGIN.glob("engine/**/*.py"), *PLUGIN.glob("cpu/*.py")]):
        user = path.relative_to(PLUGIN).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
                for alias in node.names:
                    yield Hook("", f"from {node.module} import {alias.name}", user)


def _on(file: str, breaks: str, *needs: str) -> Iterator[Hook]:
    return (Hook(file, need, breaks) for need in needs)


_GPU = "v1/worker/gpu/"
_RUNNER = _GPU + "model_runner.py"
_REJECTION = _GPU + "spec_decode/rejection_sampler.py"
_ADAPTIVE = _GPU + "spec_decode/adaptive_verification.py"
_SCHEDULER = "v1/core/sched/scheduler.py"
_SPECULATIVE = "config/speculative.py"
_CONNECTOR = "distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"
_CPU_ATTENTION = "v1/attention/backends/cpu_attn.py"
_EXTRACT = "features of a target"
_CPU = "an engine on a CPU"

HOOKS: tuple[Hook, ...] = (
    # ---- an engine's arguments ----
    *_on("engine/arg_utils.py", "method 'specblock' and what follows from it",
        "EngineArgs.create_speculative_config(self, target_model_config, target_parallel_config)",
        "EngineArgs.create_engine_config ~ maybe_override_with_speculators("
        " ... vllm_speculative_config=self.speculative_config",
        "EngineArgs: speculative_config attention_backend attention_config"
        " kv_cache_dtype disable_log_stats hf_token download_dir enable_lora"
        " disable_hybrid_kv_cache_manager kv_sharing_fast_prefill kv_transfer_config"
        " kv_offloading_size"),
    *_on("engine/arg_utils.py", "default batch and graph sizes",
        "EngineArgs: max_num_batched_tokens max_num_seqs cudagraph_capture_sizes"
        " max_cudagraph_capture_size enable_chunked_prefill compilation_config enforce_eager",
        "EngineArgs.get_batch_defaults(cls, world_size)",
        # The plugin is asked before vLLM fills in what is unset.
        "EngineArgs.create_engine_config ~ self.create_speculative_config("
        " ... self._set_default_max_num_seqs_and_batched"),
    *_on("transformers_utils/config.py", "drafters in the speculators layout",
        "maybe_override_with_speculators: model tokenizer revision trust_remote_code"
        " vllm_speculative_config hf_token"),
    *_on("sampling_params.py", "min_p, logit_bias and specblock_draft",
        "SamplingParams._validate_spec_decode(self, speculative_config)"),
    *_on("config/model.py", "refusals of targets",
        "ModelConfig: is_encoder_decoder use_mla is_hybrid is_attention_free"
        " supports_multimodal_inputs uses_alibi hf_text_config get_hidden_size get_vocab_size"
        " max_model_len attention_chunk_size runner_type"),
    *_on("config/parallel.py", "refusals of parallelism",
        "ParallelConfig: pipeline_parallel_size decode_context_parallel_size"
        " prefill_context_parallel_size tensor_parallel_size world_size data_parallel_size_local"
        " use_ubatching enable_batch_sharded_sampling distributed_executor_backend nnodes"),
    *_on("config/vllm.py", "every part of an engine",
        "VllmConfig: num_speculative_tokens kernel_config speculative_config"
        " compilation_config scheduler_config cache_config use_v2_model_runner"),
    *_on(_SPECULATIVE, "the config of an engine with drafts",
        "SpeculativeConfig: draft_model_config num_speculative_tokens update_arch_"
        " num_speculative_tokens_per_batch_size"
        " use_eagle_block_drop disable_eagle_block_drop",
        "~ extract_hidden_states"),
    *_on("model_executor/model_loader/base_loader.py", "checks of the target's layers",
        "BaseModelLoader.create_model(self, vllm_config, ...)",
        "BaseModelLoader.load_model ~ self.create_model( ... self.load_weights("),
    *_on("model_executor/layers/attention/attention.py", "checks of the target's layers",
        "Attention: head_size head_size_v"),
    # ---- the scheduler and vLLM's counts ----
    *_on("config/scheduler.py", "the scheduler for trees",
        "SchedulerConfig.get_scheduler_cls(self)"),
    *_on("v1/engine/core.py", "the scheduler for trees",
        "EngineCore.__init__ ~ .scheduler_config.get_scheduler_cls()"
        " ... Scheduler(vllm_config=vllm_config,",
        "EngineCore.__init__ ~ self.scheduler"),
    *_on(_SCHEDULER, "requests without drafts, and counts of accepted tokens",
        "Scheduler._update_after_schedule(self, scheduler_output)",
        "Scheduler.update_draft_token_ids(self, draft_token_ids)",
        "Scheduler.update_from_output(self, scheduler_output, model_runner_output)",
        "Scheduler._update_request_with_output(self, request, new_token_ids, ...)",
        "Scheduler.make_spec_decoding_stats(self, spec_decoding_stats, num_draft_tokens,"
        " num_accepted_tokens, num_invalid_spec_tokens, request_id)",
        # Counted in this order, where the request has new tokens.
        "Scheduler.update_from_output ~ self.make_spec_decoding_stats("
        " ... request.spec_decode_metrics.observe( ... self._update_request_with_output("
        " ... self.make_stats(spec_decoding_stats,",
        "Scheduler: requests running num_spec_tokens log_stats spec_decode_metrics_level"),
    *_on(_SCHEDULER, "streaming-input sessions",
        "Scheduler._preempt_request(self, request, timestamp, drop_stale_output)",
        "Scheduler._handle_stopped_request(self, request)",
        "Scheduler._handle_stopped_request ~ safe_frontier = request.num_computed_tokens"
        " - request.num_output_placeholders"),
    *_on("v1/core/sched/async_scheduler.py", "requests without drafts",
        "AsyncScheduler ~ super()._update_after_schedule(scheduler_output)"
        " ... request.spec_token_ids = "),
    *_on("v1/core/sched/output.py", "requests without drafts",
        "SchedulerOutput: num_scheduled_tokens total_num_scheduled_tokens"
        " scheduled_spec_decode_tokens scheduled_new_reqs scheduled_cached_reqs"),
    *_on("v1/request.py", "counts of accepted tokens",
        "Request: num_output_tokens spec_token_ids spec_decode_metrics"),
    *_on("v1/metrics/stats.py", "counts of accepted tokens",
        "RequestSpecDecodeMetrics.observe(self, num_draft_tokens, num_accepted, detailed)"),
    *_on("v1/spec_decode/metrics.py", "counts of accepted tokens",
        "SpecDecodingStats.observe_draft(self, num_draft_tokens, num_accepted_tokens)"),
    *_on("v1/engine/output_processor.py", "counts of tokens after a stop string",
        "OutputProcessor.process_outputs(self, engine_core_outputs, engine_core_timestamp,"
        " iteration_stats, ...)"),
    # ---- workers ----
    *_on("v1/worker/gpu_worker.py", "the refusal of deep sleep",
        "Worker.sleep(self, level)"),
    *_on("v1/worker/gpu_worker.py", "draft weight updates",
        "Worker.start_draft_weight_update(self)",
        "Worker.finish_weight_update(self)",
        "Worker.get_draft_model(self)",
        "Worker: _weight_update_is_draft"),
    *_on(_GPU + "warmup.py", "adaptation, which must not record warm-up requests",
        '~ f"_warmup_{i}_"', '~ req_id_prefix: str = "_v2_mixed_warmup"'),
    *_on("distributed/parallel_state.py", "adaptation on several ranks",
        "GroupCoordinator: cpu_group"),
    # ---- a step ----
    *_on(_GPU + "spec_decode/__init__.py", "the speculator",
        "init_speculator(vllm_config, device, req_states)"),
    *_on(_RUNNER, "the speculator",
        "~ from vllm.v1.worker.gpu.spec_decode import init_speculator",
        # vLLM treats our method as "eagle3": the target returns hidden states of inner layers, and
        # a cached block is dropped if its last drafter row depends on the next token.
        '~ if self.speculative_config.method in ("eagle3",'
        " || self.use_aux_hidden_state_outputs = requires_aux_hidden_states("),
    *_on(_GPU + "spec_decode/speculator.py", "the speculator",
        "BaseSpeculator.propose(self, input_batch, attn_metadata, slot_mappings,"
        " last_hidden_states, aux_hidden_states, ...)",
        "BaseSpeculator.propose: num_speculative_tokens dummy_run skip_attn_for_dummy_run",
        "BaseSpeculator: init_cudagraph_manager capture",
        "DraftModelSpeculator: load_draft_model load_model set_attn",
        "DraftModelSpeculator.__init__(self, vllm_config, device)"),
    *_on(_GPU + "model_states/__init__.py", "the tree mask",
        "resolve_model_state_cls ~ get_model_state_cls"),
    *_on(_GPU + "model_states/default.py", "the tree mask",
        "DefaultModelState.prepare_attn(self, input_batch, cudagraph_mode, block_tables,"
        " slot_mappings, attn_groups, kv_cache_config, ...)",
        "DefaultModelState.prepare_inputs(self, input_batch, req_states)",
        "DefaultModelState.prepare_dummy_inputs(self, num_reqs, num_tokens)",
        "DefaultModelState.add_request(self, req_index, new_req_data)",
        "DefaultModelState.remove_request(self, req_id)",
        "DefaultModelState: rope_state max_num_tokens max_num_reqs"),
    *_on(_GPU + "model_states/interface.py", "the tree mask",
        "ModelState.initialize_kv_cache(self, kv_cache_config, block_tables)",
        "ModelState.custom_sampler(self, sampler)"),
    *_on(_RUNNER, "the tree mask, which counts on requests with drafts coming first",
        "sort_batch_req_ids ~ not draft_tokens.get(r) ... decode_query_len, num"),
    *_on(_REJECTION, "verification",
        "RejectionSampler._verify(self, logits, draft_logits, draft_sampled, pos, cu_num_logits,"
        " idx_mapping, idx_mapping_np, expanded_idx_mapping, expanded_local_pos,"
        " seq_lens_upper_bound_np, verify_draft_sampled)",
        # Handed on by position.
        "RejectionSampler._verify_in_chunks(self, logits, input_batch, draft_logits,"
        " draft_sampled, pos, ...)",
        "RejectionSampler.__call__ ~ self._verify_in_chunks(logits,input_batch,draft_logits,"
        "draft_sampled,pos,",
        "RejectionSampler.__init__(self, sampler, spec_config, device, ...)",
        "RejectionSampler: enable_adaptive_verification sampler"),
    *_on(_GPU + "sample/sampler.py", "verification",
        "Sampler.sample(self, logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos,"
        " input_ids, expanded_local_pos, seq_lens_upper_bound_np, return_logprobs)",
        # Processors beyond these three are the user's, and may read the output's order.
        "Sampler.__init__ ~ _state, ... _state, ... _state,"),
    *_on(_GPU + "sample/states.py", "verification",
        "SamplingStates: max_num_logprobs"),
    *_on(_GPU + "input_batch.py", "the rows of a step",
        "InputBatch: num_reqs idx_mapping idx_mapping_np expanded_idx_mapping expanded_local_pos"
        " num_scheduled_tokens num_tokens num_tokens_after_padding num_draft_tokens"
        " num_draft_tokens_per_req query_start_loc seq_lens seq_lens_cpu_upper_bound positions"
        " logits_indices cu_num_logits is_prefilling_np prefill_len_np"
        " num_computed_prefill_tokens_np has_prefill make_dummy"),
    *_on(_GPU + "states.py", "the rows of a step",
        "RequestState: all_token_ids total_len prompt_len draft_tokens req_id_to_index prefill_len"
        " num_computed_prefill_tokens"),
    *_on(_GPU + "buffer_utils.py", "texts on the device",
        "StagedWriteTensor.__init__: dtype device uva_instead_of_gpu"),
    *_on(_GPU + "cudagraph_utils.py", "graphs",
        "CudaGraphManager.__init__(self, vllm_config, device, cudagraph_mode, decode_query_len,"
        " ...)",
        "CudaGraphManager.dispatch(self, num_reqs, num_tokens, uniform_token_count, ...)",
        "CudaGraphManager.capture(self, create_forward_fn, ...)"),
    # ---- adaptive verification ----
    *_on(_ADAPTIVE, "adaptive verification",
        "AdaptiveVerificationManager.__init__(self, req_states, ...)",
        "AdaptiveVerificationManager.get_num_tokens(self, num_tokens_per_req, draft_tokens)",
        "AdaptiveVerificationManager.record_confidences(self, confidence_probs, input_batch)",
        "AdaptiveVerificationManager.set_initial_cost_curves(self, samples)",
        "AdaptiveVerificationManager.reallocate_drafts(self, req_ids, idx_mapping)",
        "AdaptiveVerificationManager.batches_to_profile(self, capture_sizes)",
        'AdaptiveVerificationManager.batches_to_profile ~ "num_tokens": num_tokens',
        "AdaptiveVerificationManager: req_states num_speculative_steps cost_tables _batch_budget"
        " _max_total_logits _confidence_probs _stale_confidences _stale_idx num_bonus_tokens"
        " query_start_loc _cu_num_logits",
        # Looked up by name: another plugin may have replaced the class.
        "maybe_create_adaptive_verification_manager"
        " ~ return AdaptiveVerificationManager(req_states,",
        # As `reallocated` has it.
        "AdaptiveVerificationManager.reallocate_drafts"
        " ~ return (self._cu_num_logits[: num_reqs + 1], self.query_start_loc, draft_budget,)"
        " || return (self._cu_num_logits[: num_reqs + 1], self.query_start_loc, draft_budget,"
        " admitted_drafts,)"),
    *_on(_RUNNER, "adaptive verification",
        "~ cu_num_logits, query_start_loc, total_num_draft_tokens ="
        " (adaptive_verification.reallocate_drafts("
        " || (cu_num_logits, query_start_loc, total_num_draft_tokens) ="
        " (adaptive_verification.reallocate_drafts("
        " || (cu_num_logits, query_start_loc, total_num_draft_tokens, num_admitted_draft_tokens,)"
        " = adaptive_verification.reallocate_drafts(",
        "~ self.speculator.draft_token_confidence_probs",
        '~ self.speculator, "enable_adaptive_verification", False',
        "GPUModelRunner._dummy_run: uniform_decode",
        "GPUModelRunner.sample_tokens(self, grammar_output)",
        "GPUModelRunner: execute_model_state req_states",
        "~ def resolve_adaptive_cudagraph_mode( || resolve_adaptive_cudagraph_mode,"),
    *_on(_GPU + "async_utils.py", "adaptive verification",
        "StepTimingSample: forward_ms num_target_tokens num_reqs",
        "AsyncOutput: model_runner_output"),
    # ---- attention and its caches ----
    *_on("v1/attention/backends/registry.py", "tree attention",
        "AttentionBackendEnum: CUSTOM"),
    *_on("v1/kv_cache_layout.py", "the place of a slot in a cache", "~ LBNHC = (0, 1, 3, 2, 4)"),
    *_on("v1/kv_cache_interface.py", "caches of drafters",
        "AttentionSpec: block_size num_kv_heads head_size dtype tokens_per_state"),
    *_on("v1/attention/backend.py", "tree attention",
        "CommonAttentionMetadata: query_start_loc query_start_loc_cpu seq_lens"
        " seq_lens_cpu_upper_bound block_table_tensor slot_mapping num_actual_tokens num_reqs"
        " max_seq_len max_query_len",
        "AttentionImpl.forward(self, layer, query, key, value, kv_cache, attn_metadata, output,"
        " ...)"),
    # Of a CUDA build, which cannot be imported without a GPU: its source is in every wheel.
    *_on("vllm_flash_attn/flash_attn_interface.py", "prompts on a GPU",
        "flash_attn_varlen_func: max_seqlen_q cu_seqlens_q max_seqlen_k seqused_k softmax_scale"
        " causal window_size softcap block_table out fa_version"),
    *_on("v1/attention/backends/fa_utils.py", "prompts on a GPU",
        "get_flash_attn_version: head_size"),
    # ---- offline engines ----
    *_on(_GPU + "spec_decode/extract_hidden_states.py", _EXTRACT,
        "ExtractHiddenStatesSpeculator.propose(self, input_batch, attn_metadata, slot_mappings,"
        " last_hidden_states, aux_hidden_states, ...)",
        "~ eagle_aux_hidden_state_layer_ids"),
    *_on("config/kv_transfer.py", _EXTRACT,
        "KVTransferConfig: kv_connector kv_connector_module_path kv_role"
        " kv_connector_extra_config"),
    *_on(_CONNECTOR, _EXTRACT,
        "ExampleHiddenStatesConnector.register_kv_caches(self, kv_caches)",
        "ExampleHiddenStatesConnector._submit_async_write(self, pending)",
        "ExampleHiddenStatesConnector._write_tensors(tensors, event, filename, lock_fd)",
        "PendingSave: req_id filename token_ids block_ids",
        "ExampleHiddenStatesConnector: _kv_cache _lock_fds _req_copy_events",
        # The stand-in for a copy's event has these methods and no others.
        "~ event.synchronize(", "!~ event.wait(", "!~ event.elapsed_time(",
        'ExampleHiddenStatesConnector ~ "shared_storage_path"',
        'ExampleHiddenStatesConnector ~ "hidden_states_path"',
        "load_hidden_states(path)", "cleanup_hidden_states(path, ...)"),
    # An engine in this process can be stepped until its connector has written every request.
    *_on("v1/engine/core_client.py", _EXTRACT,
        "InprocClient.__init__ ~ self.engine_core = EngineCore(",
        "InprocClient.get_output(self)", "InprocClient.shutdown(self, ...)",
        "MPClient !~ self.engine_core ="),
    *_on("_custom_ops.py", "keys and values on a GPU",
        "reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype,"
        " k_scale, v_scale)",
        "reshape_and_cache_flash ~ torch.ops._C_cache_ops.reshape_and_cache_flash("),
    # ---- a CPU; the kernels that are replaced there follow below ----
    *_on("config/vllm.py", _CPU,
        "VllmConfig.use_v2_model_runner ~ envs.VLLM_USE_V2_MODEL_RUNNER ... if not HAS_TRITON",
        "VllmConfig._validate_v2_model_runner(self)"),
    *_on("config/parallel.py", _CPU, "ParallelConfig: worker_cls"),
    *_on("triton_utils/importing.py", _CPU, '~ if "cpu" in backends: HAS_TRITON = True'),
    *_on("platforms/cpu.py", _CPU,
        "CpuPlatform ~ @classmethod def check_and_update_config(",
        "CpuPlatform ~ @classmethod def get_attn_backend_cls("),
    *_on("triton_utils/dispatcher.py", _CPU, "register_kernels(overrides)"),
    *_on(_GPU + "block_table.py", _CPU,
        "BlockTables.gather_block_tables(self, idx_mapping, num_reqs_padded, out, out_ptrs, ...)",
        "BlockTables.compute_slot_mappings(self, idx_mapping, query_start_loc, positions,"
        " num_tokens_padded, out)"),
    *_on(_GPU + "buffer_utils.py", _CPU,
        "FusedStagedWriter.apply(self, tensors, output_ptrs, output_strides)",
        "StagedWriteTensor.apply_write(self)"),
    *_on("v1/sample/ops/topk_topp_sampler.py", _CPU,
        "apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync)",
        "apply_top_k_top_p ~ if HAS_TRITON: ... return apply_top_k_top_p_pytorch("),
    *_on("v1/worker/cpu_worker.py", _CPU, "CPUWorker.compile_or_warm_up_model(self)"),
    *_on("distributed/device_communicators/shm_broadcast.py", _CPU,
        "SpinCondition.wait(self, timeout_ms)", "SpinCondition.__init__ ~ self.busy_loop_s = "),
    *_on("compilation/decorators.py", _CPU,
        "~ torch.compiler.load_compiled_function("
        " ... ._artifacts.compiled_fn.finalize_loading("),
    *_on("_custom_ops.py", _CPU,
        "weight_packed_linear_cpu ~ torch.ops._C.weight_packed_linear(output.reshape(-1, n),"
        " x.reshape(-1, x.size(-1)), packed_weight, bias, True",
        "cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, isa, k_scale,"
        " v_scale, kv_cache_dtype)"),
    *_on("model_executor/layers/utils.py", _CPU,
        "dispatch_cpu_unquantized_gemm ~ torch.ops._C.convert_weight_packed(layer.weight)"
        " ... layer.bias.to(torch.float32)"),
    *_on(_CPU_ATTENTION, _CPU,
        "_get_attn_isa(dtype, block_size, head_size, kv_cache_dtype)",
        "CPUAttentionBackend: get_supported_head_sizes",
        "CPUAttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config,"
        " device)",
        "CPUAttentionMetadataBuilder: window_size isa",
        "CPUAttentionBackendImpl.__init__(self, num_heads, head_size, scale, num_kv_heads,"
        " alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap, ...)",
        "CPUAttentionBackendImpl.forward(self, layer, query, key, value, kv_cache, attn_metadata,"
        " output, ...)",
        "CPUAttentionBackendImpl.do_kv_cache_update(self, layer, key, value, kv_cache,"
        " slot_mapping)"),
    # ---- LoRA adapters on the target ----
    *_on("lora/ops/torch_ops/lora_ops.py", "LoRA adapters",
        *(f"{name}(inputs, lora_b_weights, output_tensor, lora_indices_tensor, ...)"
          for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"))),
    *_on("lora/punica_wrapper/punica_base.py", "LoRA adapters",
        "PunicaWrapperBase: _sampler_indices _token_lora_indices indices_len"),
    # Adapters are mapped before the attention of a step is prepared, when ours are.
    *_on(_RUNNER, "LoRA adapters",
        "~ self._set_active_loras(*lora_inputs) ... self.model_state.prepare_attn("),
)  # fmt: skip


# ---- differences between releases ----


def reallocated(cu_num_logits: torch.Tensor, query_start: torch.Tensor, budget: int) -> Any:
    """Return what the runner unpacks of `reallocate_drafts`.

    From 0.33 on a fourth value has the admitted drafts on the host, for batch-sharded sampling.
    `validate.py` refuses that, and None is what vLLM itself returns without it.
    """
    # Not above: a process that builds no model would load it, too.
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    if hasattr(adaptive_verification, "AdmittedDraftCounts"):
        return cu_num_logits, query_start, budget, None
    return cu_num_logits, query_start, budget


def window_reach(tables: BlockTables) -> Sequence[int]:
    """Return per group of caches the tokens before a step's first that its windows see; 0: all.

    From 0.33 on the blocks before those are not in a step's tables: another request may own them.
    """
    reach: Sequence[int] | None = getattr(tables, "_sliding_window_reach", None)
    return reach if reach is not None else [0] * len(tables.block_tables)


def rows_left_over(tables: BlockTables, num_reqs: int) -> int:
    """Return how many rows the previous step filled; this step fills `num_reqs`.

    vLLM ≥ 0.33 clears the rows between.
    """
    before: int = getattr(tables, "_num_dirty_rows", 0)
    tables._num_dirty_rows = num_reqs
    return before
