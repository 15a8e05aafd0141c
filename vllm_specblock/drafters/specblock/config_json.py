"""SpecBlock `config.json` in two layouts.

"published" is the SpecBlock authors'. "ours" also names what theirs leaves to the code: RoPE base
of later blocks, rank features, q/k norm, target layers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from vllm_specblock.config import DEFAULT_NODES, METHOD
from vllm_specblock.drafters.specblock.config import (
    PUBLISHED_RANK_TOPK,
    CheckpointError,
    DrafterConfig,
    rope_type,
)

Layout = Literal["ours", "published"]
Config = TypeVar("Config", bound=BaseModel)

MODEL_TYPE = "specblock"
ARCHITECTURE = "SpecBlockDrafter"
PUBLISHED_ARCHITECTURES = ("LlamaForCausalLMSpecBlock", "LlamaForCausalLMSpecBlockShift")

# vLLM limits requests by the smaller of the drafter's and the target's longest position.
_NO_LIMIT = 1 << 24

_OF_VLLM = frozenset(
    {
        "model_type",
        "architectures",
        "max_position_embeddings",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "speculators_config",
        "speculators_model_type",
        "transformer_layer_config",
    }
)
"""Keys of our config.json that only vLLM or transformers read."""

# Our key → (published key, value when it is missing; None: it must be there).
_PUBLISHED_KEYS: dict[str, tuple[str, Any]] = {
    "hidden_size": ("hidden_size", None),
    "num_attention_heads": ("num_attention_heads", None),
    "intermediate_size": ("intermediate_size", None),
    "num_hidden_layers": ("num_hidden_layers", None),
    "vocab_size": ("vocab_size", None),
    "draft_vocab_size": ("draft_vocab_size", 32000),
    "block_size": ("diffspec_draft_token_num", 4),
    "rank_classes": ("rank_classes", 4),
    "rms_norm_eps": ("rms_norm_eps", 1e-5),
}


_CONTAINERS: dict[str, tuple[type, str]] = {
    "architectures": (list, "a list of names"),
    "layer_types": (list, "a list of names"),
    "rope_scaling": (dict, "an object"),
    "rope_parameters": (dict, "an object"),
    "eagle_config": (dict, "an object"),
}
"""Keys of any config.json that are read before it is validated."""


def read_json(path: Path) -> tuple[dict[str, Any], str]:
    """Read the object in a JSON file; returns it and its path for messages.

    A transformers config object would move keys (`rope_theta`) and fill in others.

    Raises:
        CheckpointError: no such file, no JSON object in it, or no container where one must be.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if path.parent.is_dir():
            raise CheckpointError(f"There is no {path.name} in {path.parent}.") from None
        raise CheckpointError(
            f"There is no directory {path.parent}; if that is a hub id, download it first."
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}).") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a JSON {type(raw).__name__}, but must hold an object.")
    for key, (kind, expected) in _CONTAINERS.items():
        if not isinstance(raw.get(key), (kind, type(None))):
            raise CheckpointError(f"{path} has {key} = {raw[key]!r}, but it must be {expected}.")
    return raw, str(path)


def layout_of(raw: dict[str, Any], where: str) -> Layout:
    """Return the layout of the config.json `raw`; `where` names it in errors.

    Raises:
        CheckpointError: it is no SpecBlock drafter's.
    """
    architectures = raw.get("architectures") or []
    if raw.get("model_type") == MODEL_TYPE or ARCHITECTURE in architectures:
        return "ours"
    if any(name in PUBLISHED_ARCHITECTURES for name in architectures):
        return "published"
    raise CheckpointError(
        f"{where} is of architecture {architectures or None}, but a SpecBlock drafter is one of "
        f"{', '.join((ARCHITECTURE, *PUBLISHED_ARCHITECTURES))}."
    )


def from_json(raw: dict[str, Any], where: str) -> DrafterConfig:
    """Parse `raw`, a config.json of either layout; `where` names it in errors.

    Raises:
        CheckpointError: unknown architecture, a key missing, unknown (ours) or out of range.
    """
    if layout_of(raw, where) == "ours":
        ours = {k: v for k, v in raw.items() if k not in _OF_VLLM and not k.startswith("_")}
        return checked(where, ours, DrafterConfig)
    ours = {}
    for key, (published, default) in _PUBLISHED_KEYS.items():
        ours[key] = raw.get(published, default)
        if ours[key] is None:
            raise CheckpointError(f"{where} lacks the key {published!r}.")
    # A `head_dim` key is ignored, as the authors' code does.
    layers = layers_of(raw | {"head_dim": None})
    hidden, heads = ours["hidden_size"], ours["num_attention_heads"]
    if layers["head_dim"] is None or hidden % heads:
        raise CheckpointError(
            f"{where}: hidden_size is {hidden!r} and num_attention_heads {heads!r}, but the first "
            "must be a whole multiple of the second."
        )
    size = raw.get("target_hidden_size") or hidden
    layer_ids = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    target = {"hidden_size": size, "vocab_size": ours["vocab_size"], "layer_ids": layer_ids}
    ours |= layers | {"target_hidden_size": size, "target": target}
    return checked(where, ours, DrafterConfig)


def to_json(config: DrafterConfig, layout: Layout, torch_dtype: str) -> dict[str, Any]:
    """Write `config` as a config.json in `layout`, for weights of `torch_dtype`.

    Raises:
        CheckpointError: the published layout cannot hold it.
    """
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


def rope_of(raw: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Return (theta, scaling) of a Llama-like config.json.

    transformers 5 moves `rope_theta` into `rope_parameters` on saving.
    """
    parameters = raw.get("rope_parameters") or {}
    scaling = dict(raw.get("rope_scaling") or parameters)
    # The inner value wins, as in transformers.
    inside = scaling.pop("rope_theta", None)
    theta = inside or raw.get("rope_theta") or parameters.get("rope_theta") or 10000.0
    return theta, scaling if scaling and rope_type(scaling) != "default" else None


def layers_of(raw: dict[str, Any]) -> dict[str, Any]:
    """Return heads and RoPE of a Llama-like config.json, with what missing keys mean."""
    hidden, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
    head_dim = raw.get("head_dim")
    if head_dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        head_dim = hidden // heads
    theta, scaling = rope_of(raw)
    return {
        "num_key_value_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "rope_theta": theta,
        "rope_scaling": scaling,
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
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "target_hidden_size": config.target_hidden_size,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
    }
    raw |= {published: getattr(config, key) for key, (published, _) in _PUBLISHED_KEYS.items()}
    if config.target.layer_ids is not None:
        raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(config.target.layer_ids)}
    return raw


def checked(where: str, keys: dict[str, Any], kind: type[Config]) -> Config:
    """Make a config of `kind`; raises CheckpointError, in which `where` names the file."""
    try:
        return kind(**keys)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            reason = f"lacks the key {key!r}"
        elif first["type"] == "extra_forbidden":
            reason = f"has the key {key!r}, which is not one of a SpecBlock drafter's"
        elif first["type"] == "value_error":
            reason = f"does not fit together: {first['ctx']['error']}"
        else:
            expected = first["msg"].removeprefix("Input should be ")
            reason = f"has {key!r} = {first['input']!r}, but it must be {expected}"
        raise CheckpointError(f"{where} {reason}.") from None
