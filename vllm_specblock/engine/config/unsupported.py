"""Error for unsupported releases of vLLM."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from vllm_specblock.engine.config.ours import asks_for_us
from vllm_specblock.engine.patches import Function, replaces
from vllm_specblock.options import OptionError
from vllm_specblock.versions import supported_sentence

logger = logging.getLogger("vllm.specblock")


def refuse(version: str) -> None:
    """Let engines that ask for us fail with one sentence. Idempotent.

    In a release without `create_speculative_config` the sentence is a warning.
    """
    from vllm.engine import arg_utils

    try:

        @replaces(arg_utils.EngineArgs, "create_speculative_config")
        def create_speculative_config(
            original: Function, self: Any, *args: Any, **kwargs: Any
        ) -> Any:
            given = self.speculative_config
            if isinstance(given, Mapping) and asks_for_us(given):
                raise OptionError(supported_sentence(version))
            return original(self, *args, **kwargs)

    except AttributeError:
        logger.warning(supported_sentence(version))
