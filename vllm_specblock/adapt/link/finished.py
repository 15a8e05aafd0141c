"""Finished requests as safetensors files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open
from safetensors.torch import save_file

from vllm_specblock.adapt.book import Record
from vllm_specblock.adapt.policy.interface import FinishedRequest

_TENSORS = ("states", "last", "tokens", "labels")


class Finished(NamedTuple):
    """A finished request, or a part of one. record None: it was not recorded; request None: it
    continues in another record."""

    record: Record | None
    request: FinishedRequest | None

    def save(self, path: Path) -> None:
        """Write a file that `load` reads."""
        tensors, facts = {}, {}
        if self.record is not None:
            tensors = {name: getattr(self.record, name).contiguous() for name in _TENSORS}
            facts["record"] = {"request": self.record.request, "tau": self.record.tau}
        if self.request is not None:
            facts["request"] = asdict(self.request)
        save_file(tensors, path, {"facts": json.dumps(facts)})

    @classmethod
    def load(cls, path: Path) -> Finished:
        """Read a file.

        Raises:
            FileNotFoundError: there is no file.
            SafetensorError, ValueError, KeyError, TypeError: it holds no finished request.
        """
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["facts"])
            # Copies, so that the book's bound counts them and the file is freed.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        record, request = facts.get("record"), facts.get("request")
        return cls(
            None if record is None else Record(**record, **tensors),
            None if request is None else FinishedRequest(**request),
        )
