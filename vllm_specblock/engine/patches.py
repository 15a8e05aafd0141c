"""Patches of vLLM: each callable once, and the original kept.

vLLM has registries for draft architectures, model configs and attention backends. What it has no
registry for is patched; every call that is not about SpecBlock goes to the original.

At start-up (`registration.py`):
    EngineArgs.create_speculative_config: "method" is a Literal, until methods can be registered.
    arg_utils.maybe_override_with_speculators: a checkpoint's method overrules the user's.
    spec_decode.init_speculator: an if-chain over vLLM's own, until they can be registered.
    SamplingParams._validate_spec_decode: refuses min_p and logit_bias with any speculation; with
        trees they are exact. It also checks `specblock_draft`.
    SchedulerConfig.get_scheduler_cls: it does not know what drafts; see `scheduler.py`.
With the first engine of ours in a frontend (`metrics/stop_strings.py`):
    OutputProcessor.process_outputs: counts tokens behind a stop string that it then drops.
At start-up on a CPU (`cpu/install.py`, `cpu/compile_cache.py`, `cpu/sleeping_waits.py`):
    kernels of Model Runner V2, block tables, top-k/top-p: have no form for a CPU.
    CpuPlatform.get_attn_backend_cls: answers CPU_ATTN whatever was asked for.
    torch.compiler.load_compiled_function: a compiled model is not found again on a CPU.
    SpinCondition: waiting processes take the cores that the model needs.
With the first engine on a CPU (`cpu/warm_up.py`):
    warmup_kernels: made-up requests, so that Triton compiles what is interpreted there.
With the first engine on a CPU that takes LoRA adapters (`cpu/lora.py`):
    bgmv_shrink, bgmv_expand, bgmv_expand_slice: take −1, no adapter, for the last one.
With the first engine whose budgets adapt (`budget.py`, on a CPU `host_budget.py`):
    AdaptiveVerificationManager: built by its name, until a speculator can bring its own.
    GPUModelRunner.sample_tokens: its output does not name requests without new drafts.
    resolve_adaptive_cudagraph_mode: takes CUDA graphs for granted, on a CPU, too.
    CPUWorker.compile_or_warm_up_model: measures steps when all is ready, as a GPU's worker does.
With the first engine that may sleep (`deep_sleep.py`):
    Worker.sleep: level 2 would discard what trees need.
With every engine of ours, and in `specblock features` (`target_model.py`):
    BaseModelLoader.create_model: the last place before weights are loaded that knows the layers.
    attn_utils.add_kv_sharing_layers_to_kv_cache_groups: leaves a sharing layer without a spec.
With every engine of ours (`draft_updates.py`):
    Worker.start_draft_weight_update, supports_draft_weight_updates: they load into a drafter's
        parameters, which a folded drafter has not.
With the first engine that learns (`made_up_requests.py`):
    Worker.compile_or_warm_up_model: what a GPU's worker serves there is recorded of nobody.
In `specblock features` (`extract.py`):
    ExtractHiddenStatesSpeculator.propose: the state after the final norm is kept, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

Function = Callable[..., Any]

PATCHES: dict[str, Function] = {}
"""Patched name → the original callable."""


def patch(owner: Any, name: str, make: Callable[[Function], Function]) -> None:
    """Replace `owner.name` by `make(original)`, once."""
    label = f"{getattr(owner, '__module__', '')}.{owner.__name__}.{name}".lstrip(".")
    if label in PATCHES:
        return
    original = getattr(owner, name)
    PATCHES[label] = original
    replacement: Any = wraps(original)(make(original))
    if isinstance(inspect.getattr_static(owner, name), classmethod):
        replacement = classmethod(replacement)
    setattr(owner, name, replacement)
