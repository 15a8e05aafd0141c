"""Hugging Face config class of our checkpoints."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from vllm.transformers_utils.configs.eagle import EAGLEConfig


class SpecBlockHFConfig(EAGLEConfig):
    """An EAGLEConfig that wraps nothing: vLLM would wrap and rename any other "eagle3" config."""

    model_type = "specblock"

    def __init__(self, **kwargs: Any) -> None:
        self.model = None
        self.truncated_vocab_size = None
        PreTrainedConfig.__init__(self, **kwargs)
