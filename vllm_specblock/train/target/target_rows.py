"""A target's embedding and LM head, read from its files without loading the target."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import safetensors
from torch import Tensor

from vllm_specblock.train.config import TrainError

_EMBEDDING = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_HEAD = ("lm_head.weight", "embed_out.weight")
_NORM = ("model.norm.weight",)


def fingerprint(target: Path) -> str:
    """Changes with the target's config.json and with the name or size of any weight file.
    Raises `TrainError` where there is no such target."""
    digest = hashlib.sha256(_read(target / "config.json"))
    for path in sorted(target.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:32]


def embedding_rows(target: Path) -> Tensor:
    """[V, Ht] in the files' dtype, a view of the mapped file; raises `TrainError` where the
    target has no single embedding in safetensors files."""
    return _tensor(target, _find(_files_of(target), _EMBEDDING, target))


def head_rows(target: Path, ids: Tensor) -> Tensor:
    """Rows `ids` [n] int64 of the LM head, the embedding where the two are tied: [n, Ht].
    Raises `TrainError` where the target has no LM head in safetensors files."""
    names = _files_of(target)
    has_head = any(name.endswith(_HEAD) for name in names)
    config = json.loads(_read(target / "config.json"))
    text = config.get("text_config") or {}
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    # The config may leave it to its class; files of tied weights hold one tensor only.
    wanted = _EMBEDDING if tied or (tied is None and not has_head) else _HEAD
    return _tensor(target, _find(names, wanted, target))[ids.cpu()]


def final_norm(target: Path) -> Tensor:
    """Weight of the norm before the LM head, [Ht] in the files' dtype; raises `TrainError` where
    the target has none in safetensors files."""
    return _tensor(target, _find(_files_of(target), _NORM, target))


def _find(names: dict[str, str], endings: tuple[str, ...], target: Path) -> tuple[str, str]:
    """(tensor, file) of the one tensor whose name ends like one of `endings`."""
    found = [entry for entry in names.items() if entry[0].endswith(endings)]
    if len(found) != 1:
        raise TrainError(
            f"The target {target} has {len(found)} tensors called *{' or *'.join(endings)}, but "
            "must have one."
        )
    return found[0]


def _files_of(target: Path) -> dict[str, str]:
    """Tensor name → name of the file that holds it."""
    index = target / "model.safetensors.index.json"
    if index.exists():
        return json.loads(_read(index))["weight_map"]
    names: dict[str, str] = {}
    for path in sorted(target.glob("*.safetensors")):
        with safetensors.safe_open(path, framework="pt") as file:
            names |= dict.fromkeys(file.keys(), path.name)
    return names


def _tensor(target: Path, place: tuple[str, str]) -> Tensor:
    name, file = place
    try:
        return safetensors.safe_open(target / file, framework="pt").get_tensor(name)
    except (safetensors.SafetensorError, OSError) as error:
        raise TrainError(f"The weight file {target / file} cannot be read: {error}.") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TrainError(f"The target's {path} cannot be read: {error.strerror}.") from None
