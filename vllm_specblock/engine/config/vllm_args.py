"""Engine arguments: from the user's `speculative_config` to vLLM's, checked without weights.

Runs while the engine's config is built, so that errors come before anything is loaded.
"""

from __future__ import annotations

from pathlib import Path

from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_specblock.config import METHOD, VLLM_KEYS
from vllm_specblock.drafters.registry import drafter_kind
from vllm_specblock.engine.config import validate
from vllm_specblock.engine.config.resolved_config import ResolvedConfig, keys_of, resolve

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
    validate.warn_of_rounding(target)
    validate.check_cache(args, target)
    resolved = resolve(args, target, parallel)
    num_speculative_tokens = resolved.num_speculative_tokens
    args.speculative_config = {
        **{key: value for key, value in keys_of(args).items() if key in VLLM_KEYS},
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
