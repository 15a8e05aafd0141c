"""The whole contract, held against a folder of vLLM's sources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vllm_specblock.engine.contract.hook import Hook
from vllm_specblock.engine.contract.hooks_of_cpus import ON_A_CPU
from vllm_specblock.engine.contract.hooks_of_engines import OF_ENGINES
from vllm_specblock.engine.contract.hooks_of_steps import OF_STEPS
from vllm_specblock.engine.contract.imports import our_imports, replaced_kernels
from vllm_specblock.engine.contract.sources import Sources


@dataclass(frozen=True)
class Broken:
    """A hook that is not as it has to be, and what is otherwise."""

    hook: Hook
    trouble: str

    def __str__(self) -> str:
        where = f" ({self.hook.file})" if self.hook.file else ""
        return f"engine/{self.hook.user}: {self.trouble}{where}"


@cache
def hooks() -> tuple[Hook, ...]:
    """All that `engine/` leans on."""
    return (*OF_ENGINES, *OF_STEPS, *ON_A_CPU, *replaced_kernels(), *our_imports())


def broken(root: Path) -> Iterator[Broken]:
    """Those that do not hold.

    Args:
        root: the folder `vllm` of an installation, or of a wheel that was unpacked.
    """
    sources = Sources(root)
    for hook in hooks():
        trouble = hook.trouble(sources)
        if trouble is not None:
            yield Broken(hook, trouble)
