"""Prompts that the target makes up itself, out of its chat template alone.

A chat model that has read how a user's turn begins goes on as a user would ("Magpie: Alignment
Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing", arXiv 2406.08464). What it says
up to the end of that turn becomes a prompt like any other, in a file beside the shards.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from vllm_specblock.train.config import TrainError
from vllm_specblock.train.data import shards
from vllm_specblock.train.data.answering import Answerer
from vllm_specblock.train.data.chat import BrokenLine
from vllm_specblock.train.data.chat_tokens import ChatTokens
from vllm_specblock.train.data.make_shard import report
from vllm_specblock.train.data.options import DataOptions

FILE = "self_prompts.jsonl"
"""All of a folder's prompts, a `{"prompt": …}` in each line; written when the last one is there."""

MOST_TOKENS = 256
"""Of one prompt. A turn that has not ended by then is dropped: it mostly goes round in circles."""

_TEMPERATURE = 1.0
_SENTINEL = "SENTINEL4FA91C"
"""Stands for a message; no template writes it by itself."""


class UserTurn(NamedTuple):
    """What a chat template writes around a user's message.

    Attributes:
        before: token ids up to the message, a system turn included where the template adds one.
        end: text that follows the message, without white space around it unless it is all.
        stop: the id of the control token that `end` begins with; None where it is plain text.
    """

    before: list[int]
    end: str
    stop: int | None


def user_turn(tokens: ChatTokens) -> UserTurn:
    """Read the user's turn out of the template.

    Raises:
        TrainError: there is no chat template, or it does not write the message once, as it is, with
            something before and after it.
    """
    if not tokens.chat:
        raise TrainError(
            "--self-prompts needs a chat model, but the target's tokenizer has no chat template: "
            "give prompts with --input instead."
        )
    try:
        turn = [{"role": "user", "content": _SENTINEL}]
        before, *after = tokens.text(turn).split(_SENTINEL)
        if after == [""]:  # then it is the head of the answer that ends the turn
            before, *after = tokens.text(turn, ask=True).split(_SENTINEL)
        if len(after) != 1 or not before.strip() or not after[0]:
            raise TrainError(
                "--self-prompts cannot see where a user's turn begins and ends: the target's chat "
                "template does not write the message once, with something before and after it."
            )
        end = after[0].strip() or after[0]
        first = tokens.ids(end)[0]
        # A space before the message belongs to the message's first token.
        head = tokens.ids(before.rstrip(" "))
    except BrokenLine as reason:
        raise TrainError(f"--self-prompts cannot begin a user's turn: {reason}.") from None
    return UserTurn(head, end, first if first in tokens.added else None)


def make_prompts(options: DataOptions, tokens: ChatTokens, target: Callable[[], Answerer]) -> Path:
    """The file of the made-up prompts, made where it is not there yet.

    They are sampled `shard_size` at a time, and each such part is kept until the last one is there:
    a run that was killed goes on at its first missing part. Empty ones, duplicates and turns that
    do not end are dropped.

    Raises:
        TrainError: see `user_turn`, or none of the prompts can be used.
    """
    whole = options.out / FILE
    parts = [_part(options.out, number) for number in range(_parts(options))]
    if not whole.exists():
        turn = user_turn(tokens)
        most = min(MOST_TOKENS, options.max_length - len(turn.before) - 1)
        if most < 1:
            raise TrainError(
                f"max_length = {options.max_length:,} leaves no room for a prompt behind the "
                f"{len(turn.before):,} tokens with which a user's turn begins."
            )
        for number, part in enumerate(tqdm(parts, unit="part", desc="prompts")):
            if not part.exists():
                _write(part, _sample(options, tokens, target(), turn, most, number))
        said = itertools.chain.from_iterable(map(_read, parts))
        kept = list(dict.fromkeys(text for text in said if text))
        if not kept:
            raise TrainError(
                f"The target made up no prompt that can be used: none of {options.self_prompts:,} "
                f"is a user's turn of 1 to {most:,} tokens."
            )
        _write(whole, kept)
        report(f"{len(kept):,} of {options.self_prompts:,} made-up prompts are kept in {whole}.")
    for part in parts:
        part.unlink(missing_ok=True)
    return whole


def begun(folder: Path) -> bool:
    """Whether the folder holds prompts, or some of them."""
    return (folder / FILE).exists() or _part(folder, 0).exists()


def _parts(options: DataOptions) -> int:
    return -(-options.self_prompts // options.shard_size)


def _part(folder: Path, number: int) -> Path:
    return folder / f"self_prompts-{number:05d}.jsonl"


def _sample(
    options: DataOptions,
    tokens: ChatTokens,
    target: Answerer,
    turn: UserTurn,
    most: int,
    number: int,
) -> list[str]:
    """The messages of one part; "" for each that never ended."""
    first = number * options.shard_size
    count = min(options.shard_size, options.self_prompts - first)
    target.forget()
    said = target.generate(
        [turn.before] * count,
        [_TEMPERATURE] * count,
        [most] * count,
        [_seed(options.seed, first + offset) for offset in range(count)],
        () if turn.stop is None else (turn.stop,),
    )
    return [_message(tokens, turn, ids) for ids in said]


def _message(tokens: ChatTokens, turn: UserTurn, ids: list[int]) -> str:
    stops = tokens.ends if turn.stop is None else tokens.ends | {turn.stop}
    over = next((column for column, token in enumerate(ids) if token in stops), None)
    text = tokens.said(ids[:over])
    if turn.stop is None and turn.end in text.lstrip():
        text, over = text.lstrip().split(turn.end)[0], len(ids)
    return "" if over is None else text.strip()


def _seed(seed: int, number: int) -> int:
    digest = hashlib.sha256(f"{seed}/prompt/{number}".encode()).digest()
    return int.from_bytes(digest[:4]) >> 1


def _write(path: Path, prompts: list[str]) -> None:
    text = "".join(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts)
    shards.replace(path, lambda aside: aside.write_text(text, encoding="utf-8", newline="\n"))


def _read(path: Path) -> list[str]:
    # Not str.splitlines: a message may hold other characters that it takes for line ends.
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line)["prompt"] for line in lines]
