"""Refuse vLLM's draft weight updates: they replace parameters that a folded drafter lacks.

Where a drafter adapts, its trainer would also put its own version back.
"""

from __future__ import annotations

from typing import Any

from vllm_specblock.engine.config.ours import is_ours
from vllm_specblock.engine.patches import patch


def install() -> None:
    """Refuse draft weight updates in workers of our engines. Idempotent."""
    from vllm.v1.worker.gpu_worker import Worker

    def supports(original: Any) -> Any:
        def supports_draft_weight_updates(self: Any) -> bool:
            return not is_ours(self.vllm_config.speculative_config) and original(self)

        return supports_draft_weight_updates

    def start(original: Any) -> Any:
        def start_draft_weight_update(self: Any) -> None:
            if is_ours(self.vllm_config.speculative_config):
                raise ValueError(
                    "SpecBlock does not support start_draft_weight_update, since its drafters "
                    "serve with folded weights: let one learn with speculative_config key 'adapt', "
                    "or choose a version with specblock adapt use."
                )
            original(self)

        return start_draft_weight_update

    patch(Worker, "supports_draft_weight_updates", supports)
    patch(Worker, "start_draft_weight_update", start)
