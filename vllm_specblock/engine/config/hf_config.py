"""The Hugging Face config class of our checkpoints, as vLLM's config machinery wants it."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from vllm.transformers_utils.configs.eagle import EAGLEConfig


class SpecBlockHFConfig(EAGLEConfig):
    """A plain config in an EAGLEConfig's clothes.

    vLLM wraps the config of any "eagle3" drafter into an EAGLEConfig and renames its
    architecture, unless it is one already. This one is, wraps nothing, and keeps its name.
    """

    model_type = "specblock"

    def __init__(self, **kwargs: Any) -> None:
        self.model = None
        self.truncated_vocab_size = None
        PreTrainedConfig.__init__(self, **kwargs)
