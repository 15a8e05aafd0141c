"""From the user's `speculative_config` to vLLM's, with every check that needs no weights.

Runs while the engine's config is built, so that whoever gives something wrong reads one
sentence before anything is loaded.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_specblock.config import (
    DEFAULT_NODES,
    METHOD,
    VLLM_KEYS,
    OptionError,
    SpecBlockConfig,
    check_num_nodes,
    parse_options,
)
from vllm_specblock.draft import checkpoint
from vllm_specblock.draft.config import DrafterConfig, default_layer_ids
from vllm_specblock.tree import MAX_NODES

DRAFTER_FILES = ["config.json", "*.safetensors", "vocab_mapping.pt"]


@dataclass(frozen=True)
class Request:
    """What `translate` found out: where the drafter lies and which target layers it reads."""

    drafter: str
    layer_ids: tuple[int, int, int]


def translate(args: EngineArgs, target: ModelConfig, parallel: ParallelConfig) -> Request | None:
    """Check a SpecBlock request and rewrite `args` into what vLLM itself understands.

    Returns:
        None if `args` does not ask for SpecBlock; `args` is then untouched.

    Raises:
        OptionError: a key, its type or its value; a target, runner or parallelism that
            cannot verify trees; a drafter that was made for another target.
        CheckpointError: the drafter's files are not what their config says.
    """
    given = args.speculative_config
    if not given or given.get("method") != METHOD:
        return None
    given = {key.replace("-", "_"): value for key, value in given.items()}
    options = parse_options(given)
    nodes = check_num_nodes(given.get("num_speculative_tokens", DEFAULT_NODES))
    _check_batch(args, nodes)
    _check_runner(args, parallel)
    _check_target(target)
    drafter = fetch_drafter(given.get("model"), given.get("revision"))
    config = checkpoint.read_config(drafter)
    checkpoint.check_tensors(drafter, config)
    layer_ids = _check_match(config, target)
    _check_window(options, config)

    args.speculative_config = {
        **{key: value for key, value in given.items() if key in VLLM_KEYS},
        "method": "eagle3",
        "model": str(drafter),
        "num_speculative_tokens": nodes,
    }
    args.additional_config = {
        **(args.additional_config or {}),
        METHOD: {"drafter": str(drafter), "options": options.model_dump()},
    }
    args.attention_backend = AttentionBackendEnum.CUSTOM
    return Request(drafter=str(drafter), layer_ids=layer_ids)


def finish(config: SpeculativeConfig, request: Request) -> None:
    """Tell vLLM which hidden states the target has to hand out."""
    config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids = list(request.layer_ids)


def read_back(additional_config: dict[str, Any]) -> tuple[Path, SpecBlockConfig]:
    """The drafter's folder and our options, in the process that runs the model."""
    ours = additional_config[METHOD]
    return Path(ours["drafter"]), SpecBlockConfig(**ours["options"])


def fetch_drafter(model: str | None, revision: str | None) -> Path:
    """The drafter's local folder; a hub id is downloaded (config and tensors only).

    Raises:
        OptionError: no `model`, or neither a folder nor a hub id that can be had.
    """
    if not isinstance(model, str) or not model:
        raise OptionError(
            "speculative_config key 'model' is missing: name the SpecBlock drafter, as a folder "
            "or as a hub id."
        )
    if os.path.isdir(model):
        return Path(model).resolve()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=DRAFTER_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise OptionError(
            f"speculative_config key 'model' is {model!r}, which is neither a folder here nor a "
            f"hub id that could be downloaded ({type(error).__name__})."
        ) from None


def _check_batch(args: EngineArgs, nodes: int) -> None:
    budget = args.max_num_batched_tokens
    if budget is not None and budget < nodes + 1:
        raise OptionError(
            f"max_num_batched_tokens is {budget}, but one request's tree takes {nodes + 1} tokens "
            f"(num_speculative_tokens {nodes} and its root): raise the one or lower the other."
        )


def _check_runner(args: EngineArgs, parallel: ParallelConfig) -> None:
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if current_platform.is_cpu() and (envs.VLLM_USE_V2_MODEL_RUNNER is not True or not HAS_TRITON):
        raise OptionError(
            "SpecBlock runs on vLLM's Model Runner V2, which a CPU build uses only when told to: "
            "set VLLM_USE_V2_MODEL_RUNNER=1 before Python starts."
        )
    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        raise OptionError(
            "SpecBlock runs on vLLM's Model Runner V2, and VLLM_USE_V2_MODEL_RUNNER=0 switches "
            "it off: unset it."
        )
    for name, size in (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size),
    ):
        if size > 1:
            raise OptionError(f"{name} is {size}, but SpecBlock supports 1 only.")
    if parallel.enable_batch_sharded_sampling:
        raise OptionError("SpecBlock does not support enable_batch_sharded_sampling: drop it.")
    if getattr(args, "watermark_config", None):
        raise OptionError("SpecBlock does not support watermarking: drop watermark_config.")
    chosen = args.attention_backend or args.attention_config.backend
    if chosen not in (None, AttentionBackendEnum.CUSTOM):
        raise OptionError(
            f"attention_backend is {getattr(chosen, 'name', chosen)}, but draft trees need "
            "SpecBlock's own attention: leave it unset."
        )
    if args.kv_cache_dtype not in ("auto", "bfloat16", "float16"):
        raise OptionError(
            f"kv_cache_dtype is {args.kv_cache_dtype!r}, but SpecBlock supports 'auto' only."
        )


def _check_target(target: ModelConfig) -> None:
    text = target.hf_text_config
    layer_types = set(getattr(text, "layer_types", None) or ())
    for refused, kind in (
        (target.is_encoder_decoder, "an encoder-decoder"),
        (target.use_mla, "multi-head latent attention (MLA)"),
        (target.is_hybrid or target.is_attention_free, "recurrent (Mamba or hybrid) layers"),
        (target.uses_mrope, "multimodal positions (M-RoPE)"),
        (
            target.get_sliding_window() is not None or "sliding_attention" in layer_types,
            "sliding-window attention",
        ),
        (target.attention_chunk_size is not None, "chunked attention"),
        (target.uses_alibi, "ALiBi positions"),
        (
            bool(getattr(text, "attn_logit_softcapping", None)),
            "a soft cap on attention logits",
        ),
    ):
        if refused:
            raise OptionError(
                f"The target {target.model!r} has {kind}, which SpecBlock cannot verify as a "
                "tree yet: run it without speculative_config, or with another method."
            )


def _check_window(options: SpecBlockConfig, config: DrafterConfig) -> None:
    positions = (options.num_blocks - 1) * options.num_starts * config.block_size
    if positions > MAX_NODES:
        raise OptionError(
            f"num_blocks {options.num_blocks} and num_starts {options.num_starts} draft "
            f"{positions} positions after block 1, but at most {MAX_NODES} are supported "
            f"((num_blocks − 1) × num_starts × {config.block_size}): lower one of them."
        )


def _check_match(config: DrafterConfig, target: ModelConfig) -> tuple[int, int, int]:
    """Hold the drafter against the target; returns the target layers that it reads."""
    text = target.hf_text_config
    for what, made_for, found in (
        ("hidden size", config.target_hidden_size, target.get_hidden_size()),
        ("vocabulary size", config.vocab_size, target.get_vocab_size()),
    ):
        if made_for != found:
            raise OptionError(
                f"The drafter was made for a target of {what} {made_for}, but "
                f"{target.model!r} has {found}: use the drafter of this target."
            )
    layers = text.num_hidden_layers
    layer_ids = config.target.layer_ids or default_layer_ids(layers)
    if max(layer_ids) >= layers:
        raise OptionError(
            f"The drafter reads target layers {list(layer_ids)}, but {target.model!r} has only "
            f"layers 0 to {layers - 1}: use the drafter of this target."
        )
    return layer_ids
