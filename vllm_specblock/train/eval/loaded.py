"""Drafters loaded to draft along texts without an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from vllm_specblock.config import DEFAULT_NODES, parse_drafter
from vllm_specblock.drafters.common.config import CheckpointError, default_layer_ids
from vllm_specblock.drafters.common.hub import drafter_folder, target_folder
from vllm_specblock.drafters.detect import kind_of
from vllm_specblock.drafters.eagle3.checkpoint import FILES as eagle3_files
from vllm_specblock.drafters.specblock import checkpoint as specblock_files
from vllm_specblock.drafters.specblock.config import TargetInfo
from vllm_specblock.feedback.calibration import DraftCalibration
from vllm_specblock.train.config import TrainError
from vllm_specblock.train.eval.chain import Chain, chain_along
from vllm_specblock.train.eval.drafting import (
    ServedDraft,
    draft_eagle3,
    draft_specblock,
    serving_growth,
    serving_shape,
)
from vllm_specblock.train.learner import EvalSequence
from vllm_specblock.train.target import target_rows
from vllm_specblock.train.target.target_info import check_target, describe_target, read_target


@dataclass(frozen=True)
class Pairing:
    """Folders of a drafter and its target whose configs fit together. kind: registered name of the
    drafter; layer_ids: target layers whose states it reads; vocab_size: of the target."""

    drafter: Path
    target: Path
    kind: str
    layer_ids: tuple[int, ...]
    vocab_size: int


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter that drafts serving's trees along texts.

    depth: tokens on the longest path of its trees.
    forward_name: what one drafter forward adds to a tree ("block" or "level").
    along: drafts along a greedy text.
    calibration: learned over the texts; None: scores are not calibrated.
    chain: drafts chains of whole blocks along a text; None: the drafter has no blocks.
    block_size: K, tokens of a forward; 1 without blocks.
    """

    pairing: Pairing
    depth: int
    forward_name: str
    along: Callable[[EvalSequence], ServedDraft]
    calibration: DraftCalibration | None
    chain: Callable[[EvalSequence], Chain] | None = None
    block_size: int = 1


def pair(drafter: Path, target: Path | None) -> Pairing:
    """Find a drafter's target (default: the one that its config names) and compare their sizes;
    both may be folders or hub ids.

    Raises:
        TrainError: there is no target, or a drafter of this kind drafts in engines only.
        CheckpointError: one of the configs cannot be used, or they do not belong together.
    """
    drafter = drafter_folder(drafter)
    kind = kind_of(drafter)
    if kind == "specblock":
        return pair_specblock(drafter, target)
    if kind == "eagle3":
        return _pair_eagle3(drafter, target)
    raise TrainError(
        f"The drafter in {drafter} is of kind {kind!r}, but drafting along texts takes one of "
        "specblock, eagle3: measure it served, with `specblock bench`."
    )


def pair_specblock(drafter: Path, target: Path | None) -> Pairing:
    """`pair` for callers that take SpecBlock drafters only."""
    drafter = drafter_folder(drafter)
    config = specblock_files.read_config(drafter)
    target = _target_of(drafter, target, config.target.name)
    info = describe_target(target, layer_ids=config.target.layer_ids)
    check_target(drafter, config.target, target, info)
    assert info.layer_ids is not None  # `describe_target` sets them
    return Pairing(drafter, target, "specblock", info.layer_ids, info.vocab_size)


def _pair_eagle3(drafter: Path, target: Path | None) -> Pairing:
    config = eagle3_files.read_config(drafter)
    target = _target_of(drafter, target, None)
    raw = read_target(target)
    made_for = TargetInfo(hidden_size=config.target_hidden_size, vocab_size=config.vocab_size)
    found = TargetInfo(hidden_size=raw["hidden_size"], vocab_size=raw["vocab_size"])
    check_target(drafter, made_for, target, found)
    layers = config.layer_ids or default_layer_ids(raw["num_hidden_layers"])
    if layers[-1] >= raw["num_hidden_layers"]:
        raise CheckpointError(
            f"The drafter in {drafter} reads target layers {list(layers)}, but {target} has only "
            f"layers 0 to {raw['num_hidden_layers'] - 1}."
        )
    return Pairing(drafter, target, "eagle3", layers, raw["vocab_size"])


def _target_of(drafter: Path, target: Path | None, name: str | None) -> Path:
    if target is not None:
        return target_folder(target)
    folder = None if name is None else target_folder(name)
    if folder is None or not folder.is_dir():
        said = "names no target" if name is None else f"is for {name}, which is no folder here"
        raise TrainError(f"The drafter in {drafter} {said}; give the target's with --target.")
    return folder


def load_drafter(
    pairing: Pairing,
    dtype: torch.dtype,
    device: torch.device,
    nodes: int = DEFAULT_NODES,
    forwards: int | None = None,
) -> LoadedDrafter:
    """Read the weights. nodes: budget of the trees; forwards: blocks of SpecBlock or levels of
    EAGLE-3 per step (default: as in serving).

    Raises:
        CheckpointError: the tensors are not what the config says.
        OptionError: more forwards than are supported.
    """
    if pairing.kind == "eagle3":
        given = {} if forwards is None else {"depth": forwards}
        levels = parse_drafter(given, "eagle3", num_nodes=nodes)
        eagle3 = eagle3_files.load(pairing.drafter, dtype, device)
        if eagle3.wants_head:
            every = torch.arange(pairing.vocab_size)
            eagle3.share_head(target_rows.head_rows(pairing.target, every).to(device))
        growth = serving_growth(eagle3, levels, nodes)
        learned = DraftCalibration(device, num_slots=1) if levels.calibrate_drafts else None
        return LoadedDrafter(
            pairing,
            growth.num_blocks,
            "level",
            lambda text: draft_eagle3(eagle3, text, growth, learned),
            learned,
        )
    given = {} if forwards is None else {"num_blocks": forwards}
    options = parse_drafter(given, "specblock", num_nodes=nodes)
    model = specblock_files.load(pairing.drafter, dtype, device)
    shape = serving_shape(model, options, nodes)
    calibration = DraftCalibration(device, num_slots=1) if options.calibrate_drafts else None
    return LoadedDrafter(
        pairing,
        shape.max_depth,
        "block",
        lambda text: draft_specblock(model, text, shape, calibration),
        calibration,
        partial(chain_along, model, blocks=shape.num_blocks),
        shape.block_size,
    )
