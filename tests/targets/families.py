"""Tiny models of the families that people serve, read from `families.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Family:
    """A model that random weights are drawn for.

    mix: size of what layers add to the residual stream; less makes texts repeat themselves.
    """

    config: dict[str, Any]
    engine: dict[str, Any] = field(default_factory=dict)
    mix: float = 1.0


TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
BASE = TABLE["groups"]["BASE"]
VOCAB, ROPE = BASE["vocab_size"], BASE["rope_parameters"]


def family(entry: dict[str, Any], recurrent: bool = False) -> Family:
    without = entry.get("without", ())
    config = {key: value for key, value in BASE.items() if key not in without}
    config |= {key: value for key, value in entry.items() if key not in ("without", "mix")}
    if recurrent:  # vLLM computes their block size
        return Family(config, {"block_size": None}, entry.get("mix", 0.2))
    if "kv_lora_rank" in config:  # vLLM's CPU kernel ignores the strides of its queries
        return Family(config, {"compilation_config": {"custom_ops": ["-rotary_embedding"]}})
    return Family(config)


def multimodal(entry: dict[str, Any]) -> Family:
    """A checkpoint around the text model `text`, a family's name or an entry, served for text."""
    text, config = entry["text"], entry | {"torch_dtype": "float32"}
    inside = FAMILIES[text] if isinstance(text, str) else family(text)
    inner = {key: value for key, value in inside.config.items() if key != "architectures"}
    engine = {**inside.engine, "language_model_only": True}
    del config["text"]
    return Family(config | {"text_config": inner}, engine, inside.mix)


FAMILIES = {name: family(entry) for name, entry in TABLE["attention"].items()}
FAMILIES |= {name: family(entry, recurrent=True) for name, entry in TABLE["recurrent"].items()}
FAMILIES |= {name: multimodal(entry) for name, entry in TABLE["multimodal"].items()}
