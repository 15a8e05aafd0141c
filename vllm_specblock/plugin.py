"""Entry points that vLLM calls.

`register` runs in every vLLM process (`vllm.general_plugins`), possibly more than once.
`prepare_cpu` runs while vLLM decides on its platform (`vllm.platform_plugins`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from vllm_specblock.versions import installed_version, is_supported, supported_sentence


def register() -> None:
    """Make `method: "specblock"` known to this process; idempotent.

    With an unsupported release, engines with that method fail: silently serving without drafts
    would mislead the user.
    """
    found = installed_version("vllm") or "unknown"
    if not is_supported(found):
        _refuse_engines(found)
        return
    from vllm_specblock.engine.config import registration

    registration.register()
    if "cpu" in found:
        from vllm_specblock.cpu import runner

        runner.register()
        if _runner_is_wanted():
            runner.prepare()


def _refuse_engines(found: str) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from vllm_specblock.engine.config.ours import asks_for_us
    from vllm_specblock.engine.patches import Function, replaces
    from vllm_specblock.options import OptionError

    @replaces(EngineArgs, "create_speculative_config")
    def create_speculative_config(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
        given = self.speculative_config
        if isinstance(given, Mapping) and asks_for_us(given):
            raise OptionError(supported_sentence(found))
        return original(self, *args, **kwargs)


def prepare_cpu() -> None:
    """Let Model Runner V2 find Triton on a CPU build, if all engines are to have that runner.

    A platform plugin runs before vLLM looks for Triton. Returns None: "not my platform".
    """
    found = installed_version("vllm") or "unknown"
    if "cpu" in found and _runner_is_wanted() and is_supported(found):
        from vllm_specblock.cpu.triton_interpreter import enable

        enable()


def _runner_is_wanted() -> bool:
    return os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
