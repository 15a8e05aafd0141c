"""Train the example target on copy tasks, and write prompts for it.

    python examples/copying/build.py [--help]

Stages, skipped if their result exists: WORK/target, then WORK/prompts.jsonl for the drafter's
training, and WORK/held_out/FORM.jsonl from held-out files. A killed run resumes with the same
options.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoTokenizer, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tiny_pair"))
import corpus
import target as loop
from sizes import SIZES, Size
from stages import Deadline, OutOfTime, Stages
from tasks import FORMS, LONGEST, SHORTEST, draw, piece

EXAMPLE = Path(loop.__file__).parent / "target"
PLAIN_SHARE = 0.15
"""Share of plain code in the texts, so that the target does not forget it."""
HELD_OUT = 16
"""Held-out prompts of each form."""
ENOUGH = 440
"""Least characters of a held-out piece: enough for an answer of 128 tokens."""
CHECKED = 64
"""Held-out tasks of each form for the target's accuracy."""


def plain(texts: list[str], count: int, rng: random.Random) -> list[str]:
    """Draw `count` pieces of `texts`, unchanged."""
    long_enough = [text for text in texts if len(text) > 2 * LONGEST]
    sizes = [len(text) for text in long_enough]
    return [
        piece(text, rng.randint(SHORTEST, LONGEST), rng)
        for text in rng.choices(long_enough, sizes, k=count)
    ]


def lessons(texts: list[str], count: int, rng: random.Random) -> list[str]:
    """Draw `count` shuffled texts: tasks with answers in equal shares of the forms, and code."""
    each = round(count * (1 - PLAIN_SHARE) / len(FORMS))
    found = [t.prompt + t.answer for form in FORMS for t in draw(texts, form, each, rng)]
    found += plain(texts, count - len(found), rng)
    rng.shuffle(found)
    return found


@torch.inference_mode()
def accuracy(folder: Path, texts: list[str]) -> dict[str, float]:
    """Return the share of answer tokens that the target ranks first, by form.

    Args:
        folder: of the target.
        texts: sources of the tasks; the same in every call.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rng, found = random.Random(1), {}
    for form in FORMS:
        right = total = 0
        for task in draw(texts, form, CHECKED, rng):
            first = len(tokenizer(task.prompt, add_special_tokens=False)["input_ids"])
            ids = tokenizer(task.prompt + task.answer, add_special_tokens=False)["input_ids"]
            ids = torch.tensor([ids])
            guess = model(input_ids=ids).logits[0, first - 1 : -1].argmax(-1)
            right += (guess == ids[0, first:]).sum().item()
            total += len(guess)
        found[form] = round(right / total, 4)
    return found


def begin(folder: Path, size: Size) -> None:
    """Write the example target as a state that the training loop of `tiny_pair` resumes."""
    unfinished = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(EXAMPLE, folder, ignore=unfinished, dirs_exist_ok=True)
    model = LlamaForCausalLM.from_pretrained(EXAMPLE, dtype=torch.float32)
    optimizer = loop.optimizer_of(model, size)
    # Update 0 has rate 0; the loop's own schedule sets the later ones.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step, 1))
    loop._save_state(folder / "state.pt", model, optimizer, schedule, 0, 0.0)


def write(path: Path, lines: list[dict]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{len(lines):,} prompts in {path}")


def write_prompts(work: Path, text: corpus.Corpus, count: int, rng: random.Random) -> None:
    """Write the drafter's training prompts, a quarter of them plain code, and the held-out ones."""
    part = count // 4
    asked = plain(text.train, part, rng)
    for form in FORMS:
        asked += [t.prompt for t in draw(text.train, form, (count - part) // len(FORMS), rng)]
    rng.shuffle(asked)
    write(work / "prompts.jsonl", [{"prompt": prompt} for prompt in asked])
    (work / "held_out").mkdir(exist_ok=True)
    for form in FORMS:
        tasks = draw(text.held_out, form, HELD_OUT, rng, shortest=ENOUGH)
        lines = [{"id": index, "turns": [task.prompt]} for index, task in enumerate(tasks)]
        write(work / "held_out" / f"{form}.jsonl", lines)


def main(
    work: Annotated[Path, typer.Option(help="Folder for all results.")] = Path("runs/copying"),
    steps: Annotated[int, typer.Option(help="Updates of the target.")] = 800,
    batch: Annotated[int, typer.Option(help="Windows of one update.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 512,
    lr: Annotated[float, typer.Option(help="Peak learning rate of the target.")] = 1e-3,
    texts: Annotated[int, typer.Option(help="Training texts of the target.")] = 12_000,
    prompts: Annotated[int, typer.Option(help="Training prompts of the drafter.")] = 1200,
    compiled: Annotated[
        bool, typer.Option(help="torch.compile the training (needs a C++ compiler).")
    ] = False,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Save and stop after so many. Default: never.")
    ] = None,
) -> None:
    """Train the target, then write the prompts."""
    text = corpus.load()
    size = replace(SIZES["tiny"], batch=batch, length=length, lr=lr)
    folder, deadline = work / "target", Deadline(minutes)

    def teach() -> dict:
        if not (folder / "state.pt").exists():
            begin(folder, size)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        figures = {"before": accuracy(EXAMPLE, text.held_out)}
        print(figures, flush=True)
        figures |= loop.train_target(
            loop.encode(tokenizer, lessons(text.train, texts, random.Random(0))),
            loop.encode(tokenizer, plain(text.held_out, 200, random.Random(2))),
            tokenizer,
            folder,
            size,
            deadline,
            steps=steps,
            compiled=compiled,
        )
        return figures | {"after": accuracy(folder, text.held_out)}

    options = {"steps": steps, "batch": batch, "length": length, "lr": lr, "texts": texts}
    try:
        print(json.dumps(Stages(work / "stages.json").run("target", options, teach), indent=1))
    except OutOfTime:
        print(f"Saved and stopped after {minutes:g} minutes: call again to resume.")
        return
    write_prompts(work, text, prompts, random.Random(3))


if __name__ == "__main__":
    typer.run(main)
