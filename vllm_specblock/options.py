"""Base class of all options, and their error messages."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError


class OptionError(ValueError):
    """An invalid key of `speculative_config`; the message is one sentence."""


class TargetError(OptionError):
    """Error for a target that cannot verify a tree."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"The target has {what}, which SpecBlock cannot verify as a tree yet: run it without "
            "speculative_config, or with another method."
        )


class Options(BaseModel):
    """Options model; unknown keys are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )


_Kind = TypeVar("_Kind", bound=Options)


def parse_options(
    model: type[_Kind], given: dict[str, Any], where: str, whose: str, beside: Collection[str] = ()
) -> _Kind:
    """Parse keys as an options model, or raise OptionError.

    The error is one sentence that names the first unknown key, wrong type or value out of range,
    what was given and what is accepted.

    Args:
        where: put before a key in messages; whose: appended to "accepted" in them.
        beside: keys that are allowed, but parsed elsewhere.
    """
    try:
        return model(**given)
    except ValidationError as error:
        first = error.errors()[0]
    if first["type"] == "value_error":
        raise OptionError(f"speculative_config: {where}{first['ctx']['error']}.")
    key, *inside = first["loc"]
    name = f"'{where}{key}'" + (f" (entry {inside[0]})" if inside else "")
    if first["type"] == "extra_forbidden":
        known = ", ".join(sorted({*model.model_fields, *beside}))
        raise OptionError(
            f"speculative_config key {name} is not known; accepted{whose} are: {known}."
        )
    expected = first["msg"].removeprefix("Input should be ").removeprefix("List should have ")
    raise OptionError(
        f"speculative_config key {name} is {first['input']!r}, but must be {expected}."
    )
