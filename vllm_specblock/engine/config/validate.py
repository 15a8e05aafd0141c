"""Validation of engine arguments and targets."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.config import ModelConfig, ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_specblock.config import OptionError
from vllm_specblock.engine.step_observer import adaptation

if TYPE_CHECKING:
    from vllm_specblock.engine.config.resolved_config import ResolvedConfig

logger = logging.getLogger("vllm.specblock")


def check_runner(args: EngineArgs, parallel: ParallelConfig) -> None:
    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        raise OptionError(
            "SpecBlock needs vLLM's Model Runner V2, but VLLM_USE_V2_MODEL_RUNNER=0 switches it "
            "off: unset it."
        )
    backend = args.attention_backend or args.attention_config.backend
    context = "context parallelism, since tree attention needs the whole cache"
    lora = "LoRA on a GPU, where vLLM's kernels are untested with trees"
    connectors = args.kv_transfer_config is not None or args.kv_offloading_size
    sharded = parallel.enable_batch_sharded_sampling
    for refused, what, options in (
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism", "pipeline_parallel_size"),
        (parallel.decode_context_parallel_size > 1, context, "decode_context_parallel_size"),
        (parallel.prefill_context_parallel_size > 1, context, "prefill_context_parallel_size"),
        (
            backend not in (None, AttentionBackendEnum.CUSTOM),
            "attention backends besides its own, which draft trees need",
            "attention_backend",
        ),
        (
            args.disable_hybrid_kv_cache_manager is False,
            "a block table per layer type, since drafters use the target's",
            "disable_hybrid_kv_cache_manager",
        ),
        (args.enable_lora and not current_platform.is_cpu(), lora, "enable_lora"),
        (parallel.use_ubatching, "micro-batches", "enable_dbo and ubatch_size"),
        (connectors, "KV connectors", "kv_transfer_config and kv_offloading_size"),
        (args.kv_sharing_fast_prefill, "fast prefill", "kv_sharing_fast_prefill"),
        (sharded, "sharded samples", "enable_batch_sharded_sampling"),
        (getattr(args, "watermark_config", None), "watermarking", "watermark_config"),
    ):
        if refused:
            raise OptionError(f"SpecBlock does not support {what}: drop {options}.")


def check_cache(args: EngineArgs, target: ModelConfig) -> None:
    """Refuse KV cache dtypes that tree attention does not support."""
    dtype = args.kv_cache_dtype
    if dtype == "auto":
        return
    if dtype not in ("fp8", "fp8_e4m3") or not current_platform.is_cpu():
        raise OptionError(  # on a GPU vLLM may quantise queries too
            f"kv_cache_dtype is {dtype!r}, but SpecBlock supports 'auto' and, only on a CPU, 'fp8' "
            "and 'fp8_e4m3': use 'auto'."
        )
    size, block = target.get_head_size(), args.block_size or 32
    if not torch.cpu._is_avx512_supported() or size % 32 or block % 32:
        raise OptionError(
            f"kv_cache_dtype is {dtype!r}, which needs AVX-512, and a head size and block_size "
            f"that are multiples of 32 (here {size} and {block}): use 'auto'."
        )


def check_target(target: ModelConfig) -> None:
    if target.runner_type != "generate":
        raise OptionError(
            f"runner is {target.runner_type!r}, but SpecBlock drafts generated text only: set "
            "runner 'generate', or drop speculative_config."
        )
    recurrent_on_gpu = target.is_hybrid and not current_platform.is_cpu()
    for refused, kind in (
        (target.is_encoder_decoder, "an encoder-decoder"),
        (target.use_mla, "multi-head latent attention (MLA)"),
        (target.is_attention_free, "no attention layers"),
        (recurrent_on_gpu, "recurrent layers, on a GPU (docs/support.md)"),
        # Drafters cannot embed their placeholder tokens.
        (target.supports_multimodal_inputs, "multimodal inputs (see --language-model-only)"),
        (target.attention_chunk_size is not None, "chunked attention"),
        (target.uses_alibi, "ALiBi positions"),
    ):
        if refused:
            raise OptionError(
                f"The target {target.model!r} has {kind}, which SpecBlock cannot verify as a "
                "tree yet: run it without speculative_config, or with another method."
            )


def warn_of_rounding(target: ModelConfig) -> None:
    """Warn if the target quantises activations."""
    said = getattr(target.hf_config, "quantization_config", None) or {}
    groups = said.get("config_groups", {}).values()
    if any(group.get("input_activations") for group in groups):
        logger.warning(
            "The target quantises activations, so a token may differ from plain decoding by a "
            "rounding step."
        )


def check_combination(
    args: EngineArgs, resolved: ResolvedConfig, given: dict[str, Any], parallel: ParallelConfig
) -> None:
    """Refuse options that exclude each other; `given`: the user's `speculative_config`."""
    adaptive = "'enable_adaptive_verification' is true and"
    ranks, lora = parallel.tensor_parallel_size, args.enable_lora
    method = given.get("rejection_sample_method", "standard")
    if method != "standard":
        raise OptionError(
            f"speculative_config key 'rejection_sample_method' is {method!r}, but draft trees "
            "support 'standard' only: drop the key."
        )
    tokens, nodes = args.max_num_batched_tokens, resolved.num_speculative_tokens
    if tokens is not None and tokens <= nodes:
        raise OptionError(
            f"max_num_batched_tokens is {tokens}, but one tree needs {nodes + 1} tokens ({nodes} "
            "nodes and a root): raise it, or lower num_speculative_tokens."
        )
    asked = {getattr(drafter.options, "quantization", None) for drafter in resolved.drafters}
    old = current_platform.is_cuda() and not current_platform.has_device_capability(89)
    if "fp8" in asked and old:
        raise OptionError(
            "speculative_config key 'quantization' is 'fp8', but this GPU has no float8 (compute "
            "capability 8.9 or later): drop the key."
        )
    for refused, both, why in (
        (
            resolved.adaptive and current_platform.is_cpu() and ranks > 1,
            f"{adaptive} tensor_parallel_size is {ranks}",
            "on a CPU each rank would measure its own costs",  # and might decide differently
        ),
        (
            resolved.adaptive and lora,
            f"{adaptive} enable_lora is set",
            "vLLM maps tokens to adapters before budgets are known",
        ),
        (
            resolved.adapting is not None and lora,
            "'adapt' is given and enable_lora is set",
            "the trainer loads the target without adapters",
        ),
    ):
        if refused:
            raise OptionError(f"speculative_config key {both}, but {why}: drop one of them.")


def check_adapt(resolved: ResolvedConfig, parallel: ParallelConfig, target: ModelConfig) -> None:
    """Refuse `adapt` where it cannot run; see `adapt/options.py`."""
    if resolved.adapting is not None:
        count = parallel.world_size * parallel.data_parallel_size_local
        gpus = range(0 if current_platform.is_cpu() else count)
        adaptation("options").check_adapt(resolved, parallel, target, gpus)
