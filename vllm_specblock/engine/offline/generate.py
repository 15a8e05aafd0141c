"""Offline generation of the target's answers, through vLLM."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams, envs
from vllm.platforms import current_platform

from vllm_specblock.train.config import TrainError


class VllmAnswerer:
    """A vLLM engine that answers token prompts; `train.answering.Answerer`.

    Args:
        max_length: most tokens of a prompt and its answer.
        engine: further arguments of vLLM's `LLM`, such as `gpu_memory_utilization`.

    Raises:
        TrainError: vLLM does not take these options.
    """

    def __init__(
        self,
        target: Path,
        *,
        max_length: int,
        dtype: str = "auto",
        top_p: float = 1.0,
        seed: int = 0,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        self.top_p = top_p
        settings = {"model": str(target), "max_model_len": max_length, "dtype": dtype, "seed": seed}
        # After a chunk of a prompt, vLLM's first model runner rewinds a seeded request's generator,
        # which a CPU's generator cannot do.
        if current_platform.is_cpu() and envs.VLLM_USE_V2_MODEL_RUNNER is not True:
            settings["enable_chunked_prefill"] = False
        self.llm = start(settings | dict(engine or {}))

    def generate(
        self,
        prompts: list[list[int]],
        temperatures: list[float],
        max_tokens: list[int],
        seeds: list[int],
    ) -> list[list[int]]:
        """Answers as token ids, with the end token where one was generated."""
        params = [
            SamplingParams(
                temperature=temperature,
                top_p=self.top_p,
                max_tokens=most,
                seed=seed,
                detokenize=False,
            )
            for temperature, most, seed in zip(temperatures, max_tokens, seeds)
        ]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def forget(self) -> None:
        """Drop the cached prefixes: a restarted run has none either."""
        self.llm.reset_prefix_cache()


def start(settings: Mapping[str, Any]) -> LLM:
    """Start an engine; raises TrainError where vLLM does not take these arguments of `LLM`."""
    # An engine in a process of its own outlives a killed parent and keeps its memory, and requests
    # reach it at uneven times, so that no two runs compute the same batches.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        return LLM(**settings)
    except (TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise TrainError(f"vLLM cannot run the target {settings['model']}: {reason}") from error
