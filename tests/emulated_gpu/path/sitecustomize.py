"""Install the emulated GPU into each Python process that `run.py` starts."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys

FOLLOWERS = {
    "torch": "emulated_gpu.operators",
    "triton.runtime.interpreter": "emulated_gpu.triton_launches",
    "vllm._custom_ops": "emulated_gpu.vllm_operators",
    "vllm.model_executor.layers.logits_processor": "emulated_gpu.vllm_operators",
    "vllm.vllm_flash_attn.flash_attn_interface": "emulated_gpu.vllm_operators",
    "vllm.v1.sample.ops.topk_topp_sampler": "emulated_gpu.vllm_operators",
    "vllm.v1.worker.gpu.spec_decode.adaptive_verification": "emulated_gpu.vllm_operators",
}
"""The module whose `install` runs after each of these is imported."""


class Finder(importlib.abc.MetaPathFinder):
    """Call `install` once the module that it changes is complete."""

    def __init__(self) -> None:
        self.searching: set[str] = set()

    def find_spec(self, name, path=None, target=None):
        if name not in FOLLOWERS or name in self.searching:
            return None
        self.searching.add(name)
        spec = importlib.util.find_spec(name)
        self.searching.discard(name)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            importlib.import_module(FOLLOWERS[name]).install()

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("EMULATED_GPU") == "1":
    sys.meta_path.insert(0, Finder())
