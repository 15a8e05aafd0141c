"""Subtract the tokens after a stop string, which vLLM counts before it drops them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_specblock.engine.patches import Function, replaces

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.metrics.stats import IterationStats


def install() -> None:
    """Patch `OutputProcessor.process_outputs`. Idempotent."""
    from vllm.v1.engine.output_processor import OutputProcessor

    @replaces(OutputProcessor, "process_outputs")
    def process_outputs(
        original: Function,
        self: OutputProcessor,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: IterationStats | None = None,
        **more: Any,
    ) -> Any:
        outputs = engine_core_outputs
        counted = sum([len(output.new_token_ids) for output in outputs])
        result = original(self, outputs, engine_core_timestamp, iteration_stats, **more)
        if iteration_stats is not None:
            kept = sum([len(output.new_token_ids) for output in outputs])
            iteration_stats.num_generation_tokens -= counted - kept
        return result
