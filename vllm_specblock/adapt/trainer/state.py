"""What a trainer goes on from after its end: θ_train, the optimiser's moments, the policy.

One file in the folder of versions, replaced whole. It holds weights and numbers, no text.
"""

from __future__ import annotations

import base64
import collections
import io
import json
import pickle
import random
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_specblock.adapt.adaptation import Adaptation
from vllm_specblock.adapt.files import replace_synced
from vllm_specblock.adapt.learning.pool import Version
from vllm_specblock.adapt.policy import bandit, gain_bandit, gain_belief, interface
from vllm_specblock.train.config import TrainError

FILE = "trainer.safetensors"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_PLAIN = {
    "random.Random": random.Random,
    "collections.deque": collections.deque,
    "collections.Counter": collections.Counter,
}


def save(out: Path, adaptation: Adaptation, fingerprints: dict[str, str]) -> None:
    """Write the state to `out`, which is one's own folder."""
    updater, training = adaptation.updater, adaptation.training
    tensors = {}
    for name, value in updater.drafter.named_parameters():
        tensors[f"weight/{name}"] = value.detach()
        moments = updater.optimizer.state.get(value, {})
        tensors |= {f"{kind}/{name}": moments[kind] for kind in moments}
    facts = {
        "fingerprints": fingerprints,
        "number": adaptation.number,
        "rows": adaptation.rows,
        "steps": updater.steps,
        "compared": adaptation.compared,
        "usual": adaptation.usual.known,
        "training": [training.number, training.action, training.parent],
        "policy": base64.b64encode(pickle.dumps(adaptation.policy)).decode(),
    }
    held = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    replace_synced(out / FILE, lambda path: save_file(held, path, {"facts": json.dumps(facts)}))


def restore(out: Path, adaptation: Adaptation, fingerprints: dict[str, str]) -> bool:
    """Let an adaptation at its beginning go on from the state in `out`.

    A policy of another kind than the one that was asked for stays where it was.

    Returns:
        whether there was one.

    Raises:
        TrainError: it is of another drafter or target, not whole, or not finite. Nothing changed.
    """
    path = out / FILE
    if not path.is_file():
        return False
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["facts"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        _check(path, facts, tensors, adaptation, fingerprints)
        known = _load(base64.b64decode(facts["policy"]))
        number, action, parent = facts["training"]
        training = Version(number, _weights(tensors), interface.Action(action), parent)
        compared = int(facts.get("compared", 0))  # states of before have neither
        tau, count = facts.get("usual", (0.0, 0))
    except (SafetensorError, ValueError, KeyError, TypeError, pickle.UnpicklingError) as error:
        if isinstance(error, TrainError):
            raise
        raise TrainError(
            f"The trainer's state in {path} cannot be read, so training begins anew."
        ) from None
    adaptation.adopt_training(training, facts["number"], facts["rows"])
    adaptation.compared = compared
    adaptation.usual.recall(tau, count)
    if type(known) is type(adaptation.policy):
        adaptation.policy = known
    updater = adaptation.updater
    updater.steps = facts["steps"]
    for name, value in updater.drafter.named_parameters():
        moments = {k: tensors[f"{k}/{name}"] for k in _MOMENTS if f"{k}/{name}" in tensors}
        if moments:
            updater.optimizer.state[value] = {
                kind: moment if kind == "step" else moment.to(value.device)
                for kind, moment in moments.items()
            }
    return True


def _weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    kind = "weight/"
    return {n.removeprefix(kind): each for n, each in tensors.items() if n.startswith(kind)}


def _check(
    path: Path,
    facts: dict[str, Any],
    tensors: dict[str, Tensor],
    adaptation: Adaptation,
    fingerprints: dict[str, str],
) -> None:
    for what, mine in fingerprints.items():
        if facts["fingerprints"][what] != mine:
            raise TrainError(
                f"The trainer's state in {path} is of another {what}, so training begins anew."
            )
    wanted = {n: v.shape for n, v in adaptation.updater.drafter.named_parameters()}
    if {n: v.shape for n, v in _weights(tensors).items()} != wanted:
        raise KeyError
    if not all(bool(torch.isfinite(each).all()) for each in tensors.values()):
        raise TrainError(f"The trainer's state in {path} is not finite, so training begins anew.")


class _Unpickler(pickle.Unpickler):
    """Makes policies and what they consist of, and nothing else: the folder may be from others."""

    def find_class(self, module: str, name: str) -> Any:
        for ours in (interface, bandit, gain_bandit, gain_belief):
            if module == ours.__name__ and isinstance(getattr(ours, name, None), type):
                return getattr(ours, name)
        found = _PLAIN.get(f"{module}.{name}")
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a policy.")
        return found


def _load(packed: bytes) -> Any:
    return _Unpickler(io.BytesIO(packed)).load()
