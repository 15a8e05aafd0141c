"""vLLM's update of a draft model by its own loader, which drafters that serve cannot take.

`start_draft_weight_update` … `finish_weight_update` replace parameters layer by layer through
`load_weights`. A serving SpecBlock drafter is folded, shortened or packed, and where it adapts its
trainer would put its own version back.
"""

from __future__ import annotations

from typing import Any

from vllm_specblock.engine.config.ours import is_ours
from vllm_specblock.engine.patches import patch


def install() -> None:
    """P6: the worker refuses draft weight updates for engines of ours. Idempotent."""
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
