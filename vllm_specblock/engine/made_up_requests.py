"""vLLM's warm-up requests, which nobody learns from.

A GPU's worker serves some before all others, so that kernels are compiled, by the same calls as
any. They are in no user's words, and a drafter that learned them would learn nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_specblock.engine.patches import Function, patch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker


def install() -> None:
    """While an engine of ours warms up, nobody is recorded. Idempotent."""
    from vllm.v1.worker.gpu_worker import Worker as worker

    def make(original: Function) -> Function:
        def compile_or_warm_up_model(self: Worker, *args: Any, **kwargs: Any) -> Any:
            speculator = getattr(self.model_runner, "speculator", None)
            recorder = getattr(speculator, "recorder", None)
            if recorder is None:
                return original(self, *args, **kwargs)
            recorder.warming_up = True
            try:
                return original(self, *args, **kwargs)
            finally:
                recorder.warming_up = False

        return compile_or_warm_up_model

    patch(worker, "compile_or_warm_up_model", make)
