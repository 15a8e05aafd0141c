"""Build the example pair from nothing: a small Llama and a SpecBlock drafter for it.

Stages, each of which is left alone once its result is there: tokenizer and target, answers of
the target, drafter, report. Killed and run again with the same options, it goes on.

    python examples/tiny_pair/build.py --help
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import corpus
import target as target_stages
import torch
import transformers
import typer
from tqdm import tqdm
from transformers import AutoTokenizer

from vllm_specblock.config import SpecBlockConfig
from vllm_specblock.draft import checkpoint
from vllm_specblock.train.config import TrainConfig, parse
from vllm_specblock.train.judge.evaluate import evaluate, scripts_from, shapes_of
from vllm_specblock.train.run import train
from vllm_specblock.train.teacher.answers import continue_prompts
from vllm_specblock.train.teacher.features import load_target
from vllm_specblock.train.text.shards import Text, read_shard, write_shard

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
DRAFT_VOCAB_SIZE = 1536
WINDOW = 256  # tokens of one training sequence
PROMPT = 80  # of which an answer's prompt takes so many
PART = 256  # answers in one file, the unit in which that stage resumes
TEMPERATURES = (0.0, 0.7, 0.0, 1.0)  # of the parts in turn: half of the answers are greedy


def build(
    work: Annotated[
        Path, typer.Option(help="State and intermediate results; may be deleted afterwards.")
    ] = Path("runs/tiny_pair"),
    out: Annotated[Path, typer.Option(help="Gets target/, drafter/ and figures.json.")] = HERE,
    target_steps: Annotated[int, typer.Option(help="Updates of the target.")] = 2000,
    answers: Annotated[int, typer.Option(help="Answers of the target to learn from.")] = 3072,
    windows: Annotated[int, typer.Option(help="Windows of the corpus to learn from.")] = 3072,
    drafter_steps: Annotated[int, typer.Option(help="Updates of the drafter.")] = 1500,
    batch: Annotated[int, typer.Option(help="Sequences of one drafter update.")] = 8,
    lr: Annotated[float, typer.Option(help="Peak learning rate of the drafter.")] = 2e-3,
    held_out_prompts: Annotated[int, typer.Option(help="Prompts of the report.")] = 24,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    compile_target: Annotated[
        bool, typer.Option(help="torch.compile the target's training (needs a C++ compiler).")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
) -> None:
    """Build target and drafter, resuming whatever is half done."""
    text = corpus.load()
    target_dir = work / "target"
    stages = Stages(work / "stages.json")

    def target_stage() -> dict:
        if (target_dir / "model.safetensors").exists():
            return json.loads((target_dir / "figures.json").read_text())
        tokenizer = target_stages.train_tokenizer(text.train, target_dir)
        figures = target_stages.train_target(
            target_stages.encode(tokenizer, text.train),
            target_stages.encode(tokenizer, text.held_out),
            tokenizer,
            target_dir,
            steps=target_steps,
            seed=seed,
            device=device,
            compiled=compile_target,
        )
        (target_dir / "figures.json").write_text(json.dumps(figures) + "\n")
        return figures

    def answers_stage() -> dict:
        tokenizer = AutoTokenizer.from_pretrained(target_dir)
        return write_data(work, text.train, tokenizer, target_dir, answers, windows, device, seed)

    def prompts_stage() -> dict:
        prompts = corpus.prompts(text.held_out, held_out_prompts)
        lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        (work / "prompts.jsonl").write_text(lines)
        return {"prompts": len(prompts)}

    def drafter_stage() -> dict:
        config = drafter_config(work, drafter_steps, batch, lr, device, seed)
        train(config)
        log = (config.out / "training" / "log.jsonl").read_text().splitlines()
        return {"options": config.must_match(), "log": [json.loads(line) for line in log[::5]]}

    target_options = {"steps": target_steps, "seed": seed}
    data_options = target_options | {"answers": answers, "windows": windows}
    drafter_options = data_options | {"drafter_steps": drafter_steps, "batch": batch, "lr": lr}
    figures = {
        "target": stages.run("target", target_options, target_stage),
        "answers": stages.run("answers", data_options, answers_stage),
        "prompts": stages.run("prompts", {"prompts": held_out_prompts}, prompts_stage),
        "drafter": stages.run("drafter", drafter_options, drafter_stage),
    }
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
    # Without the folders of whoever built it.
    figures["command"] = shlex.join(["examples/tiny_pair/build.py", *sys.argv[1:]])
    (out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures["report"], indent=1))


class Stages:
    """Runs each stage once, and remembers what it returned and how long it took."""

    def __init__(self, path: Path):
        self.path = path
        self.done = json.loads(path.read_text()) if path.exists() else {}

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time per stage; what a kill cut off is not in it."""
        return {name: round(stage["seconds"], 1) for name, stage in self.done.items()}

    def run(self, name: str, options: dict, stage: Callable[[], dict]) -> dict:
        """The result of `stage`, from the file if it has been run before."""
        if name in self.done and self.done[name]["options"] != options:
            raise SystemExit(
                f"The stage {name!r} below {self.path.parent} was run with "
                f"{self.done[name]['options']}, not {options}; give another --work."
            )
        if name not in self.done:
            began = time.monotonic()
            figures = stage()
            seconds = time.monotonic() - began
            self.done[name] = {"options": options, "figures": figures, "seconds": seconds}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            aside = self.path.with_suffix(".partial")
            aside.write_text(json.dumps(self.done))
            aside.replace(self.path)
        return self.done[name]["figures"]


def write_data(
    work: Path,
    texts: list[str],
    tokenizer,
    target_dir: Path,
    answers: int,
    windows: int,
    device: str,
    seed: int,
) -> dict:
    """What the drafter learns from: the target's own answers, and windows of the corpus.

    A prompt is the beginning of a window of the corpus; its answer is the target's text, half of
    them greedy and half sampled.
    """
    pieces = [
        piece
        for text in texts
        for piece in target_stages.encode(tokenizer, [text]).split(WINDOW)
        if len(piece) == WINDOW
    ]
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed)).tolist()
    if answers + windows > len(order):
        raise SystemExit(f"The corpus has {len(order)} windows, fewer than {answers + windows}.")
    prompts = [pieces[i][:PROMPT] for i in order[:answers]]
    folder = work / "answers"
    folder.mkdir(parents=True, exist_ok=True)
    model = load_target(target_dir, "fp32", torch.device(device))
    sequences = []
    for part, first in enumerate(tqdm(range(0, answers, PART), desc="answers", unit="part")):
        path = folder / f"{part:04d}.safetensors"
        if not path.exists():
            texts_of_part = continue_prompts(
                model,
                prompts[first : first + PART],
                WINDOW - PROMPT,
                temperature=TEMPERATURES[part % len(TEMPERATURES)],
                seed=seed + part,
            )
            save_tokens(path, texts_of_part)
        sequences += [text.tokens for text in read_shard(path)]
    new = sum(len(sequence) - PROMPT for sequence in sequences)
    sequences += [pieces[i] for i in order[answers : answers + windows]]
    save_tokens(work / "drafter_data.safetensors", sequences)
    return {
        "answers": answers,
        "tokens_of_the_target": new,
        "tokens_of_the_corpus": windows * WINDOW,
        "temperatures": TEMPERATURES,
    }


def save_tokens(path: Path, sequences: list[torch.Tensor]) -> None:
    """Sequences [T_i] of which every token is to be learned, those of the prompts too."""
    write_shard(path, [Text(ids, torch.ones(len(ids), dtype=torch.bool)) for ids in sequences])


def drafter_config(
    work: Path, steps: int, batch: int, lr: float, device: str, seed: int
) -> TrainConfig:
    """The drafter's training, also as `specblock train` would be told."""
    return parse(
        target=work / "target",
        target_name="examples/tiny_pair/target",
        data=work / "drafter_data.safetensors",
        out=work / "drafter",
        draft_vocab_size=DRAFT_VOCAB_SIZE,
        steps=steps,
        batch=batch,
        length=WINDOW,
        lr=lr,
        rank_from=steps // 5,
        loss_floor=1.0,
        precision="bf16",
        device=device,
        seed=seed,
        save_every=50,
    )


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
    scripts = scripts_from(model, prompts, new_tokens, layer_ids=drafter.config.target.layer_ids)
    scripts = tqdm(scripts, desc="replay", total=len(prompts), unit="prompt")
    options = SpecBlockConfig()
    return evaluate(drafter, scripts, shapes_of(drafter, options), options.num_blocks).as_json()


if __name__ == "__main__":
    typer.run(build)
