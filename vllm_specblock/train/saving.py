"""Writing of SpecBlock checkpoints, in two layouts, and conversion from one to the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_specblock.config import DEFAULT_NODES, METHOD
from vllm_specblock.drafters.common.checkpoint_files import (
    CONFIG,
    MAPPING,
    MAPPING_NAMES,
    WEIGHTS,
    PathLike,
)
from vllm_specblock.drafters.common.config import CheckpointError
from vllm_specblock.drafters.specblock.checkpoint import read_config, read_tensors
from vllm_specblock.drafters.specblock.config import (
    ARCHITECTURE,
    MODEL_TYPE,
    OF_BOTH,
    PUBLISHED_ARCHITECTURES,
    PUBLISHED_K,
    PUBLISHED_RANK_TOPK,
    DrafterConfig,
    Layout,
    TargetInfo,
)
from vllm_specblock.drafters.specblock.model import SpecBlockModel
from vllm_specblock.train.data.shards import replace, write_text

_NO_LIMIT = 1 << 24
"""vLLM limits requests by the smaller of the drafter's and the target's longest position."""


def save(drafter: SpecBlockModel, directory: PathLike, layout: Layout = "ours") -> None:
    """Write a drafter directory, file by file; raises as `to_json`."""
    _write(drafter.config, drafter.state_dict(), Path(directory), layout)


def convert(
    source: PathLike, destination: PathLike, to: Layout, target: TargetInfo | None = None
) -> None:
    """Rewrite a drafter directory in the layout `to`; weights keep their bits.

    target: what the new config says of the target; None: as before. Raises CheckpointError as
    `read_config`, `check_tensors` and `save`.
    """
    if Path(source).resolve() == Path(destination).resolve():
        raise CheckpointError(f"{source} cannot be converted into itself: give another --out.")
    config = read_config(source)
    if target is not None:
        config = config.model_copy(update={"target": target})
    _write(config, read_tensors(source, config), Path(destination), to)


def _write(
    config: DrafterConfig, tensors: dict[str, Tensor], directory: Path, layout: Layout
) -> None:
    dtype = str(tensors["lm_head.weight"].dtype).removeprefix("torch.")
    raw = _to_json(config, layout, dtype)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    directory.mkdir(parents=True, exist_ok=True)
    replace(directory / WEIGHTS, lambda path: _save(tensors, path))
    if layout == "published":
        mapping = {name: tensors[name] for name in MAPPING_NAMES}
        replace(directory / MAPPING, lambda path: torch.save(mapping, path))
    write_text(directory / CONFIG, json.dumps(raw, indent=2) + "\n")


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, {"format": "pt"})
    path.chmod(mode)  # safetensors leaves a file that only its owner can read


def _to_json(config: DrafterConfig, layout: Layout, torch_dtype: str) -> dict[str, Any]:
    """Return a config.json; raises CheckpointError if the published layout cannot hold it."""
    if layout == "published":
        return _published(config, torch_dtype)
    raw = {
        "model_type": MODEL_TYPE,
        "architectures": [ARCHITECTURE],
        **config.model_dump(mode="json"),
        "max_position_embeddings": _NO_LIMIT,
        "torch_dtype": torch_dtype,
    }
    if config.target.name is None:
        return raw
    # With these, `vllm serve <drafter>` finds the target by itself. vLLM insists on all three.
    return raw | {
        "speculators_model_type": METHOD,
        "transformer_layer_config": {},
        "speculators_config": {
            "algorithm": METHOD,
            "default_proposal_method": "tree",
            "proposal_methods": [{"proposal_type": "tree", "speculative_tokens": DEFAULT_NODES}],
            "verifier": {
                "name_or_path": config.target.name,
                "architectures": list(config.target.architectures),
            },
        },
    }


def _published(config: DrafterConfig, torch_dtype: str) -> dict[str, Any]:
    for what, held in (
        ("head_dim", config.hidden_size / config.num_attention_heads),
        ("qk_norm", False),
        ("rank_topk", PUBLISHED_RANK_TOPK),
        ("block_rope", "base"),
        ("prefix_broadcast", True),
        ("layer_shift", True),
    ):
        given = getattr(config, what)
        if given != held:
            raise CheckpointError(
                f"The published layout cannot hold a drafter whose {what} is {given!r}: "
                f"there it is always {held!r}."
            )
    raw = {
        "model_type": "llama",
        "architectures": [PUBLISHED_ARCHITECTURES[0]],
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,  # sized a table in the authors' code, limits nothing
        "torch_dtype": torch_dtype,
        PUBLISHED_K: config.block_size,
        "head_dim": config.head_dim,
        "target_hidden_size": config.target_hidden_size,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
    }
    raw |= {key: getattr(config, key) for key in OF_BOTH}
    if config.target.layer_ids is not None:
        raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(config.target.layer_ids)}
    return raw
