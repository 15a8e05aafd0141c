"""Model Runner V2 on a CPU, for engines that use SpecBlock.

That runner needs Triton, and vLLM checks for Triton when it is imported. `prepare` enables it for
the first engine that uses SpecBlock; other engines keep their runner.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_specblock.config import OptionError
from vllm_specblock.cpu import triton_interpreter
from vllm_specblock.engine.config.ours import WHEN_ASKED, is_ours
from vllm_specblock.engine.patches import Function, replaces

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

WORKER = f"{__name__}.CPUWorker"
_RUNNER = "vllm.v1.worker.gpu.model_runner"


def register() -> None:
    """Patch vLLM's choice of the runner, without loading one."""
    if choose not in WHEN_ASKED:
        WHEN_ASKED.append(choose)
    from vllm import envs
    from vllm.config import VllmConfig
    from vllm.config import vllm as config

    @replaces(VllmConfig, "use_v2_model_runner")
    def use_v2_model_runner(original: Function, self: VllmConfig) -> bool:
        if envs.VLLM_USE_V2_MODEL_RUNNER is None and is_ours(self.speculative_config):
            prepare()
            return True
        return original(self)

    @replaces(VllmConfig, "_validate_v2_model_runner")
    def _validate_v2_model_runner(original: Function, self: VllmConfig) -> None:
        from vllm import triton_utils

        # The copy there is what other engines keep their runner by.
        before, config.HAS_TRITON = config.HAS_TRITON, triton_utils.HAS_TRITON
        try:
            original(self)
        finally:
            config.HAS_TRITON = before


def __getattr__(name: str) -> Any:
    """Return vLLM's worker by `WORKER`, in a process that can run Model Runner V2."""
    if name != "CPUWorker":
        raise AttributeError(name)
    prepare()
    from vllm.v1.worker.cpu_worker import CPUWorker

    return CPUWorker


def choose(parallel: ParallelConfig) -> None:
    """Prepare this process, and by their class the workers, for an engine that uses SpecBlock."""
    prepare()
    if parallel.worker_cls == "auto":
        parallel.worker_cls = WORKER


def prepare() -> None:
    """Let this process run Model Runner V2; OptionError: it has loaded it without Triton."""
    from vllm import envs, triton_utils

    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        return  # refused with the other options
    if not triton_utils.HAS_TRITON:
        if _RUNNER in sys.modules:
            raise OptionError(
                "An engine of this process has loaded vLLM's runner without Triton: create the one "
                "with 'specblock' first, or set VLLM_USE_V2_MODEL_RUNNER=1 before Python starts."
            )
        from vllm.platforms import current_platform

        # vLLM replaces the first runner's kernels only while there is no Triton.
        with hidden("llvmlite"):
            current_platform.register_triton_kernel_overrides()
        triton_interpreter.enable()
        importlib.reload(triton_utils.importing)
        importlib.reload(triton_utils)
    from vllm_specblock.cpu import install

    install.install()


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Hide a package from `sys.modules` within this context.

    vLLM searches every module for copies of a kernel, and fails on the library handle of Numba's
    llvmlite, which resolves any attribute name.
    """
    found = {name: module for name, module in sys.modules.items() if name.split(".")[0] == package}
    for name in found:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(found)
