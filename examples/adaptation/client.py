"""A client that sends different kinds of traffic and reports how the server's drafter adapts.

    python client.py --phase chat=CHAT.jsonl --phase maths=MATHS.jsonl --url http://localhost:8000

Files hold a `{"prompt": …}` in each line, plain or gzip. After every window of requests it prints
τ (tokens per decode step), tokens per second and the adaptation counters, from the server's
/metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from vllm_specblock.engine.metrics.acceptance import REQUESTS, STEPS, TOKENS, acceptance_length

ADAPT = "vllm:specblock_adapt_"
SHOWN = ("updates_heads", "updates_full", "swaps", "rollbacks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--phase", action="append", required=True, type=phase, metavar="NAME=FILE")
    parser.add_argument("--requests", type=int, default=128, help="per phase, at most")
    parser.add_argument("--window", type=int, default=16, help="requests per printed line")
    parser.add_argument("--concurrency", type=int, default=4, help="requests at a time")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between windows")
    parser.add_argument("--max-tokens", type=int, default=128, help="per answer")
    parser.add_argument("--raw", action="store_true", help="prompts are text to continue")
    options = parser.parse_args()
    asyncio.run(serve(options))


def phase(text: str) -> tuple[str, Path]:
    """NAME=FILE.

    Raises:
        argparse.ArgumentTypeError: there is no such file, or no name.
    """
    name, _, path = text.partition("=")
    if not name or not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FILE with an existing file.")
    return name, Path(path)


async def serve(options: argparse.Namespace) -> None:
    client = AsyncOpenAI(base_url=f"{options.url}/v1", api_key="none", max_retries=0, timeout=600)
    model = (await client.models.list()).data[0].id
    free = asyncio.Semaphore(options.concurrency)

    async def ask(prompt: str) -> None:
        async with free:
            if options.raw:
                await client.completions.create(
                    model=model, prompt=prompt, max_tokens=options.max_tokens, temperature=0
                )
            else:
                await client.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": prompt}],
                    max_tokens=options.max_tokens,
                    temperature=0,
                )

    for name, path in options.phase:
        prompts = read(path)[: options.requests]
        for first in range(0, len(prompts), options.window):
            part = prompts[first : first + options.window]
            before, began = Counters.of(options.url), time.monotonic()
            await asyncio.gather(*map(ask, part))
            seconds = time.monotonic() - began
            print(
                line(name, first + len(part), before, Counters.of(options.url), seconds), flush=True
            )
            await asyncio.sleep(options.pause)


@dataclass(frozen=True)
class Counters:
    """Counters of /metrics by name, without the suffix; a histogram gives its count."""

    values: dict[str, float]

    @classmethod
    def of(cls, url: str) -> Counters:
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
            return cls.parsed(answer.read().decode())

    @classmethod
    def parsed(cls, text: str) -> Counters:
        """Sum each counter over its labels."""
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in (f"{family.name}_total", f"{family.name}_count"):
                    values[family.name] = values.get(family.name, 0.0) + sample.value
        return cls(values)

    def __getitem__(self, name: str) -> float:
        return self.values.get(name, 0.0)


def line(name: str, requests: int, before: Counters, after: Counters, seconds: float) -> str:
    """Format one window; `requests` of the phase have been served so far."""
    counts = {name: after[name] - before[name] for name in (TOKENS, REQUESTS, STEPS)}
    tau = f"{acceptance_length(counts):.2f}" if counts[STEPS] else "–"
    speed = counts[TOKENS] / seconds
    learned = ", ".join(f"{after[ADAPT + each]:.0f} {each.replace('_', ' ')}" for each in SHOWN)
    return f"{name:12} {requests:5} requests   τ {tau}   {speed:6.1f} tokens/s   {learned}"


def read(path: Path) -> Sequence[str]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
        return [json.loads(each)["prompt"] for each in file if each.strip()]


if __name__ == "__main__":
    main()
