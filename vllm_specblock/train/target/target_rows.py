"""A target's embedding and LM head, read without loading the target."""

from __future__ import annotations

import hashlib
from pathlib import Path

from torch import Tensor

from vllm_specblock.drafters.common.checkpoint_files import Stored, stored_in
from vllm_specblock.drafters.common.config import read_json
from vllm_specblock.train.config import TrainError

_EMBEDDING = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_HEAD = ("lm_head.weight", "embed_out.weight")
_NORM = ("model.norm.weight",)


def fingerprint(target: Path) -> str:
    """Return a hash of the target's config.json and of its weight files' names and sizes; raises
    `TrainError` if there is no target."""
    path = target / "config.json"
    try:
        digest = hashlib.sha256(path.read_bytes())
    except OSError as error:
        raise TrainError(f"The target's {path} cannot be read: {error.strerror}.") from None
    for path in sorted(target.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:32]


def embedding_rows(target: Path) -> Tensor:
    """Return the embedding, [V, Ht] in the files' dtype, a view of the mapped file.

    Raises:
        CheckpointError: the target's files cannot be read.
        TrainError: they hold no such tensor, or several.
    """
    return _only(stored_in(target), _EMBEDDING, target)


def head_rows(target: Path, ids: Tensor) -> Tensor:
    """Return rows `ids` [n] int64 of the LM head, or of the embedding where both are tied: [n, Ht];
    raises as `embedding_rows`."""
    tensors = stored_in(target)
    has_head = any(name.endswith(_HEAD) for name in tensors)
    config, _ = read_json(target / "config.json")
    text = config.get("text_config") or {}
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    # The config may omit it; files with tied weights hold one tensor.
    wanted = _EMBEDDING if tied or (tied is None and not has_head) else _HEAD
    return _only(tensors, wanted, target)[ids.cpu()]


def final_norm(target: Path) -> Tensor:
    """Return the weight of the norm before the LM head, [Ht]; raises as `embedding_rows`."""
    return _only(stored_in(target), _NORM, target)


def _only(tensors: dict[str, Stored], endings: tuple[str, ...], target: Path) -> Tensor:
    """Return the only tensor whose name has one of these `endings`."""
    found = [stored for name, stored in tensors.items() if name.endswith(endings)]
    if len(found) != 1:
        raise TrainError(
            f"The target {target} has {len(found)} tensors called *{' or *'.join(endings)}, but "
            "must have one."
        )
    return found[0].read()
