"""Refuse calls of vLLM's worker that discard or replace weights that a drafter cannot reload.

`sleep(level=2)` keeps named buffers only: unverified trees, learned statistics and folded weights
are none. Draft weight updates replace parameters that a folded drafter lacks; where a drafter
adapts, its trainer would also put its own version back.
"""

from __future__ import annotations

from vllm_specblock.engine.config.ours import is_ours
from vllm_specblock.engine.patches import Function, replaces


def install() -> None:
    """Refuse the calls in workers of our engines. Idempotent."""
    from vllm.v1.worker.gpu_worker import Worker

    @replaces(Worker, "sleep")
    def sleep(original: Function, self: Worker, level: int = 1) -> None:
        if level >= 2 and is_ours(self.vllm_config.speculative_config):
            raise ValueError(
                f"SpecBlock does not support sleep(level={level}), which discards a drafter's "
                "weights and the trees' buffers: take level 1, or a new engine."
            )
        original(self, level)

    @replaces(Worker, "supports_draft_weight_updates")
    def supports_draft_weight_updates(original: Function, self: Worker) -> bool:
        return not is_ours(self.vllm_config.speculative_config) and original(self)

    @replaces(Worker, "start_draft_weight_update")
    def start_draft_weight_update(original: Function, self: Worker) -> None:
        if is_ours(self.vllm_config.speculative_config):
            raise ValueError(
                "SpecBlock does not support start_draft_weight_update, since its drafters serve "
                "with folded weights: let one learn with speculative_config key 'adapt', or choose "
                "a version with specblock adapt use."
            )
        original(self)
