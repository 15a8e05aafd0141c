"""What recording takes of an engine's steps: time inside it over the time of the steps.

One engine in this process, which watches; two engines side by side would differ by more than what
is looked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INSIDE = ("begin", "end", "between_steps", "record", "pause")
"""What an engine calls of a recorder."""


@dataclass
class Clock:
    """Adds up how long some calls take, seconds."""

    seconds: float = 0.0
    calls: int = 0

    def timing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began
                self.calls += 1

        return timed


def overhead(
    drafter: Path,
    target: Path,
    prompts: Sequence[list[int]],
    *,
    batch: int,
    nodes: int,
    new_tokens: int,
    dtype: str,
) -> dict[str, float]:
    """Serve some prompts twice, the first time to warm up.

    Args:
        prompts: token ids.
        batch: requests at a time.
        nodes: of every tree.
        new_tokens: of every answer.

    Returns:
        `steps`, `step_ms` and `inside_ms` (means of a step), `share` (inside / steps).
    """
    from vllm import LLM, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    from vllm_specblock.adapt.serving.recorder import Recorder

    inside, steps = Clock(), Clock()
    for name in INSIDE:
        setattr(Recorder, name, inside.timing(getattr(Recorder, name)))
    LLMEngine.step = steps.timing(LLMEngine.step)  # type: ignore[method-assign]
    llm = LLM(
        model=str(target),
        dtype=dtype,
        max_model_len=1024,
        max_num_seqs=batch,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 30,
        speculative_config={
            "method": "specblock",
            "model": str(drafter),
            "num_speculative_tokens": nodes,
            "num_blocks": 1,
            "enable_adaptive_verification": False,
            "adapt": {"policy": "watch"},
        },
    )
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    texts = [{"prompt_token_ids": each} for each in prompts]
    llm.generate(texts, params, use_tqdm=False)
    inside.seconds = steps.seconds = 0.0
    steps.calls = 0
    llm.generate(texts, params, use_tqdm=False)
    return {
        "steps": steps.calls,
        "step_ms": 1e3 * steps.seconds / steps.calls,
        "inside_ms": 1e3 * inside.seconds / steps.calls,
        "share": inside.seconds / steps.seconds,
    }
