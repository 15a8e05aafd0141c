"""Refuse sleep level 2: it discards weights that the drafter cannot reload.

vLLM's `sleep(level=2)` keeps named buffers only. Unverified trees, learned statistics and the
drafters' folded weights are none.
"""

from __future__ import annotations

from vllm_specblock.engine.config.ours import is_ours
from vllm_specblock.engine.patches import Function, patch


def install() -> None:
    """Refuse sleep level 2 for our engines. Idempotent."""
    from vllm.v1.worker.gpu_worker import Worker

    def make(original: Function) -> Function:
        def sleep(self: Worker, level: int = 1) -> None:
            if level >= 2 and is_ours(self.vllm_config.speculative_config):
                raise ValueError(
                    f"SpecBlock does not support sleep(level={level}), which discards a drafter's "
                    "weights and the trees' buffers: take level 1, or a new engine."
                )
            original(self, level)

        return sleep

    patch(Worker, "sleep", make)
