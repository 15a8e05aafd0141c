"""Stage 3 of the example pair: the drafter's training data."""

from __future__ import annotations

from pathlib import Path

import torch
from sizes import Size
from stages import Deadline
from target import encode
from tqdm import tqdm

from vllm_specblock.train.data.shards import Text, read_shard, write_shard
from vllm_specblock.train.target.answers import continue_prompts
from vllm_specblock.train.target.features import load_target

PART = 256  # answers in one file, the unit in which that stage resumes
TEMPERATURES = (0.0, 0.7, 0.0, 1.0)  # of the parts in turn: half of the answers are greedy


def write(
    work: Path,
    texts: list[str],
    tokenizer,
    size: Size,
    device: str,
    seed: int,
    deadline: Deadline,
) -> dict:
    """Write the drafter's training data: the target's own answers, and windows of the corpus.

    A prompt is the beginning of a window of the corpus. Half of the answers are greedy.

    Raises:
        OutOfTime: the deadline came before the last part.
    """
    answers, windows, window = size.answers, size.windows, size.window
    pieces = [
        piece
        for text in texts
        for piece in encode(tokenizer, [text]).split(window)
        if len(piece) == window
    ]
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed)).tolist()
    if answers + windows > len(order):
        raise SystemExit(f"The corpus has {len(order)} windows, fewer than {answers + windows}.")
    prompts = [pieces[i][: size.prompt] for i in order[:answers]]
    folder = work / "answers"
    folder.mkdir(parents=True, exist_ok=True)
    model = load_target(work / "target", "fp32", torch.device(device))
    sequences = []
    for part, first in enumerate(tqdm(range(0, answers, PART), desc="answers", unit="part")):
        path = folder / f"{part:04d}.safetensors"
        if not path.exists():
            texts_of_part = continue_prompts(
                model,
                prompts[first : first + PART],
                window - size.prompt,
                temperature=TEMPERATURES[part % len(TEMPERATURES)],
                seed=seed + part,
                batch=size.answer_batch,
            )
            save_tokens(path, texts_of_part)
            if first + PART < answers:
                deadline.check()
        sequences += [text.tokens for text in read_shard(path)]
    new = sum(len(sequence) - size.prompt for sequence in sequences)
    sequences += [pieces[i] for i in order[answers : answers + windows]]
    save_tokens(work / "drafter_data.safetensors", sequences)
    return {
        "answers": answers,
        "tokens_of_the_target": new,
        "tokens_of_the_corpus": windows * window,
        "temperatures": TEMPERATURES,
    }


def save_tokens(path: Path, sequences: list[torch.Tensor]) -> None:
    """Write sequences [T_i]; every token is trained on, also those of the prompts."""
    write_shard(path, [Text(ids, torch.ones(len(ids), dtype=torch.bool)) for ids in sequences])
