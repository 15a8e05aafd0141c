"""The drafting steps of one prompt, for commands that show them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import torch

from vllm_specblock.bench.draft_tree import legend_line, terminal_tree
from vllm_specblock.train.config import TrainError
from vllm_specblock.train.data.prompts import prompt_ids
from vllm_specblock.train.eval.evaluate import sequences_for
from vllm_specblock.train.eval.loaded import LoadedDrafter
from vllm_specblock.train.eval.steps import Step, steps_along
from vllm_specblock.train.target.answers import continue_prompts

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def prompt_tensor(text: str, tokenizer: PreTrainedTokenizerBase, chat: bool | None) -> torch.Tensor:
    """Return the prompt's ids, [T] int64; chat None: through the chat template where there is one.

    Raises:
        TrainError: the prompt is empty, or `chat` without a chat template.
    """
    chat = bool(tokenizer.chat_template) if chat is None else chat
    ids = prompt_ids(text, tokenizer, chat) if text else []
    if not ids:
        raise TrainError("The prompt is empty: there is nothing to draft after.")
    return torch.tensor(ids, dtype=torch.int64)


def steps_of_prompt(
    target: PreTrainedModel,
    drafter: LoadedDrafter,
    prompt: torch.Tensor,
    count: int,
    tokens: int | None = None,
) -> list[Step]:
    """Return the first `count` verification steps of the target's greedy answer, or all.

    Args:
        prompt: [T] int64.
        tokens: committed tokens that are needed; steps beyond may be missing.
    """
    # A step commits depth + 1 tokens at most; the first token comes from the prompt's own forward.
    new_tokens = 1 + count * (drafter.depth + 1)
    if tokens is not None:
        new_tokens = min(new_tokens, tokens + drafter.depth + 1)  # the last step in full
    (text,) = continue_prompts(target, [prompt], new_tokens)
    return list(islice(steps_of_text(target, drafter, text, len(prompt)), count))


def steps_of_text(
    target: PreTrainedModel, drafter: LoadedDrafter, text: torch.Tensor, prompt: int
) -> Iterator[Step]:
    """Yield the verification steps along a text [T] int64, after its first `prompt` tokens."""
    (sequence,) = sequences_for(target, drafter.pairing.layer_ids, [text], [prompt])
    return steps_along(drafter.along(sequence), sequence)


def print_step(console: Console, step: Step, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Print a step's tree and what the colours mean."""
    console.print(terminal_tree(step, tokenizer, name), soft_wrap=True)
    console.print(legend_line(max(step.forward), name), soft_wrap=True)
