"""Checkpoint files of all drafters: open them, compare names and shapes, load."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vllm_specblock.drafters.specblock.config import CheckpointError

CONFIG, WEIGHTS, MAPPING = "config.json", "model.safetensors", "vocab_mapping.pt"
MAPPING_NAMES = ("d2t", "t2d")

PathLike = str | os.PathLike[str]
Shapes = dict[str, tuple[int, ...]]

_Network = TypeVar("_Network", bound=nn.Module)


def with_weights(
    make: Callable[[], _Network],
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    device: torch.device | str,
) -> _Network:
    """Make a network without drawing weights, and load `tensors`, cast to `dtype` on `device`."""
    with torch.device("meta"):
        network = make()
    network = network.to(dtype).to_empty(device=device)
    network.load_state_dict(tensors)
    return network


def wanted_shapes(make: Callable[[], nn.Module]) -> Shapes:
    """Return the shapes, by name, of all tensors that a network loads."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in make().state_dict().items()}


def opened(path: Path) -> safe_open:
    """The safetensors file at `path`; raises CheckpointError if there is none, or half of one."""
    if not path.is_file():
        raise CheckpointError(
            f"There is no {path}; a drafter directory holds {CONFIG} and {WEIGHTS}."
        )
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}).") from None
    except (OSError, RuntimeError) as error:  # removed meanwhile: which of them depends on when
        raise CheckpointError(f"{path} cannot be opened ({error}).") from None


def stored_shapes(file: safe_open) -> Shapes:
    """Return the shapes of an open file's tensors by name, without reading them."""
    return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def stored_tensors(file: safe_open) -> dict[str, Tensor]:
    """Read all tensors of an open file by name, on the CPU."""
    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def read_mapping(directory: Path) -> dict[str, Tensor]:
    """Read d2t and t2d of vocab_mapping.pt; empty without that file.

    Raises:
        CheckpointError: it holds something else.
    """
    path = directory / MAPPING
    if not path.is_file():
        return {}
    refusal = f"{path} is not a plain dict of the tensors d2t and t2d"
    try:
        mapping: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # on foreign bytes torch's unpickler fails with anything
        raise CheckpointError(
            f"{refusal} (torch.load with weights_only=True: {type(error).__name__})."
        ) from None
    if not isinstance(mapping, dict) or not all(
        isinstance(mapping.get(name), Tensor) for name in MAPPING_NAMES
    ):
        raise CheckpointError(f"{refusal}.")
    return {name: mapping[name] for name in MAPPING_NAMES}


def identity_mapping(draft_vocab_size: int, vocab_size: int) -> dict[str, Tensor]:
    """Return d2t and t2d of a drafter that names every target token; empty if it does not."""
    if draft_vocab_size != vocab_size:
        return {}
    return {
        "d2t": torch.zeros(vocab_size, dtype=torch.int64),
        "t2d": torch.ones(vocab_size, dtype=torch.bool),
    }


def check_names(found: Shapes, wanted: Shapes, where: PathLike) -> None:
    """Raise CheckpointError unless both hold the same names."""
    if missing := sorted(wanted.keys() - found.keys()):
        raise CheckpointError(f"{where} lacks {listed(missing)}, which its {CONFIG} asks for.")
    if extra := sorted(found.keys() - wanted.keys()):
        raise CheckpointError(f"{where} holds {listed(extra)}, which its {CONFIG} has no use for.")


def check_shapes(found: Shapes, wanted: Shapes, where: PathLike) -> None:
    """Raise CheckpointError unless every name in `wanted` has that shape in `found`."""
    for name, shape in wanted.items():
        if found[name] != shape:
            raise CheckpointError(
                f"{where}: {name} has shape {list(found[name])}, but its {CONFIG} asks for "
                f"{list(shape)}."
            )


def check_mapping(d2t: Tensor, t2d: Tensor, directory: PathLike) -> None:
    """Raise CheckpointError unless d2t [Vd] offsets and t2d [V] bool mark the same target ids."""
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        raise CheckpointError(
            f"The vocabulary mapping in {directory} has d2t of {d2t.dtype} and t2d of "
            f"{t2d.dtype}, but they must be torch.int64 and torch.bool."
        )
    targets = torch.arange(len(d2t)) + d2t
    if not torch.equal(targets, t2d.nonzero()[:, 0]):
        raise CheckpointError(
            f"The vocabulary mapping in {directory} contradicts itself: draft id + d2t must run "
            "through the target ids that t2d marks, ascending (d2t holds offsets, not ids)."
        )


def listed(names: list[str]) -> str:
    """Return a list's first names for a sentence, and how many more there are."""
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
