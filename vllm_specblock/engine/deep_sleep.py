"""Refuse level-2 sleep, which discards weights that a drafter cannot reload.

`sleep(level=2)` keeps named buffers only: unverified trees, learned statistics and folded weights
are none.
"""

from __future__ import annotations

from vllm_specblock.engine.config.ours import is_ours
from vllm_specblock.engine.patches import Function, replaces


def install() -> None:
    """Refuse it in workers of our engines. Idempotent."""
    from vllm.v1.worker.gpu_worker import Worker

    @replaces(Worker, "sleep")
    def sleep(original: Function, self: Worker, level: int = 1) -> None:
        if level >= 2 and is_ours(self.vllm_config.speculative_config):
            raise ValueError(
                f"SpecBlock does not support sleep(level={level}), which discards a drafter's "
                "weights and the trees' buffers: take level 1, or a new engine."
            )
        original(self, level)
