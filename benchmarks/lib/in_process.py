"""vLLM engines within the benchmark's own process; import this before vLLM."""

from __future__ import annotations

import os
from typing import Any

ENV = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
for name, value in ENV.items():
    os.environ.setdefault(name, value)


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
