"""Mix prompts from several files, shuffled, without overlong ones.

    python examples/smollm2/prompts.py --count 12000 --out PROMPTS.jsonl FILE [FILE ...]

Files hold a `{"prompt": …}` in each line, plain or gzip. Each gives the same share, or what
`SHARES` says, until it has no more: large collections of one kind would drown the others.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path

SHARES = {
    "gsm8k_train": 3,
    "math_word_problems": 2,
    "cnn_dm_val_summarize": 3,
    "python_completion": 3,
    "mbpp": 2,
    "dolly_instructions": 3,
    "chatbot_arena_prompts": 2,
    "oasst_prompts": 2,
    "nq_train_questions": 2,
    "triviaqa_dev_questions": 0.5,
    "webquestions": 0.5,
    "boolq_passages": 0.5,
    "stackexchange_posts": 0.5,
    "scitldr_summarize": 0.5,
}
"""Shares of files, 1 for those that are not named: mathematics, code, chat and summaries have few
files and many users."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=12_000, help="prompts in all")
    parser.add_argument("--longest", type=int, default=3_000, help="characters of a prompt")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    prompts = mix(options.files, options.count, options.longest, options.seed)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", encoding="utf-8") as file:
        for prompt, source in prompts:
            print(json.dumps({"prompt": prompt, "file": source}, ensure_ascii=False), file=file)
    print(f"{len(prompts):,} prompts of {len(options.files)} files are in {options.out}")


def mix(files: list[Path], count: int, longest: int, seed: int) -> list[tuple[str, str]]:
    """(prompt, file's name) of up to `count` prompts of at most `longest` characters."""
    draw = random.Random(seed)
    left = {}
    for path in sorted(files):
        name = path.name.split(".")[0]
        left[name] = [prompt for prompt in read(path) if 0 < len(prompt) <= longest]
        draw.shuffle(left[name])
    whole = sum(SHARES.get(name, 1) for name in left)
    taken: list[tuple[str, str]] = []
    for name, prompts in left.items():
        share = round(count * SHARES.get(name, 1) / whole)
        taken += [(prompt, name) for prompt in prompts[:share]]
    draw.shuffle(taken)
    return taken


def read(path: Path) -> Iterator[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["prompt"]


if __name__ == "__main__":
    main()
