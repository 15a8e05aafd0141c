"""All findings, in the order in which an engine would meet them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_specblock.engine.doctor.finding import Finding, as_line, wrong
from vllm_specblock.engine.doctor.hooks import hooks
from vllm_specblock.engine.doctor.kernels import kernels
from vllm_specblock.engine.doctor.versions import versions


def examine(target: str | None, given: dict[str, Any] | None) -> Iterator[Finding]:
    """One after the other, as they are found.

    What imports vLLM comes last, and only where what came before lets it.

    Args:
        target: a folder or a hub id.
        given: a `speculative_config`; None: no drafter is asked about.
    """
    begun = True
    for finding in (*versions(), hooks()):
        yield finding
        begun = begun and (finding.verdict != "wrong" or finding.name == "vllm-specblock")
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
