"""Configs of drafters: their decoder layers, and how a `config.json` becomes one.

Imports no torch: the command line needs `CheckpointError`, and has to start fast.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

_ORIGINAL = "original_max_position_embeddings"
_ROPE_PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL),
}
_YARN_OPTIONAL = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")

_CONTAINERS: dict[str, tuple[type, str]] = {
    "architectures": (list, "a list of names"),
    "layer_types": (list, "a list of names"),
    "rope_scaling": (dict, "an object"),
    "rope_parameters": (dict, "an object"),
    "eagle_config": (dict, "an object"),
    "speculators_model_type": (str, "a name"),
    "model_type": (str, "a name"),
}
"""Keys of any config.json that are read before it is validated."""

MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
_ROPE_KEYS = ("rope_scaling", "rope_parameters")
_WINDOW_KEYS = ("swa_window_size", "sliding_window")
"""Keys of one meaning: the first one that a config has counts."""


class CheckpointError(ValueError):
    """A drafter or target directory that cannot be used; the message is one sentence."""


def _ascending(ids: tuple[int, ...]) -> tuple[int, ...]:
    # The target's states come in layer order: another one would swap columns of what reads them.
    if list(ids) != sorted({*ids}) or ids[0] < 0:
        raise ValueError("distinct and ascending")
    return ids


Ascending = AfterValidator(_ascending)
Count = Annotated[int, Field(ge=1)]


class NetworkShape(BaseModel):
    """Decoder layers and vocabulary of a drafter."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    computes_yarn: ClassVar[bool] = False

    hidden_size: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)]
    intermediate_size: Count
    num_hidden_layers: Count
    vocab_size: Count  # V of the target
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    rope_scaling: dict[str, Any] | None = None
    qk_norm: bool = False  # queries and keys are RMS-normed per head, as in Qwen3

    @property
    def biases(self) -> tuple[bool, ...]:
        """Whether q, k and v, the attention's output, and the MLP have a bias."""
        return tuple(getattr(self, f"{part}_bias", False) for part in ("qkv", "output", "mlp"))

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Entries that a causal row of each layer sees, itself included; None: all."""
        return getattr(self, "windows", None) or (None,) * self.num_hidden_layers

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, but must be a multiple of "
                f"num_key_value_heads, {self.num_key_value_heads}"
            )
        draft_vocab_size = getattr(self, "draft_vocab_size", self.vocab_size)
        if draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {draft_vocab_size}, but must not exceed vocab_size, "
                f"{self.vocab_size}"
            )
        check_rope_scaling(self.rope_scaling, self.computes_yarn)
        return self


class DecoderShape(NetworkShape):
    """Decoder layers of other projects' drafters, and what their checkpoints vary about them."""

    computes_yarn: ClassVar[bool] = True

    target_hidden_size: Count  # Ht
    draft_vocab_size: Count  # Vd; equal to `vocab_size`: no mapping
    logit_scale: Annotated[float, Field(gt=0)] = 1.0
    mask_token_id: Annotated[int, Field(ge=0)] | None = None  # of drafters with masks
    # Dimensions of a head that RoPE turns, its first ones; None: all of them.
    rotary_dim: int | None = None
    # Hidden states of the target that are fused: i is the residual stream after i layers. None:
    # `default_layer_ids`.
    layer_ids: Annotated[tuple[int, ...], Field(min_length=1), Ascending] | None = None
    windows: tuple[Count | None, ...] | None = None  # see `layer_windows`; None: no windows
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    def target_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the states that it reads of a target with so many layers."""
        return self.layer_ids or default_layer_ids(num_layers)

    @model_validator(mode="after")
    def _check_decoder(self) -> Self:
        if self.rotary_dim is not None and self.rotary_dim not in range(2, self.head_dim + 1, 2):
            raise ValueError(
                f"partial_rotary_factor turns {self.rotary_dim} of a head's {self.head_dim} "
                "dimensions, but must turn an even number"
            )
        if len(self.layer_windows) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_windows)} layers, but num_hidden_layers is "
                f"{self.num_hidden_layers}"
            )
        if self.mask_token_id is not None and self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"mask_token_id is {self.mask_token_id}, but the vocabulary ends at "
                f"{self.vocab_size - 1}"
            )
        return self


Config = TypeVar("Config", bound=BaseModel)
Shape = TypeVar("Shape", bound=DecoderShape)


def default_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """Return (2, N//2, N−3), as EAGLE-3 does; CheckpointError: not three different layers."""
    low, mid, high = ids = (2, num_layers // 2, num_layers - 3)
    if not low < mid < high:
        raise CheckpointError(
            f"A target of {num_layers} layers has no three different default feature layers "
            f"(2, N//2, N-3 gives {list(ids)}): choose three ascending ones below {num_layers} "
            "with --layer-ids."
        )
    return ids


def rope_type(scaling: dict[str, Any]) -> str | None:
    """Return the kind of a `rope_scaling` entry; older configs call the key "type"."""
    return scaling.get("rope_type", scaling.get("type", "default"))


def check_rope_scaling(scaling: dict[str, Any] | None, yarn: bool = False) -> None:
    """Raise ValueError for a `rope_scaling` entry that is not computed; yarn: whether YaRN is."""
    if scaling is None:
        return
    kind = str(rope_type(scaling))
    known = {key: names for key, names in _ROPE_PARAMETERS.items() if yarn or key != "yarn"}
    if kind not in known:
        raise ValueError(f"rope_scaling is of type {kind!r}, but must be one of {', '.join(known)}")
    optional = [key for key in _YARN_OPTIONAL if kind == "yarn" and scaling.get(key) is not None]
    for key in (*known[kind], *optional):
        value = scaling.get(key)
        if not isinstance(value, (int, float)) or value <= 0:
            raise ValueError(f"rope_scaling has {key} = {value!r}, but it must be above 0")


def read_json(path: Path) -> tuple[dict[str, Any], str]:
    """Read the object in a JSON file; returns it and its path for messages.

    A transformers config object would move keys (`rope_theta`) and fill in others. Raises
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
    check_containers(raw, str(path))
    return raw, str(path)


def check_containers(raw: dict[str, Any], where: str) -> None:
    """Raise CheckpointError if a key of `raw` is not what is read before validation."""
    for key, (kind, expected) in _CONTAINERS.items():
        value = raw.get(key)
        parts = value if isinstance(value, list) else ()
        if not isinstance(value, (kind, type(None))) or not all(isinstance(x, str) for x in parts):
            raise CheckpointError(f"{where} has {key} = {value!r}, but it must be {expected}.")


def layers_of(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Return heads and RoPE of a Llama-like config.json, with what missing keys mean.

    Raises CheckpointError as `rope_of`.
    """
    hidden, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
    head_dim = raw.get("head_dim")
    if head_dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        head_dim = hidden // heads
    rope = rope_of(raw, where)
    beside = {key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor")}
    return {
        "num_key_value_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "rope_theta": beside["rope_theta"],
        "rope_scaling": None if rope_type(rope) == "default" else rope,
    }


def rope_of(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Return RoPE's keys, which transformers takes from `rope_scaling`, else `rope_parameters`.

    Raises CheckpointError: the types of the drafter's layers have different ones.
    """
    key, types = key_of(raw, *_ROPE_KEYS), {*_layer_types(raw)}
    said = raw.get(key) or {}
    by_type = {name: rope for name, rope in said.items() if isinstance(rope, dict)}
    beside = {"rope_theta": raw.get("rope_theta") or 10000.0}
    beside["partial_rotary_factor"] = raw.get("partial_rotary_factor") or 1
    each = [by_type.get(name) or {"rope_type": None} for name in types] if by_type else [said]
    ropes = [beside | rope | {"rope_type": rope_type(rope)} for rope in each]
    if ropes.count(ropes[0]) < len(ropes):
        raise CheckpointError(
            f"{where} has {key} that differ between {' and '.join(sorted(types))}, but they must "
            "be the same for all layers of a drafter."
        )
    return ropes[0]


def flattened(
    raw: dict[str, Any], where: str, keys: Iterable[str], beside_only: Iterable[str]
) -> dict[str, Any]:
    """Return the decoder layer of the speculators layout, with the keys that stand beside it.

    As in vLLM, they override the layer's; those of `beside_only` if they are absent, too.
    """
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise CheckpointError(
            f"{where} has transformer_layer_config = {layer!r}, but it must be an object."
        )
    check_containers(layer, where)
    beside = ("speculators_model_type", "quantization_config", "use_aux_hidden_state", *keys)
    layer = layer | {key: raw[key] for key in beside if raw.get(key) is not None}
    return layer | {key: raw.get(key) for key in beside_only}


def shape_of(
    raw: dict[str, Any], own: dict[str, Any], where: str, kind: type[Shape], **keys_of: str
) -> Shape:
    """Return a shape of `kind`: `raw`'s fields of the same name, heads, RoPE, and then `own`.

    Missing keys of RoPE mean what transformers and vLLM take for them. keys_of: as of `checked`.
    """
    layers, partial = layers_of(raw, where), rope_of(raw, where)["partial_rotary_factor"]
    scaling, head_dim = layers["rope_scaling"], layers["head_dim"]
    if scaling is not None and rope_type(scaling) in ("llama3", "yarn"):
        longest = scaling.get(_ORIGINAL, raw.get("max_position_embeddings"))
        layers["rope_scaling"] = scaling | {_ORIGINAL: raw.get(_ORIGINAL) or longest}
    if partial != 1 and isinstance(head_dim, int):
        layers["rotary_dim"] = int(head_dim * partial) if isinstance(partial, (int, float)) else 0
    bias = bool(raw.get("attention_bias"))
    layers |= {
        "target_hidden_size": raw.get("target_hidden_size") or raw.get("hidden_size"),
        "draft_vocab_size": raw.get("draft_vocab_size") or raw.get("vocab_size"),
        "qkv_bias": bias,
        "output_bias": bias,
        "windows": _windows(raw, where),
    }
    keys = {key: raw.get(key) for key in kind.model_fields} | layers | own
    # Absent ones are left out: then either a default holds, or the key is missed by its name.
    return checked(where, {k: v for k, v in keys.items() if v is not None}, kind, raw, **keys_of)


def key_of(raw: dict[str, Any], *keys: str) -> str:
    """Return the first of `keys` that says something in a config, else the first."""
    return next((key for key in keys if raw.get(key) not in (None, {}, [])), keys[0])


def _layer_types(raw: dict[str, Any]) -> list[str]:
    types, layers = raw.get("layer_types") or ["full_attention"], raw.get("num_hidden_layers")
    # Some name those of the target's layers, too; a wrong number is refused with the shape.
    count = max(1, layers) if isinstance(layers, int) else 1
    swa = raw.get("use_swa") and "sliding_attention" not in types[:count]
    return ["sliding_attention"] * count if swa else types[:count]


def _windows(raw: dict[str, Any], where: str) -> list[Any] | None:
    window, types = raw.get(key_of(raw, *_WINDOW_KEYS)), _layer_types(raw)
    if "sliding_attention" not in types:
        return None
    if window is None:
        raise CheckpointError(f"{where} lacks the key 'sliding_window', which its layers need.")
    return [window if each == "sliding_attention" else None for each in types]


def refuse(
    raw: dict[str, Any], where: str, supported: str, variants: Iterable[tuple[Any, str]]
) -> None:
    """Raise CheckpointError for the first variant that a config has; variants: (has it, name)."""
    of_layers = (
        (raw.get("quantization_config"), "quantised weights"),
        (raw.get("hidden_act", "silu") != "silu", f"hidden_act = {raw.get('hidden_act')!r}"),
        (raw.get("use_aux_hidden_state") is False, "use_aux_hidden_state = false"),
    )
    for there, what in (*variants, *of_layers):
        if there:
            raise CheckpointError(f"{where} has {what}, but only {supported} can be drafted with.")


def checked(
    where: str, fields: dict[str, Any], kind: type[Config], raw: Any = None, **keys_of: str
) -> Config:
    """Make a config of `kind`; raises CheckpointError, in which `where` names the file.

    keys_of: by field, its key in `raw`, which the file holds; default: the field's name.
    """
    raw = raw or {}
    keys_of |= {"rope_scaling": key_of(raw, *_ROPE_KEYS), "windows": key_of(raw, *_WINDOW_KEYS)}
    try:
        return kind(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        loc = ".".join(str(part) for part in first["loc"])
        key = next((key for at, key in keys_of.items() if f"{loc}.".startswith(f"{at}.")), loc)
        expected = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        reason = f"has {key!r} = {raw.get(key, first['input'])!r}, but it must be {expected}"
        if first["type"] == "missing":
            reason = f"lacks the key {key!r}"
        elif first["type"] == "extra_forbidden":
            reason = f"has the key {key!r}, which is not one of a SpecBlock drafter's"
        elif not loc:
            reason = f"does not fit together: {expected}"
            for field, name in keys_of.items():
                reason = reason.replace(field, name)
        raise CheckpointError(f"{where} {reason}.") from None
