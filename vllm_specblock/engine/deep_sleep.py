"""Sleep that gives weights away, which draft trees would not wake from.

vLLM's `sleep(level=2)` discards what was allocated while the model was loaded, and keeps its named
buffers. Trees that wait to be verified, what drafters have learned and the drafters' folded weights
are none, and no reload brings them back.
"""

from __future__ import annotations

from vllm_specblock.engine.config.ours import is_ours
from vllm_specblock.engine.patches import Function, patch


def install() -> None:
    """P5: the worker refuses level 2 for engines of ours; level 1 keeps all. Idempotent."""
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
