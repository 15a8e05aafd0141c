"""Error for unsupported releases of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_specblock.engine.config.ours import asks_for_us
from vllm_specblock.engine.patches import Function, replaces
from vllm_specblock.options import OptionError
from vllm_specblock.versions import supported_sentence


def refuse(version: str) -> None:
    """Make engines that use SpecBlock fail with one sentence. Idempotent."""
    from vllm.engine.arg_utils import EngineArgs

    @replaces(EngineArgs, "create_speculative_config")
    def create_speculative_config(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
        given = self.speculative_config
        if isinstance(given, Mapping) and asks_for_us(given):
            raise OptionError(supported_sentence(version))
        return original(self, *args, **kwargs)
