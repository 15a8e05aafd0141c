"""Entry points that vLLM calls.

`register` runs in every vLLM process (`vllm.general_plugins`), possibly more than once.
`prepare_cpu` runs while vLLM decides on its platform (`vllm.platform_plugins`).
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from vllm_specblock.versions import is_supported


def _vllm_version() -> str:
    try:
        return version("vllm")
    except PackageNotFoundError:
        return "unknown"


def register() -> None:
    """Make `method: "specblock"` known to this process, or fail with an unsupported vLLM."""
    found = _vllm_version()
    if not is_supported(found):
        from vllm_specblock.engine.config import unsupported

        unsupported.refuse(found)
        return
    from vllm_specblock.engine.config import registration

    registration.register()
    if "cpu" in found:
        from vllm_specblock.cpu import runner

        runner.register()
        if _runner_is_wanted():
            runner.prepare()


def prepare_cpu() -> None:
    """Let Model Runner V2 find Triton on a CPU build, if all engines are to have that runner.

    A platform plugin runs before vLLM looks for Triton. Returns None: "not my platform".
    """
    found = _vllm_version()
    if "cpu" in found and _runner_is_wanted() and is_supported(found):
        from vllm_specblock.triton_interpreter import enable

        enable()


def _runner_is_wanted() -> bool:
    return os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
