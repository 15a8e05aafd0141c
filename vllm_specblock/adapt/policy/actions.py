"""Parameters that each arm trains, and that its versions hold (SpecBlock §3.4)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.drafters.specblock.model import SpecBlockModel

_HEADS = ("lm_head.", "rank_head.")
"""Without the final norm, which is an input of both heads."""

Tensors = Mapping[str, Tensor]
"""A version's parameters by name."""


def trains(action: Action, name: str) -> bool:
    """Whether an update changes the drafter's parameter `name`."""
    return action is Action.FULL or (action is Action.HEADS and name.startswith(_HEADS))


def parameters(drafter: SpecBlockModel, action: Action) -> dict[str, nn.Parameter]:
    """Return the parameters that an update changes, by name."""
    return {name: value for name, value in drafter.named_parameters() if trains(action, name)}


def held(drafter: SpecBlockModel, action: Action, parent: Tensors | None = None) -> Tensors:
    """Return a version: copies of what the action changes; the rest is shared with the parent.

    parent: the version that training started from; None: copy everything.
    """
    return {
        name: value.detach().clone() if parent is None or trains(action, name) else parent[name]
        for name, value in drafter.named_parameters()
    }


def put(drafter: SpecBlockModel, tensors: Tensors, before: Tensors | None = None) -> None:
    """Copy a version into a drafter's parameters, in place.

    before: the version that they hold; tensors shared with it are not copied.
    """
    for name, value in drafter.named_parameters():
        if before is None or tensors[name] is not before[name]:
            value.data.copy_(tensors[name])
