"""vLLM's warm-up requests, which must not be recorded.

A GPU worker serves them first, by the same calls as any other, so that kernels are compiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_specblock.engine.patches import Function, patch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker


def install() -> None:
    """Record no request while an engine of ours warms up. Idempotent."""
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
