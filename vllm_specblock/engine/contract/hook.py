"""Kinds of hooks: a signature, fields, a piece of source, a class method."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from vllm_specblock.engine.contract.sources import NotThere, Part, Sources, squeezed


@dataclass(frozen=True)
class Hook:
    """One thing of vLLM's that a module of ours leans on.

    Attributes:
        name: in vLLM's file, e.g. "Class.method"; "": all of it.
        user: our module, below `engine/`.
        file: vLLM's, below its folder.
    """

    name: str
    user: str = field(default="", kw_only=True)
    file: str = field(default="", kw_only=True)

    def trouble(self, sources: Sources) -> str | None:
        """What is not as it has to be, in a clause; None: nothing."""
        try:
            return self.look(sources.find(self.file, self.name))
        except NotThere as missing:
            return str(missing)

    def look(self, part: Part) -> str | None:
        """`trouble` of what was found; here nothing beyond that it is there."""
        return None


def on(user: str, file: str, *hooks: Hook) -> tuple[Hook, ...]:
    """The hooks of one of our modules on one file of vLLM's."""
    return tuple(replace(hook, user=user, file=file) for hook in hooks)


@dataclass(frozen=True)
class Takes(Hook):
    """A function's parameters, by name.

    Attributes:
        arguments: names with blanks between them.
        how: these and no others; these first; or these in any place.
    """

    arguments: str
    how: Literal["only", "first", "among"] = "only"

    def look(self, part: Part) -> str | None:
        wanted, found = self.arguments.split(), part.arguments
        right = {
            "only": found == wanted,
            "first": found[: len(wanted)] == wanted,
            "among": set(wanted) <= set(found),
        }
        if right[self.how]:
            return None
        if self.how == "among":
            missing = [name for name in wanted if name not in found]
            return f"{self.name} lacks {', '.join(missing)}"
        word = "takes" if self.how == "only" else "begins with"
        return f"{self.name} {word} ({', '.join(found)}), not ({', '.join(wanted)})"


@dataclass(frozen=True)
class Has(Hook):
    """Names that a class defines: its fields, its methods.

    Attributes:
        names: with blanks between them.
    """

    names: str

    def trouble(self, sources: Sources) -> str | None:
        missing = []
        for name in self.names.split():
            try:
                sources.find(self.file, f"{self.name}.{name}" if self.name else name)
            except NotThere:
                missing.append(name)
        return f"{self.name or self.file} has no {', '.join(missing)}" if missing else None


@dataclass(frozen=True)
class Says(Hook):
    """Pieces of source, white space aside.

    Attributes:
        texts: all of them, in this order; or, with `one`, one of them.
    """

    texts: tuple[str, ...]
    one: bool = False

    def look(self, part: Part) -> str | None:
        if self.one:
            if any(squeezed(text) in part.text for text in self.texts):
                return None
            return f"{self.name or self.file} says none of {self.texts}"
        place = 0
        for text in map(squeezed, self.texts):
            place = part.text.find(text, place)
            if place < 0:
                return f"{self.name or self.file} does not say {text!r} where it did"
        return None


@dataclass(frozen=True)
class SaysNot(Hook):
    """A piece of source that must not come."""

    text: str

    def look(self, part: Part) -> str | None:
        found = squeezed(self.text) in part.text
        return f"{self.name or self.file} says {self.text!r} now" if found else None


@dataclass(frozen=True)
class Attributes(Hook):
    """What methods of a class read or write of `self`, in any order."""

    names: str

    def look(self, part: Part) -> str | None:
        missing = [name for name in self.names.split() if f"self.{name}" not in part.text]
        return f"{self.name} has no {', '.join(missing)}" if missing else None


@dataclass(frozen=True)
class IsClassMethod(Hook):
    """A method that is called on the class."""

    def look(self, part: Part) -> str | None:
        names = [getattr(each, "id", "") for each in getattr(part.node, "decorator_list", [])]
        return None if "classmethod" in names else f"{self.name} is no class method"
