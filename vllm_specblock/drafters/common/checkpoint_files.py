"""Checkpoint folders of all drafters: their tensors by name, compared with a network and loaded.

Weights are in `*.safetensors`, or else `pytorch_model*.bin`; an index says which shards count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vllm_specblock.drafters.common.config import CheckpointError, read_json

CONFIG, WEIGHTS, MAPPING = "config.json", "model.safetensors", "vocab_mapping.pt"
MAPPING_NAMES = ("d2t", "t2d")
_INDEX = "model.safetensors.index.json"

PathLike = str | os.PathLike[str]
Shape = TypeVar("Shape")
Network = TypeVar("Network", bound=nn.Module)


class Stored(NamedTuple):
    """The shape of a tensor in a file, its reader, and its name there."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    name: str

    @classmethod
    def of(cls, tensor: Tensor, name: str) -> Stored:
        return cls(tuple(tensor.shape), tensor.detach, name)

    def rows(self, first: int, count: int) -> Stored:
        part = slice(first, first + count)
        return self._replace(shape=(count, *self.shape[1:]), read=lambda: self.read()[part])


Tensors = dict[str, Stored]


@dataclass(frozen=True)
class CheckpointReader(Generic[Shape, Network]):
    """Reader of one kind of checkpoint."""

    # (config.json, its path for messages) -> config
    from_json: Callable[[dict[str, Any], str], Shape]
    # (config, names of the stored tensors) -> network
    make: Callable[[Shape, Collection[str]], Network]
    # (stored tensors, config, folder) -> the same by the network's names
    named: Callable[[Tensors, Shape, Path], Tensors]
    # (tensors by the network's names, config) -> what the network loads
    rewritten: Callable[[dict[str, Tensor], Shape], dict[str, Tensor]] = lambda tensors, _: tensors
    weights: str = "*.safetensors"  # where no index names them
    # (a name of the network, names in the files) -> the name that a missing tensor has there
    filed: Callable[[str, Collection[str]], str] = lambda name, _: name

    def read_config(self, directory: PathLike) -> Shape:
        """Parse the config.json; raises CheckpointError for an absent or an unsupported one."""
        return self.from_json(*read_json(Path(directory) / CONFIG))

    def check_tensors(self, directory: PathLike, config: Shape) -> Tensors:
        """Return the tensors by the network's names; weights are not read.

        Raises CheckpointError: a file is missing or unreadable, tensors are missing, left over or
        of another shape than in `config`, or the vocabulary mapping is not one.
        """
        directory = Path(directory)
        found = stored_in(directory, self.weights)
        stored = self.named(found, config, directory)
        wanted = wanted_shapes(partial(self.make, config, stored.keys()))
        if missing := listed([self.filed(name, found) for name in wanted.keys() - stored.keys()]):
            raise CheckpointError(f"{directory} lacks {missing}, which its {CONFIG} requires.")
        if extra := listed([stored[name].name for name in stored.keys() - wanted.keys()]):
            raise CheckpointError(f"{directory} holds {extra}, which its {CONFIG} does not use.")
        for name, shape in wanted.items():
            if stored[name].shape != shape:
                raise CheckpointError(
                    f"{directory}: {stored[name].name} has shape {list(stored[name].shape)}, but "
                    f"its {CONFIG} asks for {list(shape)}."
                )
        return stored

    def read_tensors(self, directory: PathLike, config: Shape) -> dict[str, Tensor]:
        """Read the tensors in their stored dtypes; see `check_tensors`."""
        return {name: entry.read() for name, entry in self.check_tensors(directory, config).items()}

    def load(
        self,
        directory: PathLike,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Network:
        """Return the network; raises CheckpointError as `read_config` and `check_tensors`."""
        config = self.read_config(directory)
        tensors = self.read_tensors(directory, config)
        with torch.device("meta"):
            network = self.make(config, tensors.keys())
        network = network.to(dtype).to_empty(device=device)
        network.load_state_dict(self.rewritten(tensors, config))
        return network


def wanted_shapes(make: Callable[[], nn.Module]) -> dict[str, tuple[int, ...]]:
    """Return the shapes, by name, of all tensors that a network loads."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in make().state_dict().items()}


def stored_in(directory: Path, weights: str = "*.safetensors") -> Tensors:
    """Return a checkpoint's tensors by their names there; CheckpointError: a file is unreadable."""
    if files := _safetensors_files(directory, weights):
        return {
            name: Stored((*file.get_slice(name).get_shape(),), partial(file.get_tensor, name), name)
            for file in map(opened, files)
            for name in file.keys()  # noqa: SIM118
        }
    pickles = sorted(directory.glob("pytorch_model*.bin"))
    if not pickles:
        raise CheckpointError(
            f"There is neither a .safetensors file nor a pytorch_model.bin in {directory}: weights "
            f"are usually in {WEIGHTS}."
        )
    # Mapped: bytes are read from the disk when a tensor is.
    found = [unpickled(path, mmap=True) for path in pickles]
    return {name: Stored.of(tensor, name) for part in found for name, tensor in part.items()}


def _safetensors_files(directory: Path, weights: str) -> list[Path]:
    if not (directory / _INDEX).is_file():
        return sorted(directory.glob(weights))
    raw, where = read_json(directory / _INDEX)
    shards = raw.get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise CheckpointError(f"{where} has no weight_map from tensors to files: save it again.")
    names = sorted(set(shards.values()))
    # An index may name files of this folder only.
    missing = [n for n in names if Path(n).name != n or not (directory / n).is_file()]
    if missing:
        raise CheckpointError(
            f"{where} names {missing[0]}, which is not in {directory}: download it again."
        )
    return [directory / name for name in names]


def opened(path: Path) -> safe_open:
    """Open a safetensors file; raises CheckpointError if there is none, or half of one."""
    if not path.is_file():
        raise CheckpointError(f"There is no {path}.")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a complete safetensors file ({error}).") from None
    except (OSError, RuntimeError) as error:  # removed meanwhile: which of them depends on when
        raise CheckpointError(f"{path} cannot be opened ({error}).") from None


def unpickled(path: Path, names: tuple[str, ...] = (), mmap: bool = False) -> dict[str, Tensor]:
    """Read a plain dict of tensors; raises CheckpointError for others, or without `names`."""
    refusal = f"{path} is not a plain dict of "
    refusal += f"the tensors {' and '.join(names)}" if names else "tensors"
    try:
        tensors: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # on foreign bytes torch's unpickler fails with anything
        raise CheckpointError(
            f"{refusal} (torch.load with weights_only=True: {type(error).__name__}); save it "
            "again, best as safetensors."
        ) from None
    if (
        isinstance(tensors, dict)
        and tensors.keys() >= set(names)
        and all(isinstance(tensor, Tensor) for tensor in tensors.values())
    ):
        return tensors
    raise CheckpointError(f"{refusal}.")


def with_mapping(
    tensors: Tensors, directory: Path, draft_vocab_size: int, vocab_size: int, file: bool = True
) -> Tensors:
    """Return `tensors` with d2t and t2d, checked: stored ones, or those of a whole vocabulary.

    file: whether vocab_mapping.pt wins over the tensors.
    """
    mapping = {name: tensors[name].read() for name in MAPPING_NAMES if name in tensors}
    if file and (directory / MAPPING).is_file():
        mapping = unpickled(directory / MAPPING, MAPPING_NAMES)
    elif not mapping and draft_vocab_size == vocab_size:
        mapping["d2t"] = torch.zeros(vocab_size, dtype=torch.int64)
        mapping["t2d"] = torch.ones(vocab_size, dtype=torch.bool)
    shapes = {name: tuple(tensor.shape) for name, tensor in mapping.items()}
    if shapes == {"d2t": (draft_vocab_size,), "t2d": (vocab_size,)}:
        check_mapping(mapping["d2t"], vocab_size, directory, mapping["t2d"])
    return tensors | {n: Stored.of(mapping[n], n) for n in MAPPING_NAMES if n in mapping}


def own_tables(config: Any, names: Collection[str]) -> tuple[bool, bool]:
    """Return whether a drafter of another project has an embedding and an LM head of its own."""
    # The target's embedding will do only where it is as wide, and its LM head where it also names
    # the same tokens.
    narrow = config.hidden_size != config.target_hidden_size
    apart = narrow or config.draft_vocab_size != config.vocab_size
    return narrow or "embed_tokens.weight" in names, apart or "lm_head.weight" in names


def with_d2t(stored: Tensors, found: Tensors, config: Any, directory: Path) -> Tensors:
    """Return `stored` with d2t, checked: its own, that of t2d, or of a whole vocabulary."""
    count = config.draft_vocab_size
    marks = next((entry for name, entry in found.items() if name.endswith("t2d")), None)
    if "d2t" not in stored and count == config.vocab_size:
        stored["d2t"] = Stored.of(torch.zeros(count, dtype=torch.int64), "d2t")
    elif "d2t" not in stored and marks is not None:
        targets = marks.read().nonzero()[:, 0]
        stored["d2t"] = Stored.of(targets - torch.arange(len(targets)), "t2d")
    if "d2t" in stored and stored["d2t"].shape == (count,):
        check_mapping(stored["d2t"].read(), config.vocab_size, directory)
    return stored


def check_mapping(d2t: Tensor, vocab_size: int, directory: Path, t2d: Tensor | None = None) -> None:
    """Raise CheckpointError unless d2t [Vd] leads to different target ids, those that t2d marks."""
    targets = torch.arange(len(d2t)) + d2t
    whole = not d2t.dtype.is_floating_point and (
        0 <= targets.min() <= targets.max() < vocab_size and len(targets.unique()) == len(targets)
    )
    if not whole or (t2d is not None and not torch.equal(targets, t2d.nonzero()[:, 0])):
        marked = " that t2d marks, ascending" if t2d is not None else ""
        raise CheckpointError(
            f"The vocabulary mapping in {directory} is wrong: draft id + d2t must be distinct "
            f"target ids below {vocab_size}{marked} (d2t holds offsets, not ids)."
        )


def listed(names: Collection[str]) -> str:
    """Return the first five names for a sentence, and how many more there are."""
    shown = ", ".join(sorted(names)[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
