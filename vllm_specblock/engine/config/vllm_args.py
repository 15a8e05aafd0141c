"""Engine arguments: checked, and from the user's `speculative_config` to vLLM's.

Runs while the engine's config is built, so that errors come before anything is loaded.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from vllm import envs
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_specblock.config import METHOD
from vllm_specblock.drafters.registry import drafter_kind
from vllm_specblock.engine.config.resolved_config import BY_BATCH_SIZE, ResolvedConfig, resolve
from vllm_specblock.options import OptionError, TargetError

logger = logging.getLogger("vllm.specblock")

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
    given = {key.replace("-", "_"): value for key, value in args.speculative_config.items()}
    check_engine(args, given, target, parallel)
    warn_of_rounding(target)
    resolved = resolve(given, args, target, parallel)
    num_speculative_tokens = resolved.num_speculative_tokens
    on_cpu = current_platform.is_cpu()
    args.speculative_config = {
        "method": "eagle3",
        "model": str(PLACEHOLDER_DRAFT_CONFIG),
        "num_speculative_tokens": num_speculative_tokens,
        BY_BATCH_SIZE: given.get(BY_BATCH_SIZE),
        # vLLM wants CUDA graphs with it; `host_budget.py` does without.
        "enable_adaptive_verification": resolved.adaptive and not on_cpu,
        "disable_eagle_block_drop": not any(
            drafter_kind(drafter.kind).needs_block_drop for drafter in resolved.drafters
        ),
    }
    if not on_cpu:
        capture_trees(args, num_speculative_tokens)
    if args.enable_lora or not on_cpu:  # with LoRA, vLLM refuses smaller steps than all trees take
        make_room(args, num_speculative_tokens, parallel)
    args.attention_backend = AttentionBackendEnum.CUSTOM
    # One block table for all layers; sliding windows then save no memory. Recurrent layers have a
    # table of their own.
    args.disable_hybrid_kv_cache_manager = not target.is_hybrid
    return resolved


def check_engine(
    args: EngineArgs, given: dict[str, Any], target: ModelConfig, parallel: ParallelConfig
) -> None:
    """Refuse arguments and targets that cannot verify trees; `given`: `speculative_config`."""
    on_cpu = current_platform.is_cpu()
    backend = args.attention_backend or args.attention_config.backend
    context = "context parallelism, since tree attention needs the whole cache"
    connectors = args.kv_transfer_config is not None or args.kv_offloading_size
    sharded = parallel.enable_batch_sharded_sampling
    method = given.get("rejection_sample_method", "standard")
    said = getattr(target.hf_config, "quantization_config", None) or {}
    for refused, what, options in (
        (envs.VLLM_USE_V2_MODEL_RUNNER is False, "Model Runner V1", "VLLM_USE_V2_MODEL_RUNNER=0"),
        (
            target.runner_type != "generate",
            f"runner {target.runner_type!r}, since it drafts generated text only",
            "runner, or speculative_config",
        ),
        (method != "standard", f"{method!r} rejection, only 'standard'", "rejection_sample_method"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism", "pipeline_parallel_size"),
        (parallel.decode_context_parallel_size > 1, context, "decode_context_parallel_size"),
        (parallel.prefill_context_parallel_size > 1, context, "prefill_context_parallel_size"),
        (
            backend not in (None, AttentionBackendEnum.CUSTOM),
            "attention backends besides its own, which draft trees need",
            "attention_backend",
        ),
        (
            args.disable_hybrid_kv_cache_manager is False and not target.is_hybrid,
            "a block table per layer type, since drafters use the target's",
            "disable_hybrid_kv_cache_manager",
        ),
        (parallel.use_ubatching, "micro-batches", "enable_dbo and ubatch_size"),
        (connectors, "KV connectors", "kv_transfer_config and kv_offloading_size"),
        (args.kv_sharing_fast_prefill, "fast prefill", "kv_sharing_fast_prefill"),
        (sharded, "sharded samples", "enable_batch_sharded_sampling"),
        # vLLM takes the experts of a step's first rows, which are no accepted path.
        (args.aux_output_config.enabled, "routed experts", "enable_return_routed_experts"),
        (getattr(args, "watermark_config", None), "watermarking", "watermark_config"),
        (args.use_replayssm, "ReplaySSM", "use_replayssm"),
    ):
        if refused:
            raise OptionError(f"SpecBlock does not support {what}: drop {options}.")
    for refused, kind in (
        (target.is_encoder_decoder, "an encoder-decoder"),
        (
            target.use_mla and on_cpu and torch.cpu._is_amx_tile_supported(),
            "latent attention (MLA) on a CPU with AMX tiles",
        ),
        (target.is_attention_free, "no attention layers"),
        # Drafters cannot embed their placeholder tokens.
        (target.supports_multimodal_inputs, "multimodal inputs (see --language-model-only)"),
        (target.attention_chunk_size is not None, "chunked attention"),
        (target.uses_alibi, "ALiBi positions"),
        ("attn_head" in str(said.get("kv_cache_scheme")), "per-head KV cache scales"),
    ):
        if refused:
            raise TargetError(kind)
    own = "auto" if target.dtype == torch.float32 else str(target.dtype).removeprefix("torch.")
    scheme = args.kv_cache_dtype == "auto" and said.get("kv_cache_scheme")
    dtype = "fp8" if scheme else args.kv_cache_dtype  # as vLLM's layers do
    if dtype in ("auto", own):
        return
    size, block = target.get_head_size(), args.block_size or 32
    if on_cpu:
        unit, needs, fits = 32, "a CPU with AVX-512", torch.cpu._is_avx512_supported()
    else:
        unit, needs = 16, "FlashAttention 3 (Hopper), a bfloat16 target without MLA"
        fits = get_flash_attn_version(head_size=size) == 3 and target.dtype == torch.bfloat16
        fits = fits and args.attention_config.flash_attn_version in (None, 3) and not target.use_mla
    if not fits or dtype not in ("fp8", "fp8_e4m3") or size % unit or block % unit:
        raise OptionError(
            f"kv_cache_dtype is {dtype!r}, but 'fp8' needs {needs}, and a head size and "
            f"block_size in multiples of {unit} (here {size} and {block}): use {own!r}."
        )


def warn_of_rounding(target: ModelConfig) -> None:
    """Warn if the target quantises activations."""
    said = getattr(target.hf_config, "quantization_config", None) or {}
    if any(group.get("input_activations") for group in said.get("config_groups", {}).values()):
        logger.warning(
            "The target quantises activations, so a token may differ from plain decoding by a "
            "rounding step."
        )


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
    sizes = [getattr(of, name) for of in (args, args.compilation_config) for name in names]
    scheduled = args.speculative_config.get(BY_BATCH_SIZE)
    if any(size is not None for size in sizes) or scheduled or args.enforce_eager:
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
