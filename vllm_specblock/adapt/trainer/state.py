"""What a later trainer goes on from: θ_train, the optimiser, the policy.

One file in the folder of versions, replaced whole. It holds weights and numbers, no text.
"""

from __future__ import annotations

import collections
import pickle
import random
from pathlib import Path
from typing import Any

import torch

from vllm_specblock.adapt.adaptation import Adaptation
from vllm_specblock.adapt.files import replace_synced
from vllm_specblock.adapt.learning.pool import Version
from vllm_specblock.adapt.policy import bandit, gain_bandit, gain_belief, interface
from vllm_specblock.train.config import TrainError

FILE = "trainer.pt"
_ALLOWED: list[Any] = [
    *(interface.Action, interface.FinishedRequest, interface.Always),
    *(bandit.Schedule, bandit.PaperBandit, gain_bandit.GainBandit, gain_belief.GainBelief),
    *(random.Random, collections.Counter),
]
"""What a state may consist of beside tensors and plain numbers: the folder may be from others."""


def save(out: Path, adaptation: Adaptation, fingerprints: dict[str, str]) -> None:
    """Write the state to `out`."""
    updater, training = adaptation.updater, adaptation.training
    state = {
        "fingerprints": fingerprints,
        "number": adaptation.number,
        "rows": adaptation.rows,
        "steps": updater.steps,
        "compared": adaptation.compared,
        "usual": adaptation.usual.known,
        "training": (training.action, training.parent),
        "weights": {n: each.detach().cpu() for n, each in updater.drafter.named_parameters()},
        "optimizer": updater.optimizer.state_dict(),
        "policy": adaptation.policy,
    }
    replace_synced(out / FILE, lambda path: torch.save(state, path))


def restore(out: Path, adaptation: Adaptation, fingerprints: dict[str, str]) -> None:
    """Let an adaptation at its beginning go on from the state in `out`.

    A policy of another kind than the current one is left.

    Raises:
        TrainError: it is of another drafter or target, not whole, or not finite. Nothing changed.
    """
    path = out / FILE
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            state = torch.load(path, map_location="cpu", weights_only=True)
        weights, known = state["weights"], state["policy"]
        action, parent = state["training"]
        moments = [
            each for entry in state["optimizer"]["state"].values() for each in entry.values()
        ]
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError):
        raise TrainError(
            f"The trainer's state in {path} cannot be read, so training begins anew."
        ) from None
    for what, mine in fingerprints.items():
        if state["fingerprints"].get(what) != mine:
            raise TrainError(
                f"The trainer's state in {path} is of another {what}, so training begins anew."
            )
    if not all(bool(torch.isfinite(each).all()) for each in [*weights.values(), *moments]):
        raise TrainError(f"The trainer's state in {path} is not finite, so training begins anew.")
    adaptation.adopt_training(
        Version(state["number"], weights, action, parent), state["number"], state["rows"]
    )
    adaptation.compared = state["compared"]
    adaptation.usual.recall(*state["usual"])
    if type(known) is type(adaptation.policy):
        adaptation.policy = known
    adaptation.updater.steps = state["steps"]
    adaptation.updater.optimizer.load_state_dict(state["optimizer"])
