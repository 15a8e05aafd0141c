"""SpecBlock drafters for drafting along texts."""

from __future__ import annotations

from pathlib import Path

import torch

from vllm_specblock.config import parse_drafter
from vllm_specblock.drafters.common.hub import drafter_folder
from vllm_specblock.drafters.common.target_info import check_target, describe_target
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.train.eval.chain import chain_along
from vllm_specblock.train.eval.drafting import SpecBlockDraft, serving_shape
from vllm_specblock.train.eval.loaded import LoadedDrafter, calibration_for
from vllm_specblock.train.eval.pairing import Pairing, target_of


def pair(drafter: Path, target: Path | None) -> Pairing:
    """`loaded.pair` for those who want no other kind of drafter."""
    drafter = drafter_folder(drafter)
    config = checkpoint.read_config(drafter)
    target = target_of(drafter, target, config.target.name)
    info = describe_target(target, layer_ids=config.target.layer_ids)
    check_target(drafter, config.target, target, info)
    assert info.layer_ids is not None  # it is described
    return Pairing(drafter, target, "specblock", info.layer_ids, info.vocab_size)


def load(
    pairing: Pairing, dtype: torch.dtype, device: torch.device, nodes: int, forwards: int | None
) -> LoadedDrafter:
    """`loaded.load_drafter`; forwards: blocks, 1 to 8."""
    given = {} if forwards is None else {"num_blocks": forwards}
    options = parse_drafter(given, "specblock", num_nodes=nodes)
    model = checkpoint.load(pairing.drafter, dtype, device)
    shape = serving_shape(model, options, nodes)
    return LoadedDrafter(
        pairing,
        shape.max_depth,
        "block",
        lambda text, beta, temperature: SpecBlockDraft(model, text, shape, beta, temperature),
        calibration_for(options.calibrate_drafts, device),
        lambda text: chain_along(model, text, shape.num_blocks),
        shape.block_size,
    )
