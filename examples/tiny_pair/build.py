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
from safetensors.torch import load_file
from tqdm import tqdm
from transformers import AutoTokenizer

from vllm_specblock.config import DEFAULT_NODES, SpecBlockConfig
from vllm_specblock.draft import checkpoint
from vllm_specblock.draft.expand import Shape
from vllm_specblock.train import data
from vllm_specblock.train.answers import continue_prompts
from vllm_specblock.train.config import TrainConfig, parse
from vllm_specblock.train.features import load_target, teach
from vllm_specblock.train.loop import train
from vllm_specblock.train.replay import acceptance, replay

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
            aside = path.with_suffix(".partial")
            data.save_tokens(aside, texts_of_part)
            aside.replace(path)
        stored = load_file(path)
        sequences += stored["tokens"].split(stored["lengths"].tolist())
    new = sum(len(sequence) - PROMPT for sequence in sequences)
    sequences += [pieces[i] for i in order[answers : answers + windows]]
    data.save_tokens(work / "drafter_data.safetensors", sequences)
    return {
        "answers": answers,
        "tokens_of_the_target": new,
        "tokens_of_the_corpus": windows * WINDOW,
        "temperatures": TEMPERATURES,
    }


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


@torch.no_grad()
def report(out: Path, held_out: list[str], count: int, device: str, new_tokens: int = 160) -> dict:
    """τ and α on greedy continuations of prompts from files that no stage was trained on."""
    tokenizer = AutoTokenizer.from_pretrained(out / "target")
    model = load_target(out / "target", "fp32", torch.device(device))
    drafter = checkpoint.load(out / "drafter", torch.float32, device)
    layer_ids, draft_ids = drafter.config.target.layer_ids, drafter.t2d.nonzero()[:, 0]
    prompts = [
        torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        for text in corpus.prompts(held_out, count)
    ]
    texts = continue_prompts(model, prompts, new_tokens)
    K, options = drafter.config.block_size, SpecBlockConfig()
    one = (1, 1, 1, 1)
    shapes = {
        "chain_of_one_block": Shape(K, 1, 1, one, K),
        "chain_of_two_blocks": Shape(K, 2, 1, one, 2 * K),
        f"tree_of_{DEFAULT_NODES}": Shape(
            K, options.num_blocks, options.num_starts, tuple(options.branching), DEFAULT_NODES
        ),
    }
    accepted: dict[str, list[int]] = {name: [] for name in shapes}
    for text, prompt in zip(tqdm(texts, desc="replay", unit="prompt"), prompts):
        features = teach(model, text[None].to(device), layer_ids, draft_ids).hidden[0]
        for name, shape in shapes.items():
            accepted[name] += replay(
                drafter,
                model.get_input_embeddings(),
                features,
                text.to(device),
                len(prompt),
                shape,
            ).accepted
    alpha = acceptance(drafter, model, texts, [len(prompt) for prompt in prompts], layer_ids)
    return {
        "prompts": len(prompts),
        "tau": {name: round(1 + sum(a) / len(a), 3) for name, a in accepted.items()},
        "steps": {name: len(a) for name, a in accepted.items()},
        "alpha": [[round(share, 4) for share in block] for block in alpha],
    }


if __name__ == "__main__":
    typer.run(build)
