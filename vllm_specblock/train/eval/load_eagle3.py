"""EAGLE-3 drafters for drafting along texts."""

from __future__ import annotations

from pathlib import Path

import torch

from vllm_specblock.config import parse_drafter
from vllm_specblock.drafters.common.target_info import check_target, read_target
from vllm_specblock.drafters.eagle3.checkpoint import FILES
from vllm_specblock.drafters.specblock.config import CheckpointError, TargetInfo, default_layer_ids
from vllm_specblock.train.eval.eagle3_drafting import Eagle3Draft, serving_growth
from vllm_specblock.train.eval.loaded import LoadedDrafter, calibration_for
from vllm_specblock.train.eval.pairing import Pairing, target_of
from vllm_specblock.train.target import target_rows


def pair(drafter: Path, target: Path | None) -> Pairing:
    """`loaded.pair`; such a drafter's config names no target."""
    config = FILES.read_config(drafter)
    target = target_of(drafter, target, None)
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


def load(
    pairing: Pairing, dtype: torch.dtype, device: torch.device, nodes: int, forwards: int | None
) -> LoadedDrafter:
    """`loaded.load_drafter`; forwards: levels."""
    given = {} if forwards is None else {"depth": forwards}
    options = parse_drafter(given, "eagle3", num_nodes=nodes)
    model = FILES.load(pairing.drafter, dtype, device)
    if model.wants_head:
        every = torch.arange(pairing.vocab_size)
        model.share_head(target_rows.head_rows(pairing.target, every).to(device))
    growth = serving_growth(model, options, nodes)
    return LoadedDrafter(
        pairing,
        growth.depth,
        "level",
        lambda text, beta, temperature: Eagle3Draft(model, text, growth, beta, temperature),
        calibration_for(options.calibrate_drafts, device),
    )
