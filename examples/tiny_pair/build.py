"""Build an example pair from nothing: a small Llama and a SpecBlock drafter for it.

Stages, each of which is left alone once its result is there: tokenizer and target, answers of
the target, drafter, report. Killed and run again with the same options, it goes on; with
`--minutes` a call saves and stops after so many, and asks to be called again.

    python examples/tiny_pair/build.py --help
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import corpus
import lessons
import target as target_stages
import torch
import transformers
import typer
from sizes import SIZES, Size
from stages import Deadline, OutOfTime, Stages
from tqdm import tqdm
from transformers import AutoTokenizer

from vllm_specblock.drafters.options import SpecBlockConfig
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.train.config import TrainConfig, parse
from vllm_specblock.train.eval.evaluate import evaluate, sequences_from, shapes_of
from vllm_specblock.train.run import train
from vllm_specblock.train.target.features import load_target

HERE = Path(__file__).parent
TARGET_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
DRAFTER_FILES = ("config.json", "model.safetensors")


def build(
    size: Annotated[
        Literal["tiny", "100m", "nano"],
        typer.Option(help="Of the pair: for a laptop, for a GPU, for tests. See sizes.py."),
    ] = "tiny",
    work: Annotated[
        Path | None,
        typer.Option(
            help="State and intermediate results; may be deleted afterwards. "
            "Default: runs/tiny_pair or runs/stdlib_SIZE."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Gets target/, drafter/ and figures.json. Default: for the tiny pair this "
            "script's folder, else WORK/pair."
        ),
    ] = None,
    target_steps: Annotated[int | None, typer.Option(help="Updates of the target.")] = None,
    answers: Annotated[
        int | None, typer.Option(help="Answers of the target to learn from.")
    ] = None,
    windows: Annotated[
        int | None, typer.Option(help="Windows of the corpus to learn from.")
    ] = None,
    drafter: Annotated[
        bool, typer.Option(help="Train and judge a drafter, too; else stop before it.")
    ] = True,
    drafter_steps: Annotated[int | None, typer.Option(help="Updates of the drafter.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences of one drafter update.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate of the drafter.")] = None,
    held_out_prompts: Annotated[int, typer.Option(help="Prompts of the report.")] = 24,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    compile_target: Annotated[
        bool, typer.Option(help="torch.compile the target's training (needs a C++ compiler).")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Save and stop after so many. Default: never.")
    ] = None,
) -> None:
    """Build target and drafter, resuming stages that are half done.

    Where an option gives no number, the size does.
    """
    deadline = Deadline(minutes)
    given = {
        "steps": target_steps,
        "answers": answers,
        "windows": windows,
        "drafter_steps": drafter_steps,
        "drafter_batch": batch,
        "drafter_lr": lr,
    }
    chosen = replace(SIZES[size], **{k: v for k, v in given.items() if v is not None})
    work = work or Path("runs/tiny_pair" if size == "tiny" else f"runs/stdlib_{size}")
    out = out or (HERE if size == "tiny" else work / "pair")
    text = corpus.load()
    text = corpus.Corpus(text.train[: chosen.files], text.held_out[: chosen.files])
    target_dir = work / "target"
    stages = Stages(work / "stages.json")

    def target_stage() -> dict:
        if (target_dir / "model.safetensors").exists():
            return json.loads((target_dir / "figures.json").read_text())
        tokenizer = target_stages.train_tokenizer(text.train, target_dir, chosen.vocab_size)
        figures = target_stages.train_target(
            target_stages.encode(tokenizer, text.train),
            target_stages.encode(tokenizer, text.held_out),
            tokenizer,
            target_dir,
            chosen,
            deadline,
            steps=chosen.steps,
            seed=seed,
            device=device,
            compiled=compile_target,
        )
        (target_dir / "figures.json").write_text(json.dumps(figures) + "\n")
        return figures

    def answers_stage() -> dict:
        tokenizer = AutoTokenizer.from_pretrained(target_dir)
        return lessons.write(work, text.train, tokenizer, chosen, device, seed, deadline)

    def prompts_stage() -> dict:
        prompts = corpus.prompts(text.held_out, held_out_prompts)
        corpus.write(work / "prompts.jsonl", prompts)
        return {"prompts": len(prompts)}

    def drafter_stage() -> dict:
        return train_drafter(drafter_config(work, out / "target", chosen, device, seed), deadline)

    target_options = {"size": size, "steps": chosen.steps, "seed": seed}
    data_options = target_options | {"answers": chosen.answers, "windows": chosen.windows}
    drafter_options = data_options | {
        "drafter_steps": chosen.drafter_steps,
        "batch": chosen.drafter_batch,
        "lr": chosen.drafter_lr,
    }
    try:
        figures = {
            "target": stages.run("target", target_options, target_stage),
            "answers": stages.run("answers", data_options, answers_stage),
            "prompts": stages.run("prompts", {"prompts": held_out_prompts}, prompts_stage),
        }
        if not drafter:
            print(json.dumps(figures, indent=1))
            return
        figures["drafter"] = stages.run("drafter", drafter_options, drafter_stage)
    except OutOfTime:
        print(f"Stopped after {minutes:g} minutes, and saved: call again to go on.")
        return
    copy_files(target_dir, out / "target", TARGET_FILES)
    copy_files(work / "drafter", out / "drafter", DRAFTER_FILES)
    figures["report"] = report(out, text.held_out, held_out_prompts, device)
    figures["seconds"] = stages.seconds
    figures["machine"] = {
        "processor": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
    }
    figures["versions"] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    # Without the folders of the machine that built it.
    figures["command"] = shlex.join(["examples/tiny_pair/build.py", *sys.argv[1:]])
    (out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures["report"], indent=1))


def drafter_config(
    work: Path, target_name: Path, size: Size, device: str, seed: int
) -> TrainConfig:
    """The drafter's training, also as `specblock train` would be told."""
    return parse(
        TrainConfig,
        target=work / "target",
        target_name=_from_here(target_name),
        data=work / "drafter_data.safetensors",
        out=work / "drafter",
        draft_vocab_size=size.draft_vocab_size,
        steps=size.drafter_steps,
        batch=size.drafter_batch,
        length=size.window,
        lr=size.drafter_lr,
        rank_from=size.drafter_steps // 5,
        loss_floor=1.0,
        precision="bf16",
        device=device,
        seed=seed,
        save_every=50,
    )


def _from_here(folder: Path) -> str:
    """Return `folder` as vLLM gets it: relative to the repository's root if it lies below."""
    root = HERE.parents[1]
    inside = folder.resolve().is_relative_to(root)
    return str(folder.resolve().relative_to(root) if inside else folder)


def train_drafter(config: TrainConfig, deadline: Deadline) -> dict:
    """Train, or go on, until the end or the deadline; the latter raises `OutOfTime`."""
    deadline.check()
    train(config.model_copy(update={"minutes": deadline.minutes_left()}))
    lines = (config.out / "training" / "log.jsonl").read_text().splitlines()
    log = [json.loads(line) for line in lines]
    if not log or log[-1]["step"] < config.steps:
        raise OutOfTime
    return {"options": config.must_match(), "log": log[::5]}


def copy_files(source: Path, destination: Path, names: tuple[str, ...]) -> None:
    """Copy the files that belong to a model, and not the state that lies beside them."""
    destination.mkdir(parents=True, exist_ok=True)
    for name in names:
        if (source / name).exists():
            shutil.copyfile(source / name, destination / name)


def report(out: Path, held_out: list[str], count: int, device: str, new_tokens: int = 160) -> dict:
    """τ and α on greedy continuations of prompts from files that no stage was trained on."""
    tokenizer = AutoTokenizer.from_pretrained(out / "target")
    model = load_target(out / "target", "fp32", torch.device(device))
    drafter = checkpoint.load(out / "drafter", torch.float32, device)
    prompts = [
        torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        for text in corpus.prompts(held_out, count)
    ]
    sequences = sequences_from(
        model, prompts, new_tokens, layer_ids=drafter.config.target.layer_ids
    )
    sequences = tqdm(sequences, desc="replay", total=len(prompts), unit="prompt")
    options = SpecBlockConfig()
    return evaluate(drafter, sequences, shapes_of(drafter, options), options.num_blocks).as_json()


if __name__ == "__main__":
    typer.run(build)
