"""What an update of each arm trains, and what of it a version holds (SpecBlock §3.4)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from vllm_specblock.adapt.policy.interface import Action
from vllm_specblock.drafters.specblock.model import SpecBlockModel

_HEADS = ("lm_head.", "rank_head.")
"""Without the final norm: with it, keys and values would stay valid as well, but what both heads
read would change under the one that learns slower."""

Tensors = Mapping[str, Tensor]
"""A version's parameters by name. The vocabulary's mapping, a buffer, never changes."""


def trains(action: Action, name: str) -> bool:
    """Whether an update changes the drafter's parameter `name`.

    Full is all of the drafter: the embedding is the target's, and not among its parameters.
    """
    if action is Action.SKIP:
        return False
    return action is Action.FULL or name.startswith(_HEADS)


def action_between(before: Tensors, after: Tensors) -> Action:
    """The least action whose tensors are all that `before` lacks to be `after`, by identity."""
    same_trunk = all(
        tensor is before.get(name) or trains(Action.HEADS, name) for name, tensor in after.items()
    )
    return Action.HEADS if same_trunk else Action.FULL


def parameters(drafter: SpecBlockModel, action: Action) -> dict[str, nn.Parameter]:
    """The parameters that an update changes, by name."""
    return {name: value for name, value in drafter.named_parameters() if trains(action, name)}


def let_learn(drafter: SpecBlockModel, action: Action) -> None:
    """Require gradients of these parameters and no others: heads spare the trunk's backward."""
    for name, value in drafter.named_parameters():
        value.requires_grad_(trains(action, name))


def held(drafter: SpecBlockModel, action: Action, parent: Tensors | None = None) -> Tensors:
    """A version: copies of what the action changes, and the parent's own tensors of all else.

    parent: the version that training began from; None: everything is copied.
    """
    return {
        name: value.detach().clone() if parent is None or trains(action, name) else parent[name]
        for name, value in drafter.named_parameters()
    }


def put(drafter: SpecBlockModel, tensors: Tensors, before: Tensors | None = None) -> None:
    """Copy a version into a drafter's parameters, in place.

    before: what was put last and is still there: the tensors that both share are not copied again.
    """
    for name, value in drafter.named_parameters():
        if before is None or tensors[name] is not before[name]:
            value.data.copy_(tensors[name])
