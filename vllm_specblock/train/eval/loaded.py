"""Loading of a drafter of any kind for drafting along texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from vllm_specblock.config import DEFAULT_NODES
from vllm_specblock.drafters.common.hub import drafter_folder
from vllm_specblock.drafters.detect import kind_of
from vllm_specblock.feedback.calibration import DraftCalibration
from vllm_specblock.train.config import TrainError
from vllm_specblock.train.eval.chain import Chain
from vllm_specblock.train.eval.pairing import Pairing
from vllm_specblock.train.eval.steps import TreeDraft
from vllm_specblock.train.learner import EvalSequence

ALONG_TEXTS = {
    "specblock": "vllm_specblock.train.eval.load_specblock",
    "eagle3": "vllm_specblock.train.eval.load_eagle3",
}
"""Kinds that draft along a text, without an engine: modules of a `pair` and a `load`, each called
as the functions of that name here."""


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter that drafts along texts the trees that serving would.

    Attributes:
        pairing: with its target.
        depth: tokens on the longest path of its trees.
        forward_name: what a drafter forward adds to a tree, for people.
        draft: makes of (text, calibration, temperature at which the target wrote it) what drafts
            along it; the text's states are of `pairing.layer_ids`.
        calibration: what is learned of its scores, from text to text; None: nothing.
        chain: drafts chains of whole blocks along a text; None: it has no blocks.
        block_size: K, tokens of a forward; 1 without blocks.
    """

    pairing: Pairing
    depth: int
    forward_name: str
    draft: Callable[[EvalSequence, DraftCalibration | None, float], TreeDraft]
    calibration: DraftCalibration | None
    chain: Callable[[EvalSequence], Chain] | None = None
    block_size: int = 1

    def along(self, sequence: EvalSequence, temperature: float = 0.0) -> TreeDraft:
        """Draft along one text."""
        return self.draft(sequence, self.calibration, temperature)


def pair(drafter: Path, target: Path | None) -> Pairing:
    """Find a drafter's target (default: the one that its config names), and compare their sizes.

    Args:
        drafter, target: folders or hub ids; those of the pairing are folders.

    Raises:
        TrainError: there is no target, or a drafter of this kind drafts in engines only.
        CheckpointError: one of the configs cannot be used, or they do not belong together.
    """
    drafter = drafter_folder(drafter)
    kind = kind_of(drafter)
    if kind not in ALONG_TEXTS:
        raise TrainError(
            f"The drafter in {drafter} is of kind {kind!r}, but drafting along texts takes one of "
            f"{', '.join(ALONG_TEXTS)}: measure it served, with `specblock bench`."
        )
    pairing: Pairing = _module(kind).pair(drafter, target)
    return pairing


def load_drafter(
    pairing: Pairing,
    dtype: torch.dtype,
    device: torch.device,
    nodes: int = DEFAULT_NODES,
    forwards: int | None = None,
) -> LoadedDrafter:
    """Read the weights.

    Args:
        dtype: of the arithmetic.
        nodes: N, budget of the trees.
        forwards: per step: blocks of SpecBlock, levels of EAGLE-3. Default: as in serving.

    Raises:
        CheckpointError: the tensors are not what the config says.
        OptionError: more forwards than are supported.
    """
    loaded: LoadedDrafter = _module(pairing.kind).load(pairing, dtype, device, nodes, forwards)
    return loaded


def calibration_for(calibrates: bool, device: torch.device) -> DraftCalibration | None:
    """What a drafter's scores are learned with along texts, one at a time."""
    return DraftCalibration(device, num_slots=1) if calibrates else None


def _module(kind: str) -> Any:
    return import_module(ALONG_TEXTS[kind])
