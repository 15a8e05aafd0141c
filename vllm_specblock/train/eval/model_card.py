"""Model card: the README.md of a trained drafter's folder."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from vllm_specblock.train import provenance
from vllm_specblock.train.data.shards import write_text

FILE = "README.md"
MARK = "<!-- Written by the trainer at each save. Take this line away, and it is left alone. -->"


def write(folder: Path, facts: dict[str, Any], tau: float | None) -> None:
    """Write provenance and card beside a checkpoint; keep a card that the user changed.

    Args:
        facts: for `provenance.write`; the card shows some.
        tau: mean tokens per step along the held-out texts with these weights; None: unknown.
    """
    provenance.write(folder, facts)
    path = folder / FILE
    if not path.exists() or MARK in path.read_text(encoding="utf-8"):
        write_text(path, card(facts, tau))


def card(facts: dict[str, Any], tau: float | None) -> str:
    """The text, in Markdown; see `write`."""
    options = facts["options"]
    target = options["target_name"] or Path(options["target"]).name
    rows = "\n".join(f"| {name} | {value} |" for name, value in _rows(facts, target, tau))
    # The base model is a string of JSON, which YAML reads.
    return f"""---
base_model: {json.dumps(target, ensure_ascii=False)}
library_name: vllm
tags: [speculative-decoding, specblock]
---
{MARK}

# A drafter for {target}

It drafts trees of tokens that the target verifies; the output is the target's own.

| | |
| --- | --- |
{rows}

## Serve it

With the plugin `vllm_specblock` installed beside vLLM, FOLDER being this one:

```bash
vllm serve {shlex.quote(target)} --speculative-config \\
  '{{"method": "specblock", "model": "FOLDER"}}'
```
"""


def _rows(facts: dict[str, Any], target: str, tau: float | None) -> list[tuple[str, str]]:
    options = facts["options"]
    reached = "not measured: train with --hold-out, or run `specblock eval`"
    if tau is not None:
        reached = f"{tau:.2f} tokens per step, replayed along {options['hold_out']} held-out texts"
    update = f"{options['batch']} windows × {options['length']} tokens"
    rows = [
        ("target", target),
        ("data", f"{Path(options['data']).name}, fingerprint `{facts['data']}`"),
        ("updates", f"{facts['step']:,} of {update}"),
        ("trained on", f"{facts['device']}, {facts['ranks']} at a time, {facts['seconds']:.0f} s"),
        ("τ", reached),
    ]
    if options.get("init"):
        rows.append(("started from", Path(options["init"]).name))
    return [*rows, ("how it was made", "`provenance.json`")]
