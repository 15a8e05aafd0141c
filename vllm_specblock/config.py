"""SpecBlockConfig: every option of ours, its default, and the sentence for a wrong one.

The keys stand beside vLLM's own in `speculative_config`. Nothing here imports vLLM; what must
be held against the target is in `engine/arguments.py`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_specblock.tree import MAX_NODES

METHOD = "specblock"
"""The value of `speculative_config["method"]` that asks for this plugin."""

DEFAULT_NODES = 60
"""Draft nodes per request and step when `num_speculative_tokens` is not given (paper, §4.1)."""

VLLM_KEYS = frozenset(
    {
        "method",
        "model",
        "revision",
        "num_speculative_tokens",
        "num_speculative_tokens_per_batch_size",
    }
)
"""Keys of `speculative_config` that vLLM itself reads and that hold with draft trees."""


class OptionError(ValueError):
    """A key of `speculative_config` that cannot be followed; the message is one sentence."""


class SpecBlockConfig(BaseModel):
    """How a SpecBlock drafter grows its tree (paper, §3.2; `K` is fixed by the checkpoint)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    num_blocks: Annotated[int, Field(ge=1, le=8)] = 2
    """M: drafter forwards per step. The deepest path holds M × K draft tokens."""

    num_starts: Annotated[int, Field(ge=1, le=32)] = 8
    """S: nodes from which the next block grows; one is always the chain's end."""

    branching: Annotated[
        list[Annotated[int, Field(ge=0, le=32)]], Field(min_length=4, max_length=4)
    ] = [4, 8, 16, 16]
    """Children to attach per rank bucket (rank 1, 2–4, 5–10, beyond). 0: neither children
    besides the chain's own node nor a start for the next block. The paper's [2, 4, 6, 4] is
    narrower than what a budget of 60 nodes can hold where the target samples."""


def parse_options(given: dict[str, Any]) -> SpecBlockConfig:
    """Our keys of a `speculative_config`, checked.

    Args:
        given: the whole dictionary as the user wrote it; vLLM's own keys are passed over.

    Raises:
        OptionError: an unknown key, a wrong type or a value out of range. One sentence that
            names the key, what was given and what is accepted.
    """
    ours = {key: value for key, value in given.items() if key not in VLLM_KEYS}
    try:
        return SpecBlockConfig(**ours)
    except ValidationError as error:
        raise OptionError(_sentence(error)) from None


def check_num_nodes(value: Any) -> int:
    """`num_speculative_tokens`: the nodes N of one request's tree.

    Raises:
        OptionError: not a whole number in 1 … 256 (the ancestor mask holds 256 nodes).
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_NODES:
        raise OptionError(
            f"speculative_config key 'num_speculative_tokens' is {value!r}, but it must be a "
            f"whole number from 1 to {MAX_NODES} (nodes of one request's draft tree)."
        )
    return value


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    key, *inside = first["loc"]
    where = f"'{key}'" + (f" (entry {inside[0]})" if inside else "")
    if first["type"] == "extra_forbidden":
        known = ", ".join(sorted({*SpecBlockConfig.model_fields, *VLLM_KEYS}))
        return f"speculative_config key {where} is not known; accepted are: {known}."
    expected = first["msg"].removeprefix("Input should be ").removeprefix("List should have ")
    return f"speculative_config key {where} is {first['input']!r}, but must be {expected}."
