"""Checkpoint folders of other projects' drafters: config.json, and tensors in any usual file."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from vllm_specblock.drafters.common.checkpoint_files import (
    CONFIG,
    PathLike,
    check_names,
    check_shapes,
    wanted_shapes,
    with_weights,
)
from vllm_specblock.drafters.common.rope import attention_factor
from vllm_specblock.drafters.common.stored import Stored, stored_in
from vllm_specblock.drafters.published.config import DecoderShape, Shape
from vllm_specblock.drafters.specblock.config_json import read_json

Network = TypeVar("Network", bound=nn.Module)


def _named(found: dict[str, Stored], config: Any, directory: Path) -> dict[str, Stored]:
    return {name.removeprefix("model."): entry for name, entry in found.items()}


@dataclass(frozen=True)
class CheckpointReader(Generic[Shape, Network]):
    """Reads the checkpoints of one kind of drafter.

    Attributes:
        from_json: (config.json, its path for messages) -> shape.
        make: (shape, names of the stored tensors) -> network.
        named: (stored tensors, shape, folder) -> the same by the network's names.
    """

    from_json: Callable[[dict[str, Any], str], Shape]
    make: Callable[[Shape, Collection[str]], Network]
    named: Callable[[dict[str, Stored], Shape, Path], dict[str, Stored]] = _named

    def read_config(self, directory: PathLike) -> Shape:
        """What the checkpoint's config.json says.

        Raises:
            CheckpointError: there is no config.json, or no JSON in it; another kind of drafter, or
                a variant that is not supported.
        """
        return self.from_json(*read_json(Path(directory) / CONFIG))

    def check_tensors(self, directory: PathLike, config: Shape) -> dict[str, Stored]:
        """Hold the tensors' names and shapes against `config` without reading the weights.

        Returns:
            the tensors by the network's names.

        Raises:
            CheckpointError: a file is missing or unreadable, tensors are missing, left over or of
                another shape, or the vocabulary mapping is not one.
        """
        directory = Path(directory)
        stored = self.named(stored_in(directory), config, directory)
        wanted = wanted_shapes(partial(self.make, config, stored.keys()))
        shapes = {name: entry.shape for name, entry in stored.items()}
        check_names(shapes, wanted, directory)
        check_shapes(shapes, wanted, directory)
        return stored

    def read_tensors(self, directory: PathLike, config: Shape) -> dict[str, Tensor]:
        """The tensors as they are stored, by the network's names; raises as `check_tensors`."""
        return {name: entry.read() for name, entry in self.check_tensors(directory, config).items()}

    def load(
        self,
        directory: PathLike,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Network:
        """The network with its weights cast to `dtype`, on `device`.

        Without an LM head of its own it wants the target's (`DraftLM.wants_head`).

        Raises:
            CheckpointError: as `read_config` and `check_tensors`.
        """
        config = self.read_config(directory)
        tensors = self.read_tensors(directory, config)
        make = partial(self.make, config, tensors.keys())
        return with_weights(make, rewritten(tensors, config), dtype, device)


def rewritten(tensors: dict[str, Tensor], config: DecoderShape) -> dict[str, Tensor]:
    """Tensors by the network's names, for RoPE that turns whole heads by halves, without a factor.

    A score is the same if query and key change places among their dimensions together. So where
    RoPE turns the first R of D dimensions, in pairs (i, i + R/2), the rows of both projections are
    laid out for pairs (i, i + D/2), of which those behind R/2 have no frequency (`Rotary`). YaRN's
    factor on cos and sin goes into the rows that they turn.
    """
    factor, dim = attention_factor(config.rope_scaling), config.head_dim
    turned = config.rotary_dim or dim
    if factor == 1 and turned == dim:
        return tensors
    ids = torch.arange(dim)
    order = torch.cat([*(torch.cat(x) for x in zip(ids[:turned].chunk(2), ids[turned:].chunk(2)))])
    scale = torch.where(order < turned, factor, 1.0)
    out = {}
    for name, tensor in tensors.items():
        part = name.split(".")[-2] if "." in name else name
        if part in ("q_norm", "k_norm"):
            tensor = tensor.float()[order] * scale
        elif part in ("q_proj", "k_proj"):
            heads = tensor.float().unflatten(0, (-1, dim))[:, order]
            if not config.qk_norm:  # else the norm would take it out again
                heads = heads * scale.view(-1, *[1] * (tensor.dim() - 1))
            tensor = heads.flatten(0, 1)
        out[name] = tensor
    return out
