"""What keeps an engine from drafting, or would, in the order in which it would meet it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_specblock.engine.doctor.installation import (
    OURS,
    Finding,
    as_line,
    hooks,
    kernels,
    versions,
    wrong,
)


def examine(target: str | None, given: dict[str, Any] | None) -> Iterator[Finding]:
    """Yield findings; vLLM is imported last, and only if nothing before speaks against it.

    Args:
        target: a folder or a hub id.
        given: a `speculative_config`; None: no drafter is examined.
    """
    begun = True
    for finding in (*versions(), hooks()):
        yield finding
        begun = begun and (finding.verdict != "wrong" or finding.name == OURS)
    if not begun:
        if target is not None or given is not None:
            yield wrong("target, drafter", "not looked at", "See to what is wrong above first.")
        return
    yield kernels()
    try:
        from vllm_specblock.engine.doctor.pair import pair, runner
    except Exception as error:  # an installation can be broken in any way
        yield wrong("runner", f"vLLM cannot be imported: {as_line(error)}", "Install it anew.")
        return
    yield runner()
    yield from pair(target, given)
