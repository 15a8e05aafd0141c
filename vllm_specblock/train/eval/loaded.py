"""Loading of a drafter of any kind for evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from vllm_specblock.config import DEFAULT_NODES, Eagle3Config, SpecBlockConfig, parse_drafter
from vllm_specblock.drafters.common.hub import drafter_folder, target_folder
from vllm_specblock.drafters.common.target_info import check_target, describe_target, read_target
from vllm_specblock.drafters.eagle3 import checkpoint as eagle3_files
from vllm_specblock.drafters.eagle3.growth import DynamicTreeConfig
from vllm_specblock.drafters.eagle3.model import Eagle3Model
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.drafters.specblock.config import CheckpointError, TargetInfo, default_layer_ids
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.drafters.specblock.tree_shape import TreeShape
from vllm_specblock.feedback.calibration import DraftCalibration
from vllm_specblock.train.config import TrainError
from vllm_specblock.train.eval.drafting import SpecBlockDraft, serving_shape
from vllm_specblock.train.eval.eagle3_drafting import Eagle3Draft, serving_growth
from vllm_specblock.train.eval.steps import TreeDraft
from vllm_specblock.train.learner import EvalSequence
from vllm_specblock.train.target import target_rows


@dataclass(frozen=True)
class Pairing:
    """A drafter's folder and its target's, found to belong together before a weight is read.

    Attributes:
        kind: "specblock" or "eagle3".
        layer_ids: target layers whose states the drafter reads, low ones first.
        vocab_size: of the target.
    """

    drafter: Path
    target: Path
    kind: Literal["specblock", "eagle3"]
    layer_ids: tuple[int, ...]
    vocab_size: int


def pair(drafter: Path, target: Path | None) -> Pairing:
    """Find a drafter's target (default: the one that its config names), and compare their sizes.

    Args:
        drafter, target: folders or hub ids; those of the pairing are folders.

    Raises:
        TrainError: there is no target.
        CheckpointError: one of the configs cannot be used, or they do not belong together.
    """
    drafter = drafter_folder(drafter)
    kind = _pair_eagle3 if eagle3_files.is_eagle3(drafter) else pair_specblock
    return kind(drafter, target)


def pair_specblock(drafter: Path, target: Path | None) -> Pairing:
    """`pair` for those who want no other kind of drafter."""
    drafter = drafter_folder(drafter)
    config = checkpoint.read_config(drafter)
    target = _named(drafter, config.target.name) if target is None else target_folder(target)
    info = describe_target(target, layer_ids=config.target.layer_ids)
    check_target(drafter, config.target, target, info)
    assert info.layer_ids is not None  # it is described
    return Pairing(drafter, target, "specblock", info.layer_ids, info.vocab_size)


def _pair_eagle3(drafter: Path, target: Path | None) -> Pairing:
    config = eagle3_files.read_config(drafter)
    target = _named(drafter, None) if target is None else target_folder(target)
    raw = read_target(target)
    sizes = [
        TargetInfo(hidden_size=hidden, vocab_size=vocab)
        for hidden, vocab in (
            (config.target_hidden_size, config.vocab_size),
            (raw["hidden_size"], raw["vocab_size"]),
        )
    ]
    check_target(drafter, sizes[0], target, sizes[1])
    layers = config.layer_ids or default_layer_ids(raw["num_hidden_layers"])
    if layers[-1] >= raw["num_hidden_layers"]:
        raise CheckpointError(
            f"The drafter in {drafter} reads target layers {list(layers)}, but {target} has only "
            f"layers 0 to {raw['num_hidden_layers'] - 1}."
        )
    return Pairing(drafter, target, "eagle3", layers, raw["vocab_size"])


def _named(drafter: Path, name: str | None) -> Path:
    folder = None if name is None else target_folder(name)
    if folder is None or not folder.is_dir():
        said = "names no target" if name is None else f"is for {name}, which is no folder here"
        raise TrainError(f"The drafter in {drafter} {said}; give the target's with --target.")
    return folder


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter that drafts along texts the trees that serving would.

    Attributes:
        pairing: with its target.
        model: in the dtype of the arithmetic.
        shape: of its trees.
        calibration: what is learned of its scores, from text to text; None: nothing.
    """

    pairing: Pairing
    model: SpecBlockModel | Eagle3Model
    shape: TreeShape | DynamicTreeConfig
    calibration: DraftCalibration | None

    @property
    def depth(self) -> int:
        """Tokens on the longest path: K·M, or EAGLE-3's levels."""
        return self.shape.max_depth if isinstance(self.shape, TreeShape) else self.shape.depth

    @property
    def forward_name(self) -> str:
        """What a drafter forward adds to the tree."""
        return "block" if isinstance(self.shape, TreeShape) else "level"

    def along(self, sequence: EvalSequence, temperature: float = 0.0) -> TreeDraft:
        """Draft along one text; the sequence's states are of `pairing.layer_ids`."""
        model, shape = self.model, self.shape
        if isinstance(model, SpecBlockModel):
            assert isinstance(shape, TreeShape)
            return SpecBlockDraft(model, sequence, shape, self.calibration, temperature)
        assert isinstance(shape, DynamicTreeConfig)
        return Eagle3Draft(model, sequence, shape, self.calibration, temperature)


def load_drafter(
    pairing: Pairing,
    dtype: torch.dtype,
    device: torch.device,
    nodes: int = DEFAULT_NODES,
    forwards: int | None = None,
) -> LoadedDrafter:
    """Read the weights.

    Args:
        nodes: N, budget of the trees.
        forwards: per step: blocks of SpecBlock, levels of EAGLE-3. Default: as in serving.

    Raises:
        CheckpointError: the tensors are not what the config says.
        OptionError: more forwards than are supported.
    """
    key = "num_blocks" if pairing.kind == "specblock" else "depth"
    given = {} if forwards is None else {key: forwards}
    if pairing.kind == "specblock":
        options = parse_drafter(given, pairing.kind, num_nodes=nodes)
        model = checkpoint.load(pairing.drafter, dtype, device)
        shape = serving_shape(model, options, nodes)
        return LoadedDrafter(pairing, model, shape, _calibration(options, device))
    levels = parse_drafter(given, pairing.kind, num_nodes=nodes)
    eagle3 = eagle3_files.load(pairing.drafter, dtype, device)
    if eagle3.wants_head:
        every = torch.arange(pairing.vocab_size)
        eagle3.share_head(target_rows.head_rows(pairing.target, every).to(device))
    growth = serving_growth(eagle3, levels, nodes)
    return LoadedDrafter(pairing, eagle3, growth, _calibration(levels, device))


def _calibration(
    options: SpecBlockConfig | Eagle3Config, device: torch.device
) -> DraftCalibration | None:
    return DraftCalibration(device, num_slots=1) if options.calibrate_drafts else None
