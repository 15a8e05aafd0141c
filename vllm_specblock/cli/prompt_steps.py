"""The drafting steps of one prompt, for commands that show them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vllm_specblock.bench.draft_tree import legend_line, terminal_tree
from vllm_specblock.config import DEFAULT_NODES, DEFAULT_NODES_ON_CPU
from vllm_specblock.train.config import TrainError
from vllm_specblock.train.data.prompts import prompt_ids
from vllm_specblock.train.eval.evaluate import sequences_for
from vllm_specblock.train.eval.loaded import LoadedDrafter, load_drafter, pair
from vllm_specblock.train.eval.steps import Step, steps_along
from vllm_specblock.train.target.answers import continue_prompts
from vllm_specblock.train.target.features import load_target

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
    (sequence,) = sequences_for(target, drafter.pairing.layer_ids, [text], [len(prompt)])
    return [step for step, _ in zip(steps_along(drafter.along(sequence), sequence), range(count))]


def default_nodes() -> int:
    """Return the nodes of a tree of an engine on this machine by default."""
    return DEFAULT_NODES if torch.cuda.is_available() else DEFAULT_NODES_ON_CPU


def steps_of_answer(
    drafter: Path,
    target: Path,
    prompt: list[int],
    answer: list[int],
    nodes: int,
    blocks: int | None = None,
) -> tuple[list[Step], str]:
    """Return the verification steps along an answer that was served, and what a forward adds.

    Args:
        blocks: drafter forwards. None: one below 16 nodes, as in serving.
    """
    pairing = pair(drafter, target)
    model = load_target(pairing.target, "fp32", torch.device("cpu"))
    blocks = 1 if blocks is None and nodes < 16 and pairing.kind == "specblock" else blocks
    loaded = load_drafter(pairing, model.dtype, torch.device("cpu"), nodes, blocks)
    text = torch.tensor([*prompt, *answer])
    (sequence,) = sequences_for(model, pairing.layer_ids, [text], [len(prompt)])
    steps = list(steps_along(loaded.along(sequence), sequence))
    if not steps:
        raise TrainError("The answer is too short: nothing was drafted.")
    return steps, loaded.forward_name


def print_step(console: Console, step: Step, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Print a step's tree and what the colours mean."""
    console.print(terminal_tree(step, tokenizer, name), soft_wrap=True)
    console.print(legend_line(max(step.forward), name), soft_wrap=True)
