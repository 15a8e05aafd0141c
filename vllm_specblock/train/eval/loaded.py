"""Drafters loaded to draft along texts without an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from vllm_specblock.config import DEFAULT_NODES, parse_drafter
from vllm_specblock.drafters.common.config import CheckpointError, default_layer_ids
from vllm_specblock.drafters.common.hub import drafter_folder, target_folder
from vllm_specblock.drafters.detect import kind_of
from vllm_specblock.drafters.eagle3.model import FILES as eagle3_files
from vllm_specblock.drafters.eagle3.model import Eagle3Model
from vllm_specblock.drafters.specblock import checkpoint as specblock_files
from vllm_specblock.drafters.specblock.config import TargetInfo
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.feedback.calibration import DraftCalibration
from vllm_specblock.train.config import TrainError
from vllm_specblock.train.eval.chain import Chain, chain_along
from vllm_specblock.train.eval.drafting import Network, ServedDraft, draft_trees, serving_shape
from vllm_specblock.train.learner import EvalSequence
from vllm_specblock.train.target import target_rows
from vllm_specblock.train.target.target_info import check_target, read_target

KINDS = ("specblock", "eagle3")
"""Kinds of drafters that draft along texts."""


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
    along: drafts along a greedy text; scores are calibrated from text to text, as in serving.
    chain: drafts chains of whole blocks along a text; None: the drafter has no blocks.
    block_size: K, tokens of a forward; 1 without blocks.
    """

    pairing: Pairing
    depth: int
    forward_name: str
    along: Callable[[EvalSequence], ServedDraft]
    chain: Callable[[EvalSequence], Chain] | None = None
    block_size: int = 1


def pair(drafter: Path, target: Path | None, kinds: Collection[str] = KINDS) -> Pairing:
    """Find a drafter's target (default: the one that its config names) and compare their sizes;
    both may be folders or hub ids.

    Raises:
        TrainError: there is no target, or the drafter is of another kind.
        CheckpointError: one of the configs cannot be used, or they do not belong together.
    """
    drafter = drafter_folder(drafter)
    kind = kind_of(drafter)
    if kind not in kinds:
        raise TrainError(
            f"The drafter in {drafter} is of kind {kind!r}, but must be {' or '.join(kinds)} here; "
            "`specblock bench` measures any kind."
        )
    if kind == "eagle3":
        config = eagle3_files.read_config(drafter)
        made_for = TargetInfo(hidden_size=config.target_hidden_size, vocab_size=config.vocab_size)
        layers = config.layer_ids
    else:
        made_for = specblock_files.read_config(drafter).target
        layers = made_for.layer_ids
    target = _target_of(drafter, target, made_for.name)
    raw = read_target(target)
    found = TargetInfo(hidden_size=raw["hidden_size"], vocab_size=raw["vocab_size"])
    check_target(drafter, made_for, target, found)
    layers = layers or default_layer_ids(raw["num_hidden_layers"])
    if layers[-1] >= raw["num_hidden_layers"]:
        raise CheckpointError(
            f"The drafter in {drafter} reads target layers {list(layers)}, but {target} has only "
            f"layers 0 to {raw['num_hidden_layers'] - 1}."
        )
    return Pairing(drafter, target, kind, layers, found.vocab_size)


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
    eagle3 = pairing.kind == "eagle3"
    given = {} if forwards is None else {"depth" if eagle3 else "num_blocks": forwards}
    options = parse_drafter(given, pairing.kind, num_nodes=nodes)
    load: Callable[..., Network] = eagle3_files.load if eagle3 else specblock_files.load
    network = load(pairing.drafter, dtype, device)
    if isinstance(network, Eagle3Model) and network.wants_head:
        every = torch.arange(pairing.vocab_size)
        network.share_head(target_rows.head_rows(pairing.target, every).to(device))
    shape = serving_shape(network, options, nodes)
    calibration = DraftCalibration(device, num_slots=1) if options.calibrate_drafts else None
    chain = None
    if isinstance(network, SpecBlockModel):
        chain = partial(chain_along, network, blocks=shape.num_blocks)
    return LoadedDrafter(
        pairing,
        shape.max_depth,
        "level" if eagle3 else "block",
        lambda text: draft_trees(network, text, shape, calibration),
        chain,
        shape.block_size,
    )
