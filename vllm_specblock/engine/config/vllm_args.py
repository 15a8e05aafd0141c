"""Engine arguments: from the user's `speculative_config` to vLLM's, checked without weights.

Runs while the engine's config is built, so that errors come before anything is loaded.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.config.vllm import OptimizationLevel
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_specblock.config import METHOD, VLLM_KEYS, OptionError, default_nodes
from vllm_specblock.drafters.registry import drafter_kind
from vllm_specblock.engine.config import validate
from vllm_specblock.engine.config.resolved_config import ResolvedConfig, resolve_config

PLACEHOLDER_DRAFT_CONFIG = Path(__file__).parent / "placeholder_draft_config"
"""The draft model config that vLLM requires; it cannot parse our drafters' own."""

_REQUESTS = 256
"""Largest batch to size for: larger steps are compute-bound and verify few nodes."""

_GRAPH_REQUESTS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)
"""Requests of the decode steps that are captured beside vLLM's own sizes, up to 512 tokens."""


def translate(args: EngineArgs, target: ModelConfig, parallel: ParallelConfig) -> ResolvedConfig:
    """Check a SpecBlock request and rewrite `args` into what vLLM itself understands.

    Raises:
        OptionError: a target, runner or parallelism that cannot verify trees, and as `resolve`.
        CheckpointError: as `resolve`.
    """
    validate.check_runner(args, parallel)
    validate.check_target(target)
    validate.check_quantization(target)
    validate.check_cache(args, target)
    resolved = resolve(args, target, parallel)
    given, num_speculative_tokens = keys_of(args), resolved.num_speculative_tokens
    validate.check_batch(args, num_speculative_tokens)
    args.speculative_config = {
        **{key: value for key, value in given.items() if key in VLLM_KEYS},
        "method": "eagle3",
        "model": str(PLACEHOLDER_DRAFT_CONFIG),
        "num_speculative_tokens": num_speculative_tokens,
        "enable_adaptive_verification": resolved.adaptive,
        "disable_eagle_block_drop": not any(
            drafter_kind(drafter.kind).needs_block_drop for drafter in resolved.drafters
        ),
    }
    on_cpu = current_platform.is_cpu()
    if on_cpu:  # vLLM wants CUDA graphs with it; `host_budget.py` does without
        del args.speculative_config["enable_adaptive_verification"]
    else:
        capture_trees(args, num_speculative_tokens)
    if args.enable_lora or not on_cpu:  # with LoRA, vLLM refuses smaller steps than all trees take
        make_room(args, num_speculative_tokens, parallel)
    args.attention_backend = AttentionBackendEnum.CUSTOM
    # One block table for all layers; sliding windows then save no memory. Recurrent layers have a
    # table of their own.
    args.disable_hybrid_kv_cache_manager = not target.is_hybrid
    return resolved


def keys_of(args: EngineArgs) -> dict[str, Any]:
    """Return the user's `speculative_config`, dashes in keys replaced."""
    return {key.replace("-", "_"): value for key, value in args.speculative_config.items()}


def resolve(args: EngineArgs, target: ModelConfig, parallel: ParallelConfig) -> ResolvedConfig:
    """Return the options, checked against the target and the device.

    Raises:
        OptionError: a wrong key or value; a drafter of another target; drafters or options that do
            not go together.
        CheckpointError: a drafter's files do not match their config.
    """
    given, on_cpu = keys_of(args), current_platform.is_cpu()
    fixed = given.get("num_speculative_tokens_per_batch_size") is not None
    given.setdefault("enable_adaptive_verification", not fixed and _can_adapt(args, parallel))
    given.setdefault("num_speculative_tokens", default_nodes(on_cpu))
    hub = {"token": args.hf_token, "cache_dir": args.download_dir}
    resolved = resolve_config(given, target, hub)
    validate.check_combination(args, resolved, given, parallel)
    resolved = _with_skipping(resolved, parallel)
    validate.check_weights(resolved)
    validate.check_adapt(resolved, parallel, target)
    return resolved


def _can_adapt(args: EngineArgs, parallel: ParallelConfig) -> bool:
    """Return whether adaptive verification can run; a GPU needs full CUDA graphs for decoding."""
    if args.enable_lora:
        return False
    if current_platform.is_cpu():
        return parallel.tensor_parallel_size == 1
    mode, by_level = args.compilation_config.cudagraph_mode, OptimizationLevel.O2
    full = args.optimization_level >= by_level if mode is None else mode.has_full_cudagraphs()
    return full and not args.enforce_eager and parallel.data_parallel_size == 1


def _with_skipping(resolved: ResolvedConfig, parallel: ParallelConfig) -> ResolvedConfig:
    """Set the default of `skip_drafter`, or raise OptionError if it is true but not supported."""
    combine = resolved.combine
    if combine is None or combine.skip_drafter is False:
        return resolved
    without_weights = sum(drafter.folder is None for drafter in resolved.drafters)
    can = (
        current_platform.is_cpu()
        and parallel.tensor_parallel_size == 1
        and (combine.draft_policy, combine.budget) == ("merge", "joint")
        and without_weights == 1
    )
    if combine.skip_drafter and not can:
        raise OptionError(
            "speculative_config key 'skip_drafter' is true, but it needs a CPU, one process, and "
            "a merge ('draft_policy' 'merge', 'budget' 'joint') with an n-gram drafter: drop the "
            "key."
        )
    return replace(resolved, combine=combine.model_copy(update={"skip_drafter": can}))


def make_room(args: EngineArgs, num_speculative_tokens: int, parallel: ParallelConfig) -> None:
    """Raise an unset `max_num_batched_tokens` to the tokens of the requests' trees."""
    if args.max_num_batched_tokens is not None or args.enable_chunked_prefill is False:
        return
    tokens, requests = args.get_batch_defaults(parallel.world_size)
    count = min(args.max_num_seqs or max(requests.values()), _REQUESTS)
    wanted = count * (num_speculative_tokens + 1)
    # The default (server or offline) is not known here.
    if wanted > min(tokens.values()):
        args.max_num_batched_tokens = max(wanted, *tokens.values())


def capture_trees(args: EngineArgs, num_speculative_tokens: int) -> None:
    """Add decode steps of whole trees to the sizes that vLLM captures, unless any are set."""
    names = "cudagraph_capture_sizes", "max_cudagraph_capture_size"
    given = [getattr(of, name) for of in (args, args.compilation_config) for name in names]
    scheduled = args.speculative_config.get("num_speculative_tokens_per_batch_size")
    if any(size is not None for size in given) or scheduled or args.enforce_eager:
        return
    grid = {1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)}
    most = args.max_num_seqs or _GRAPH_REQUESTS[-1]
    trees = {count * (num_speculative_tokens + 1) for count in _GRAPH_REQUESTS if count <= most}
    longest = max(512, min(most, _GRAPH_REQUESTS[-1]) * (num_speculative_tokens + 1))
    args.cudagraph_capture_sizes = sorted(size for size in grid | trees if size <= longest)


def finish(config: SpeculativeConfig, resolved: ResolvedConfig, target: ModelConfig) -> None:
    """Attach our options, and set which hidden states the target returns."""
    setattr(config, METHOD, resolved)
    draft = config.draft_model_config.hf_config
    # The target returns its last state in any case.
    inner = [layer for layer in resolved.layers if layer < target.hf_text_config.num_hidden_layers]
    draft.eagle_aux_hidden_state_layer_ids = inner
    if not inner:  # vLLM asks the target for inner states of "eagle3" only
        config.method = "eagle"
    draft.hidden_size = target.get_hidden_size()
    draft.vocab_size = target.get_vocab_size()
    config.update_arch_()
