"""Training shards from chat data, for `specblock data`.

Usable line n goes to shard n // shard_size. A shard depends only on the options, the input and its
number, so a killed run resumes at its first missing shard, with the same bytes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from vllm_specblock.train import provenance
from vllm_specblock.train.config import DataOptions, TrainError
from vllm_specblock.train.data import shards
from vllm_specblock.train.data.answering import Answerer, Dialogue, answer
from vllm_specblock.train.data.chat import (
    BrokenLine,
    Conversation,
    Document,
    Entry,
    Prompt,
    fingerprint,
    read_lines,
    report,
)
from vllm_specblock.train.data.chat_tokens import ChatTokens, read_chat_tokens
from vllm_specblock.train.data.packed_dataset import token_counts
from vllm_specblock.train.data.shards import Text

MAKING = "making.json"
"""File of options and inputs; written first."""


def make_data(options: DataOptions, load: Callable[[], Answerer]) -> tuple[dict[str, Any], Tensor]:
    """Make all missing shards, then the index.

    Args:
        load: starts the target; called only if there is something to answer.

    Returns:
        The content of data.json, and how often each target id is counted, [V] int64.

    Raises:
        TrainError: an input or a file of the target is missing, nothing can be used, or the
            folder was begun with other options or other input.
    """
    tokens = read_chat_tokens(options)
    making = {"options": options.must_match(), "input": fingerprint(options.input)}
    _begin(options.out, making)
    broken: list[str] = []

    def note(line: str) -> None:
        broken.append(line)
        report(line)

    lines = functools.partial(read_lines, options.input, options.limit, tokens.chat)
    total = sum(1 for _ in lines(note))  # a separate pass: errors come before weights are loaded
    target, paths = functools.cache(load), []
    numbered = enumerate(lines(lambda line: None))
    with tqdm(total=total, unit="line", desc="data") as bar:
        for number in range(math.ceil(total / options.shard_size)):
            paths.append(shards.shard_path(options.out, number))
            part = list(itertools.islice(numbered, options.shard_size))
            if paths[-1].exists():
                bar.update(len(part))
            else:
                shards.write_shard(
                    paths[-1], *_make_shard(options, tokens, target, part, bar.update)
                )
    return _finish(options, making, len(broken), paths, tokens.vocab_size)


def coverage(counts: Tensor, draft_vocab_size: int) -> float:
    """Return the share of counted tokens (counts [V]) among the most frequent ids."""
    named = counts.sort(descending=True).values[:draft_vocab_size]
    return int(named.sum()) / max(1, int(counts.sum()))


def _begin(out: Path, making: dict[str, Any]) -> None:
    """Claim the folder; raise `TrainError` if another run started it."""
    path = out / MAKING
    if shards.shard_path(out, 0).exists():
        if not path.exists():
            raise TrainError(f"{out} holds other data already: give another folder.")
        begun = shards.read_object(path, making)
        shards.check_same(
            f"{out} was begun",
            {**begun["options"], "input": begun["input"]},
            {**making["options"], "input": making["input"]},
            "give the same options and files to resume, or another folder.",
            hidden={"input"},
        )
    out.mkdir(parents=True, exist_ok=True)
    shards.write_json(path, making)


def _make_shard(
    options: DataOptions,
    tokens: ChatTokens,
    target: Callable[[], Answerer],
    lines: list[tuple[int, tuple[str, Entry]]],
    done: Callable[[int], object],
) -> tuple[list[Text], dict[str, int]]:
    """Return the sequences of numbered lines, in order, and how many conversations were `cut` and
    lines `skipped`; `done` is called with numbers of finished lines."""
    dialogues = {
        number: _dialogue(options, tokens, number, entry)
        for number, (_, entry) in lines
        if not isinstance(entry, Document)
    }
    done(len(lines) - len(dialogues))
    if dialogues:
        answer(list(dialogues.values()), target(), options, done)
    texts: list[Text] = []
    facts = {"cut": 0, "skipped": 0}
    for number, (where, entry) in lines:
        try:
            if isinstance(entry, Document):
                pieces = torch.tensor(tokens.document(entry.text)).split(options.max_length)
                texts += [Text(ids, torch.ones_like(ids).bool()) for ids in pieces if len(ids)]
                continue
            dialogue = dialogues[number]
            if dialogue.broken:
                raise dialogue.broken
            texts.append(Text(torch.tensor(dialogue.ids), torch.tensor(dialogue.loss_mask)))
            facts["cut"] += dialogue.cut
        except BrokenLine as reason:
            facts["skipped"] += 1
            report(f"{where}: {reason}")
    return texts, facts


def _dialogue(
    options: DataOptions, tokens: ChatTokens, number: int, entry: Conversation | Prompt
) -> Dialogue:
    if isinstance(entry, Conversation):
        questions = [turn for turn in entry.messages if turn["role"] != "assistant"]
        return Dialogue(tokens, questions, number, options.max_length)
    questions = [{"role": "user", "content": entry.text}]
    raw = options.raw or not tokens.chat
    return Dialogue(tokens, questions, number, options.max_length, raw=raw)


def _finish(
    options: DataOptions, making: dict[str, Any], broken: int, paths: list[Path], vocab_size: int
) -> tuple[dict[str, Any], Tensor]:
    """Count what the shards hold, then write the index."""
    facts = [shards.read_facts(path) for path in paths]
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    sequences = tokens = 0
    for path in paths:
        texts = list(shards.read_shard(path))
        sequences, tokens = sequences + len(texts), tokens + sum(len(t.tokens) for t in texts)
        counts += token_counts(texts, vocab_size)
    if not sequences:
        raise TrainError("No line gave a sequence; see the reasons above.")
    index = {
        "format": 1,
        "target": str(options.target),
        "vocab_size": vocab_size,
        "sequences": sequences,
        "tokens": tokens,
        "counted": int(counts.sum()),
        "skipped": broken + sum(fact["skipped"] for fact in facts),
        "cut": sum(fact["cut"] for fact in facts),
        "shards": len(paths),
        **making,
        "versions": provenance.versions(),
    }
    shards.write_json(options.out / shards.INDEX, index)
    return index, counts
