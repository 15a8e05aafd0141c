"""What `vllm bench serve` is asked, and what is kept and shown of its results."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.results_store import ROOT, markdown_table
from vllm_specblock.engine.metrics.acceptance import acceptance_length

KEPT = [
    "completed",
    "failed",
    "duration",
    "total_output_tokens",
    "output_throughput",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "mean_itl_ms",
    "p99_itl_ms",
    "spec_decode_acceptance_length",
    "spec_decode_acceptance_rate",
    "spec_decode_num_drafts",
    "spec_decode_draft_tokens",
    "spec_decode_accepted_tokens",
]
"""Of what vLLM's client writes; plain vLLM has nothing of speculation."""


@dataclass(frozen=True)
class Load:
    """What all engines are asked.

    Attributes:
        prompts: file in ShareGPT's layout.
        tokens: generated per request, none less.
        temperature: 0 is greedy.
        chat: prompts are a user's turns; else text to go on with.
        least, per_slot: requests of a turn: so many for each that is served at a time, at least.
    """

    prompts: Path
    tokens: int
    temperature: float
    chat: bool
    least: int
    per_slot: int

    def requests(self, at_once: int) -> int:
        return max(self.least, self.per_slot * at_once)

    def arguments(self, port: int, at_once: int, result: Path, warm: bool) -> list[str]:
        """Of `vllm bench serve`; `warm`: the server has had so many at a time before."""
        chat = ("openai-chat", "chat/completions")
        backend, path = chat if self.chat else ("openai", "completions")
        return [
            *("--backend", backend, "--endpoint", f"/v1/{path}"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dataset-name", "sharegpt", "--dataset-path", str(self.prompts)),
            *("--sharegpt-output-len", str(self.tokens), "--ignore-eos"),
            *("--temperature", str(self.temperature), "--seed", "0"),
            *("--max-concurrency", str(at_once), "--num-prompts", str(self.requests(at_once))),
            # The first requests of a batch size allocate and compile.
            *("--num-warmups", "0" if warm else str(at_once)),
            *("--disable-tqdm", "--save-result"),
            *("--result-dir", str(result.parent), "--result-filename", result.name),
        ]


def write_prompts(given: Path | None, out: Path) -> Path:
    """Prompts in ShareGPT's layout, which vLLM's client reads without further packages.

    Args:
        given: lines of {"prompt": …} or {"turns": [first, …]}; None: beginnings of held-out files
            of the example pair's corpus, which are Python.

    Raises:
        SystemExit: a line is neither.
    """
    if given is None:
        sys.path.insert(0, str(ROOT / "examples/tiny_pair"))
        import corpus

        texts = corpus.prompts(corpus.load().held_out, 64)
    else:
        lines = [json.loads(line) for line in given.read_text("utf-8").splitlines() if line.strip()]
        texts = [line.get("prompt") or (line.get("turns") or [None])[0] for line in lines]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise SystemExit(
                f'{given} must have lines like {{"prompt": "Say a."}} or {{"turns": ["Say a."]}}.'
            )
    # Its second turn is only looked at for its length, and ours is reported.
    chats = [{"conversations": [{"value": text}, {"value": "-"}]} for text in texts]
    path = out / "prompts.json"
    path.write_text(json.dumps(chats, ensure_ascii=False), encoding="utf-8")
    return path


def key_of(engine: str, at_once: int, number: int) -> str:
    return f"{engine}, {at_once} at a time, round {number}"


def kept(result: Mapping[str, Any], requests: int, key: str) -> dict[str, Any]:
    """What is stored of a client's result.

    Raises:
        SystemExit: a request was not answered.
    """
    if result["failed"] or result["completed"] != requests:
        raise SystemExit(f"{key}: {result['completed']} of {requests} requests were answered.")
    return {name: result[name] for name in KEPT if name in result}


def table(
    results: Mapping[str, Mapping[str, Any]],
    engines: Sequence[str],
    at_once: Sequence[int],
    rounds: int,
) -> str:
    """A row per number of requests at a time and engine; medians over rounds.

    × plain: of output tokens/s over the first engine's in the same round. ITL is the time between
    two parts of a stream, and the tokens of a tree come in one. Acceptance length: τ, over all
    decode steps. Share drafted: of these steps, those that verified a tree.
    """
    head = ["at a time", "engine", "output tokens/s", "× plain", "TTFT ms", "TPOT ms", "ITL ms"]
    rows = [[*head, "p99 ITL ms", "acceptance length", "share drafted"]]
    for count in at_once:
        plain = [results.get(key_of(engines[0], count, number)) for number in range(rounds)]
        for name in engines:
            mine = [results.get(key_of(name, count, number)) for number in range(rounds)]
            if any(mine):
                rows.append([str(count), name, *_cells(mine, plain)])
    return markdown_table(rows)


def _cells(
    rounds: Sequence[Mapping[str, Any] | None], plain: Sequence[Mapping[str, Any] | None]
) -> list[str]:
    """Of one row, after its name; None: not measured."""
    pairs = [(mine, base) for mine, base in zip(rounds, plain) if mine is not None]
    found = [mine for mine, _ in pairs]
    over = [mine["output_throughput"] / base["output_throughput"] for mine, base in pairs if base]

    def median(name: str) -> float:
        return statistics.median(each[name] for each in found)

    cells = [f"{median('output_throughput'):.1f}"]
    cells += [f"{statistics.median(over):.2f}" if over else "–"]
    times = ("mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "p99_itl_ms")
    cells += [f"{median(name):.1f}" for name in times]
    if not all(each.get("spec_decode_num_drafts") for each in found):
        return [*cells, "–", "–"]
    tau = statistics.median(map(tau_of, found))
    share = statistics.median(each["spec_decode_num_drafts"] / decode_steps(each) for each in found)
    return [*cells, f"{tau:.2f}", f"{share:.0%}"]


def decode_steps(result: Mapping[str, Any]) -> int:
    """Decode steps of all requests: each gives its accepted nodes and one token more."""
    tokens = result["total_output_tokens"] - result["completed"]
    # Older recordings count accepted nodes behind a request's end.
    return max(result["spec_decode_num_drafts"], tokens - result["spec_decode_accepted_tokens"])


def tau_of(result: Mapping[str, Any]) -> float:
    return acceptance_length(
        result["total_output_tokens"], result["completed"], decode_steps(result)
    )
