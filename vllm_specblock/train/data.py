"""Training text as windows of target tokens, in an order that is a function of the step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from vllm_specblock.train.config import TrainError

NO_TOKEN = -1  # fills the columns of a window past its sequence's end


@dataclass
class Windows:
    """Sequences cut into windows of one width.

    tokens: [N, L] int64 target ids, `NO_TOKEN` past the end of a short window.
    """

    tokens: Tensor
    _order: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, step: int, size: int, seed: int) -> Tensor:
        """The windows of update `step` (0-based), [size, L] int64.

        Each epoch is a fresh permutation seeded by (seed, epoch), so that a resumed run needs
        nothing but the step's number to see the batches that an unbroken one would.
        """
        wanted = torch.arange(step * size, (step + 1) * size)
        picked = [
            self._permutation(seed, epoch)[place]
            for epoch, place in zip((wanted // len(self)).tolist(), (wanted % len(self)).tolist())
        ]
        return self.tokens[torch.stack(picked)]

    def _permutation(self, seed: int, epoch: int) -> Tensor:
        if (seed, epoch) not in self._order:
            draw = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            # One epoch at a time is alive, two at its boundary.
            self._order = {key: order for key, order in self._order.items() if key[1] >= epoch - 1}
            self._order[seed, epoch] = torch.randperm(len(self), generator=draw)
        return self._order[seed, epoch]

    def counts(self, vocab_size: int) -> Tensor:
        """How often each target id occurs, [vocab_size] int64."""
        return torch.bincount(self.tokens[self.tokens >= 0], minlength=vocab_size)

    @classmethod
    def cut(cls, sequences: Iterator[Tensor], length: int, shortest: int) -> Windows:
        """Cut each sequence [T] into consecutive windows of `length`; a last one shorter than
        `shortest` tokens teaches nothing and is dropped."""
        pieces = [
            piece
            for sequence in sequences
            for piece in sequence.split(length)
            if len(piece) >= shortest
        ]
        if not pieces:
            raise TrainError(f"The data holds no sequence of {shortest} tokens or more.")
        tokens = torch.full((len(pieces), length), NO_TOKEN, dtype=torch.int64)
        for row, piece in zip(tokens, pieces):
            row[: len(piece)] = piece
        return cls(tokens)


def load(
    path: Path, tokenizer: Callable[[], object], vocab_size: int, length: int, shortest: int
) -> Windows:
    """Read training data as windows of `length` tokens.

    Args:
        path: a folder of UTF-8 text files (each is a document), a `.jsonl` file with a `text` or
            an `input_ids` in every line, or a `.safetensors` file (see `save_tokens`).
        tokenizer: gives the target's tokenizer; called only when there is text to tokenise.
        vocab_size: the target's; ids outside it are an error.
        length: window width, tokens.
        shortest: windows of fewer tokens are dropped.

    Raises:
        TrainError: the data is missing, broken or empty; says which file and line.
    """
    if path.is_dir():
        sequences = _framed(_text_files(path), tokenizer())
    elif not path.is_file():
        raise TrainError(f"There is no training data at {path}.")
    elif path.suffix == ".jsonl":
        sequences = _json_lines(path, tokenizer)
    elif path.suffix == ".safetensors":
        sequences = _stored_tokens(path)
    else:
        raise TrainError(
            f"{path} is neither a folder of text files nor a .jsonl nor a .safetensors file."
        )
    windows = Windows.cut(sequences, length, shortest)
    largest = int(windows.tokens.max())
    if largest >= vocab_size:
        raise TrainError(
            f"{path} holds token id {largest}, but the target's vocabulary ends at "
            f"{vocab_size - 1}; was it tokenised for another model?"
        )
    return windows


def save_tokens(path: Path, sequences: list[Tensor]) -> None:
    """Store tokenised sequences (each [T_i] int64): `tokens` [sum T_i] and `lengths` [N]."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    safetensors.torch.save_file({"tokens": torch.cat(sequences), "lengths": lengths}, path)


def _text_files(folder: Path) -> Iterator[str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        raise TrainError(f"The folder {folder} holds no text files.")
    for path in files:
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise TrainError(f"{path} is not UTF-8 text: {error.reason}.") from None


def _framed(texts: Iterator[str], tokenizer) -> Iterator[Tensor]:
    """Tokenise documents, each between the tokenizer's BOS and EOS where it has them."""
    before = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    after = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        yield torch.tensor([*before, *ids, *after], dtype=torch.int64)


def _json_lines(path: Path, tokenizer: Callable[[], object]) -> Iterator[Tensor]:
    loaded = None
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except json.JSONDecodeError as error:
                raise TrainError(f"{path}:{number} is not JSON: {error.msg}.") from None
            entry = entry if isinstance(entry, dict) else {}
            if isinstance(text := entry.get("text"), str):
                loaded = loaded or tokenizer()
                yield next(_framed(iter([text]), loaded))
            elif _is_token_list(ids := entry.get("input_ids")):
                yield torch.tensor(ids, dtype=torch.int64)
            else:
                raise TrainError(
                    f'{path}:{number} has neither a "text" string nor an "input_ids" list of ids.'
                )


def _is_token_list(value: object) -> bool:
    return isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)


def _stored_tokens(path: Path) -> Iterator[Tensor]:
    try:
        tensors = safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise TrainError(f"{path} is not a readable safetensors file: {error}.") from None
    tokens, lengths = tensors.get("tokens"), tensors.get("lengths")
    if tokens is None or lengths is None or int(lengths.sum()) != len(tokens):
        raise TrainError(f"{path} must hold `tokens` [T] and `lengths` [N] with sum(lengths) = T.")
    if len(tokens) and int(tokens.min()) < 0:
        raise TrainError(f"{path} holds the negative token id {int(tokens.min())}.")
    return iter(tokens.long().split(lengths.tolist()))
