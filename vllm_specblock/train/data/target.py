"""What making data needs of the target before any weight of it: config and tokenizer."""

from __future__ import annotations

from typing import Any

from vllm_specblock.train.config import TrainError
from vllm_specblock.train.data.chat_tokens import ChatTokens
from vllm_specblock.train.data.options import DataOptions
from vllm_specblock.train.target.features import first_line, load_tokenizer


def read_chat_tokens(options: DataOptions) -> ChatTokens:
    """The target's tokenizer, with its template and what ends an answer.

    Raises:
        TrainError: one is missing, or the target has fewer positions than `max_length`.
    """
    from transformers import AutoConfig

    tokenizer = load_tokenizer(options.target)
    try:
        config = AutoConfig.from_pretrained(str(options.target)).get_text_config()
    except (OSError, ValueError) as error:
        raise TrainError(
            f"The target {options.target} has no config: {first_line(error)}"
        ) from error
    _check_positions(options, config)
    ends = _end_tokens(str(options.target), config) | {tokenizer.eos_token_id} - {None}
    return ChatTokens(tokenizer, config.vocab_size, frozenset(ends), options.template_options)


def _check_positions(options: DataOptions, config: Any) -> None:
    most = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    # Scaled rotary positions reach further than the config's number says.
    if most and options.max_length > most and rope.get("rope_type", "default") == "default":
        raise TrainError(
            f"The target {options.target} has {most:,} positions, which max_length = "
            f"{options.max_length:,} goes beyond; give at most {most}."
        )


def _end_tokens(target: str, config: Any) -> set[int]:
    """The ids that end an answer, as vLLM reads them."""
    from transformers import GenerationConfig

    try:
        ends = GenerationConfig.from_pretrained(target).eos_token_id
    except OSError:  # older models have no such file
        ends = getattr(config, "eos_token_id", None)
    return set(ends) if isinstance(ends, list) else {ends} - {None}
