"""Hooks: whether all that the plugin leans on is in the vLLM that is installed."""

from __future__ import annotations

from vllm_specblock.engine.compat import broken, installed
from vllm_specblock.engine.compat import hooks as all_hooks
from vllm_specblock.engine.doctor.finding import Finding, wrong

_SHOWN = 3


def hooks() -> Finding:
    """Read from its sources; none of them is run."""
    root = installed()
    if root is None:
        return wrong("hooks", "nothing to look at", "Install vLLM.")
    count, found = len(all_hooks()), list(broken(root))
    if not found:
        return Finding("hooks", f"{count} of {count} are in vLLM as they have to be")
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return wrong(
        "hooks",
        f"{len(found)} of {count} are not: {'; '.join(found[:_SHOWN])}{more}",
        "Install vLLM and the plugin anew, in versions that go together: this one was changed, or "
        "is of another release.",
    )
