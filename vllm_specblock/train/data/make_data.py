"""Training shards from chat data: what `specblock data` does.

Line n of the usable ones goes to shard n // shard_size. A shard is a function of the options, the
input and its own number, so a run that was killed goes on at its first missing shard and ends
with the same bytes. Prompts that the target makes up are lines of a file that is made first.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor
from tqdm import tqdm

from vllm_specblock.train import provenance
from vllm_specblock.train.config import TrainError
from vllm_specblock.train.data import self_prompts, shards
from vllm_specblock.train.data.answering import Answerer
from vllm_specblock.train.data.chat import Lines, find_lines, fingerprint
from vllm_specblock.train.data.make_shard import ShardMaker, report
from vllm_specblock.train.data.options import DataOptions
from vllm_specblock.train.data.target import read_chat_tokens

MAKING = "making.json"
"""Options and input of a folder that is being made; written first."""


class Made(NamedTuple):
    """What a data folder came to.

    index: what data.json says.
    counts: [V] int64, how often each target id is counted.
    """

    index: dict[str, Any]  # type: ignore[assignment]  # in place of a tuple's own
    counts: Tensor


def make_data(options: DataOptions, load: Callable[[], Answerer]) -> Made:
    """Make all shards that are not there yet, then the index.

    Args:
        options: see `DataOptions`.
        load: starts the target; called only when there is something to answer.

    Raises:
        TrainError: an input or a file of the target is missing, nothing can be used, or the
            folder was begun with other options or other input.
    """
    tokens = read_chat_tokens(options)
    making = {"options": options.must_match(), "input": fingerprint(options.input)}
    _begin(options.out, making)
    lines = Lines((), [], 0)
    if options.input:
        lines = find_lines(options.input, options.limit, tokens.chat, report)
    target = functools.cache(load)
    if options.self_prompts:
        made_up = self_prompts.make_prompts(options, tokens, target)
        lines = lines.followed_by(find_lines([made_up], None, tokens.chat, report))
    _make_shards(options, ShardMaker(options, lines, tokens, target))
    return _finish(options, making, lines, tokens.vocab_size)


def coverage(counts: Tensor, draft_vocab_size: int) -> float:
    """Share of the counted tokens (counts [V]) that are among the most frequent ids."""
    named = counts.sort(descending=True).values[:draft_vocab_size]
    return int(named.sum()) / max(1, int(counts.sum()))


def _begin(out: Path, making: dict[str, Any]) -> None:
    """Claim the folder, or make sure that this run may go on in it."""
    path = out / MAKING
    # What is made first; without it nothing is.
    if shards.shard_path(out, 0).exists() or self_prompts.begun(out):
        if not path.exists():
            raise TrainError(f"{out} holds other data already; give another folder to write to.")
        _same(out, json.loads(path.read_text(encoding="utf-8")), making)
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(making, indent=1) + "\n"
    shards.replace(path, lambda aside: aside.write_text(text, encoding="utf-8"))


def _same(out: Path, begun: dict[str, Any], making: dict[str, Any]) -> None:
    old, new = begun["options"], making["options"]
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            was, now = json.dumps(old.get(name)), json.dumps(new.get(name))
            raise TrainError(
                f"{out} was begun with {name} = {was}, not {now}; give the same options to go on, "
                "or another folder to write to."
            )
    if begun["input"] != making["input"]:
        raise TrainError(
            f"{out} was begun with other input files; give the same ones to go on, or another "
            "folder to write to."
        )


def _make_shards(options: DataOptions, maker: ShardMaker) -> None:
    total = len(maker.lines.usable)
    with tqdm(total=total, unit="line", desc="data") as bar:
        for number, first in enumerate(range(0, total, options.shard_size)):
            path = shards.shard_path(options.out, number)
            count = min(options.shard_size, total - first)
            if path.exists():
                bar.update(count)
            else:
                shards.write_shard(path, *maker.make(first, count, bar.update))


def _finish(options: DataOptions, making: dict[str, Any], lines: Lines, vocab_size: int) -> Made:
    """Count what the shards hold, then write the vocabulary's counts and the index."""
    paths = [
        shards.shard_path(options.out, number)
        for number in range(-(-len(lines.usable) // options.shard_size))
    ]
    facts = [shards.read_facts(path) for path in paths]
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    sequences = tokens = 0
    for path in paths:
        texts = list(shards.read_shard(path))
        sequences, tokens = sequences + len(texts), tokens + sum(len(t.tokens) for t in texts)
        if texts:
            targets = torch.cat([text.tokens[text.loss_mask] for text in texts])
            counts += torch.bincount(targets, minlength=vocab_size)
    if not sequences:
        raise TrainError("None of the lines gave a sequence; see the reasons above.")
    shards.replace(
        options.out / shards.VOCAB,
        lambda aside: safetensors.torch.save_file({"counts": counts}, aside),
    )
    index = {
        "format": 1,
        "target": str(options.target),
        "vocab_size": vocab_size,
        "sequences": sequences,
        "tokens": tokens,
        "counted": int(counts.sum()),
        "skipped": lines.broken + sum(fact["skipped"] for fact in facts),
        "cut": sum(fact["cut"] for fact in facts),
        "shards": len(paths),
        **making,
        "versions": provenance.versions(),
    }
    shards.write_index(options.out, index)
    return Made(index, counts)
