"""Evaluation prompts, from lines of text or from a folder of `specblock data`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_specblock.train.config import TrainError
from vllm_specblock.train.data import shards
from vllm_specblock.train.data.chat import Conversation, Document, read_lines
from vllm_specblock.train.data.chat_tokens import ChatTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_prompts(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    *,
    prompt_tokens: int = 64,
    chat: bool | None = None,
    vocab_size: int | None = None,
    report: Callable[[str], None] = print,
) -> list[Tensor]:
    """Return the first `count` prompts of a file or folder, [T_i] int64 each.

    Args:
        path: a .jsonl file of the lines that `specblock data` takes, or a folder that it made.
            Of a `text`, the first `prompt_tokens` tokens are the prompt; of a conversation, all
            before the first answer; of a folder's sequence, all before the first token that the
            target wrote, or the first `prompt_tokens` where it wrote them all.
        chat: put each `prompt` through the chat template, as one user turn; None: if there is one.
        vocab_size: the target's; None: not checked.
        report: called with a message for every broken line.

    Raises:
        TrainError: there is no such data, no prompt in it, or it is of another target.
    """

    question = ChatTokens(tokenizer, sys.maxsize).question

    def of_lines() -> Iterator[Tensor]:
        for _, entry in read_lines([path], count, bool(tokenizer.chat_template), report):
            if isinstance(entry, Conversation):
                turns = [message["role"] for message in entry.messages]
                ids = question(entry.messages[: turns.index("user") + 1])
            elif isinstance(entry, Document):
                ids = tokenizer(entry.text)["input_ids"][:prompt_tokens]
            else:
                ids = prompt_ids(entry.text, tokenizer, chat)
            yield torch.tensor(ids, dtype=torch.int64)

    def of_folder() -> Iterator[Tensor]:
        for tokens, loss_mask in shards.read(path):
            # The first token that the target wrote.
            own = int(loss_mask.byte().argmax()) if len(tokens) else 0
            yield tokens[: own or prompt_tokens]

    if path.is_dir():
        prompts = of_folder()
    elif path.is_file():
        prompts = of_lines()
    else:
        raise TrainError(
            f"There are no prompts at {path}: give a .jsonl file, or a folder made by "
            "`specblock data`."
        )
    found = list(islice((prompt for prompt in prompts if len(prompt)), count))
    if not found:
        raise TrainError(f"There is no prompt in {path}: all of its texts are empty.")
    if vocab_size is not None:
        shards.check_ids(path, found, vocab_size)
    return found


def prompt_ids(text: str, tokenizer: PreTrainedTokenizerBase, chat: bool | None) -> list[int]:
    """Tokens of one user turn, or of the text as it stands; chat: see `read_prompts`.

    Raises:
        TrainError: `chat` without a chat template.
    """
    if chat and not tokenizer.chat_template:
        raise TrainError("The target's tokenizer has no chat template: drop --chat.")
    if chat is False or not tokenizer.chat_template:
        return tokenizer(text)["input_ids"]
    return ChatTokens(tokenizer, sys.maxsize).question([{"role": "user", "content": text}])
