"""Prompts that the target makes up from its chat template alone.

A chat model that has read how a user's turn begins continues as a user would ("Magpie: Alignment
Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing", arXiv 2406.08464). Its text up
to the end of that turn becomes a prompt, in a file beside the shards.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from vllm_specblock.train.config import TrainError
from vllm_specblock.train.data import shards
from vllm_specblock.train.data.answering import Answerer, seed_of
from vllm_specblock.train.data.chat import BrokenLine, report
from vllm_specblock.train.data.chat_tokens import ChatTokens
from vllm_specblock.train.data.options import DataOptions

FILE = "self_prompts.jsonl"
"""All of a folder's prompts, a `{"prompt": …}` in each line; written last."""

MOST_TOKENS = 256
"""Of one prompt. A turn that has not ended by then is dropped: it mostly repeats itself."""

_TEMPERATURE = 1.0
_SENTINEL = "SENTINEL4FA91C"
"""Stands for a message; no template writes it by itself."""


class UserTurn(NamedTuple):
    """What a chat template writes around a user's message.

    before: token ids up to the message, with a system turn where the template adds one.
    end: text that follows the message, stripped unless it is white space.
    stop: the id of the control token that `end` begins with; None where it is plain text.
    """

    before: list[int]
    end: str
    stop: int | None


def user_turn(tokens: ChatTokens) -> UserTurn:
    """Read the user's turn out of the template; raises `TrainError` where there is none, or it
    does not write the message once, as it is, with something before and after it."""
    if not tokens.chat:
        raise TrainError(
            "--self-prompts needs a chat model, but the target's tokenizer has no chat template: "
            "give prompts with --input instead."
        )
    try:
        turn = [{"role": "user", "content": _SENTINEL}]
        before, *after = tokens.text(turn).split(_SENTINEL)
        if after == [""]:  # the head of the answer ends the turn
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
    """The file of the made-up prompts, made where it is missing.

    They are sampled `shard_size` at a time, each such part a file of its own until all are made: a
    killed run resumes at its first missing part. Empty ones, duplicates and turns that do not end
    are dropped.

    Raises:
        TrainError: see `user_turn`, or none of the prompts can be used.
    """
    whole, size = options.out / FILE, options.shard_size
    parts = [_part(options.out, number) for number in range(-(-options.self_prompts // size))]
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
        [seed_of(f"{options.seed}/prompt/{first + offset}") for offset in range(count)],
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


def _write(path: Path, prompts: list[str]) -> None:
    lines = (json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts)
    shards.write_text(path, "".join(lines))


def _read(path: Path) -> list[str]:
    # Not str.splitlines: a message may hold other characters that it takes for line ends.
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line)["prompt"] for line in lines]
