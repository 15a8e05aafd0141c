"""Training text on disk: tokenised sequences with their loss masks, in shards.

A data folder holds

    data.json                 options and inputs; written last: it marks a complete folder
    shard-00000.safetensors   tokens [T] int32, counted [T] uint8, lengths [n] int64, sum = T
    shard-00001.safetensors   ...
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from vllm_specblock.train.config import TrainError

INDEX = "data.json"


class Text(NamedTuple):
    """One sequence. tokens: [T] int64; counted: [T] bool, the target generated the token."""

    tokens: Tensor
    loss_mask: Tensor


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def write_shard(path: Path, texts: Sequence[Text], facts: dict[str, int] | None = None) -> None:
    """Write one shard atomically. `texts` may be empty; `facts` are for `read_facts`."""
    tensors = {
        "tokens": torch.cat([torch.empty(0).long(), *(text.tokens for text in texts)]).int(),
        "counted": torch.cat([torch.empty(0).bool(), *(text.loss_mask for text in texts)]).byte(),
        "lengths": torch.tensor([len(text.tokens) for text in texts], dtype=torch.int64),
    }
    # One key, since safetensors does not fix their order, and equal shards must be equal bytes.
    metadata = {"facts": json.dumps(facts or {}, sort_keys=True)}
    replace(path, lambda aside: safetensors.torch.save_file(tensors, aside, metadata))


def read_facts(path: Path) -> dict[str, int]:
    """Return the `facts` of `write_shard`; raises `TrainError` if the file cannot be read."""
    with opened(path) as file:
        return json.loads((file.metadata() or {}).get("facts", "{}"))


def opened(path: Path) -> safetensors.safe_open:
    """Open a safetensors file; raises `TrainError` if it cannot be read."""
    try:
        return safetensors.safe_open(path, "pt")
    except (safetensors.SafetensorError, OSError) as error:
        raise TrainError(f"{path} is not a readable safetensors file: {error}.") from None


def read_shard(path: Path) -> Iterator[Text]:
    """Return the sequences of a shard, or of a file with `tokens` and `lengths`, all counted.
    Raises `TrainError` for another kind of file."""
    with opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tokens, lengths = tensors.get("tokens"), tensors.get("lengths")
    if tokens is None or lengths is None or int(lengths.sum()) != len(tokens):
        raise TrainError(f"{path} must hold `tokens` [T] and `lengths` [N] with sum(lengths) = T.")
    if len(tokens) and int(tokens.min()) < 0:
        raise TrainError(f"{path} holds the negative token id {int(tokens.min())}.")
    loss_mask = tensors.get("counted", torch.ones_like(tokens)).bool()
    if len(loss_mask) != len(tokens):
        raise TrainError(f"{path} counts {len(loss_mask)} tokens, but holds {len(tokens)}.")
    sizes = lengths.tolist()
    return (Text(*pair) for pair in zip(tokens.long().split(sizes), loss_mask.split(sizes)))


def read(folder: Path) -> Iterator[Text]:
    """Return all sequences of a data folder, in order; raises `TrainError` if it is incomplete,
    or a shard is damaged."""
    for number in range(read_index(folder)["shards"]):
        yield from read_shard(shard_path(folder, number))


def read_index(
    folder: Path,
    name: str = INDEX,
    made_by: str = "data",
    keys: Collection[str] = ("shards",),
) -> dict[str, Any]:
    """A folder's index, which `specblock MADE_BY` writes last; raises `TrainError` without it."""
    try:
        return read_object(folder / name, keys)
    except FileNotFoundError:
        raise TrainError(
            f"There is no {name} in {folder}: run `specblock {made_by}` to its end (with the same "
            "options, it resumes)."
        ) from None


def read_object(path: Path, keys: Collection[str]) -> dict[str, Any]:
    """Read a JSON object with at least these keys; raises `TrainError` if it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict) and found.keys() >= set(keys):
        return found
    raise TrainError(
        f"{path} is damaged, but must be a JSON object with {', '.join(keys)}: remove its "
        "folder and make it again."
    )


def check_same(
    what: str,
    begun: Mapping[str, Any],
    now: Mapping[str, Any],
    advice: str,
    hidden: Collection[str] = (),
) -> None:
    """Raise `TrainError` if an option of a run differs from those in its folder, read from JSON.

    what: start of the message, such as "FOLDER was begun".
    hidden: options with fingerprints as values, which messages omit.
    """
    for name, value in json.loads(json.dumps(now)).items():
        if begun.get(name) == value:
            continue
        how = f"{name} = {json.dumps(begun.get(name))}, not {json.dumps(value)}"
        raise TrainError(f"{what} with {f'different {name}' if name in hidden else how}; {advice}")


def check_ids(path: Path, texts: Iterable[Tensor], vocab_size: int) -> None:
    """Raise `TrainError` if a text of `path` has an id outside the target's vocabulary."""
    largest = max(int(text.max()) for text in texts)
    if largest >= vocab_size:
        raise TrainError(
            f"{path} holds token id {largest}, but the target's vocabulary ends at "
            f"{vocab_size - 1}; was it made for another model?"
        )


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Replace `path` atomically by a file that `write` fills."""
    aside = path.with_name(f".{path.name}.part")
    write(aside)
    aside.replace(path)


def write_text(path: Path, text: str) -> None:
    """Replace a UTF-8 file atomically."""
    replace(path, lambda aside: aside.write_text(text, encoding="utf-8", newline="\n"))


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file atomically."""
    write_text(path, json.dumps(content, indent=1, default=str) + "\n")
