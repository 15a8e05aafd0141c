"""Acceptance rates, shaded answers and trees, as in figures 5 to 7 of the SpecBlock paper.

    python research/figures.py --drafter specblock=DIR --set humaneval=FILE.jsonl --out FOLDER

Drafters run along the target's own answers as in serving; no engine is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import paper_plots as paper
import typer
from paper_measure import DrafterFigures, measure
from tqdm import tqdm

from vllm_specblock.cli.draft_tree import prompt_tensor, steps_of_prompt
from vllm_specblock.cli.options import Chat, Device, NewTokens, Precision, PromptTokens, TreeNodes
from vllm_specblock.config import DEFAULT_NODES, OptionError
from vllm_specblock.drafters.common.config import CheckpointError
from vllm_specblock.train.config import TrainError
from vllm_specblock.train.data.prompts import read_prompts
from vllm_specblock.train.data.shards import write_json
from vllm_specblock.train.distributed import usable_device
from vllm_specblock.train.eval.evaluate import sequences_for
from vllm_specblock.train.eval.loaded import load_drafter, pair
from vllm_specblock.train.provenance import provenance
from vllm_specblock.train.target.answers import continue_prompts
from vllm_specblock.train.target.features import load_target, load_tokenizer


def figures(
    drafter: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=DIR",
            help="A SpecBlock or EAGLE-3 drafter, a folder or a hub id, and its name. Repeatable.",
        ),
    ],
    data: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="NAME=PATH",
            help="Held-out prompts as `specblock eval --data` takes them. Repeatable.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the figures and of figures.json.")],
    target: Annotated[
        Path | None,
        typer.Option(
            help="Folder or hub id of the target. Default: as the first drafter names it."
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Of each set, from the first on.")] = 16,
    prompt_tokens: PromptTokens = 64,
    new_tokens: NewTokens = 128,
    chat: Chat = None,
    nodes: TreeNodes = None,
    case: Annotated[
        str | None,
        typer.Option(help="Prompt of the shaded answers and the trees. Default: the paper's."),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="Committed tokens of a shaded answer (paper: 30).")
    ] = 30,
    device: Device = "cpu",
    precision: Precision = "fp32",
) -> None:
    """Draw where drafts are accepted: by position, in a text, in a tree.

    Writes fig5a_alpha.png, fig5b_alpha_blocks.png (SpecBlock only), fig6_text.svg, fig7_trees.svg
    and figures.json with every number.
    """
    where = usable_device(device)
    folders = _by_name("--drafter", drafter, "specblock=DIR")
    sets = _by_name("--set", data, "humaneval=PATH")
    pairs = {}
    for name, folder in folders.items():
        pairs[name] = pair(folder, target)
        target = pairs[name].target
    assert target is not None  # the first drafter names it
    tokenizer = load_tokenizer(target)
    chat = bool(tokenizer.chat_template) if chat is None else chat
    found = {
        name: read_prompts(
            path,
            tokenizer,
            prompts,
            prompt_tokens=prompt_tokens,
            chat=chat,
            vocab_size=next(iter(pairs.values())).vocab_size,
            report=lambda line: typer.echo(line, err=True),
        )
        for name, path in sets.items()
    }
    prompt = paper.PROMPT if case is None else case
    ids = prompt_tensor(prompt, tokenizer, chat)
    out.mkdir(parents=True, exist_ok=True)

    model = load_target(target, precision, where)
    loaded = {
        name: load_drafter(pairing, model.dtype, where, nodes or DEFAULT_NODES)
        for name, pairing in pairs.items()
    }
    depth = max(each.depth for each in loaded.values())
    measured: dict[str, dict[str, Any]] = {name: {} for name in loaded}
    for set_name, group in found.items():
        texts = continue_prompts(model, group, new_tokens, batch=16)
        lengths = [len(each) for each in group]
        for name, each in loaded.items():
            sequences = sequences_for(model, each.pairing.layer_ids, texts, lengths)
            bar = tqdm(sequences, f"{set_name}, {name}", total=len(texts), unit="text")
            measured[name][set_name] = measure(each, bar, depth)
    drafters = {name: DrafterFigures(of_sets) for name, of_sets in measured.items()}
    # Each step commits at least one token.
    cases = {
        name: paper.Case(steps_of_prompt(model, each, ids, tokens, tokens), each.forward_name)
        for name, each in loaded.items()
    }
    if not all(each.steps for each in cases.values()):
        raise TrainError(
            "The target's answer to --case ends before anything is drafted: give another prompt."
        )

    paper.plot_alpha(drafters, out / "fig5a_alpha.png")
    blocks = {name: each for name, each in drafters.items() if each.alpha_mj is not None}
    if blocks:
        paper.plot_block_alpha(blocks, out / "fig5b_alpha_blocks.png")
    paper.save_text(cases, tokenizer, tokens, out / "fig6_text.svg")
    paper.save_trees(cases, tokenizer, out / "fig7_trees.svg")
    whole = {
        "target": str(target),
        "sets": {name: {"data": str(sets[name]), "prompts": len(found[name])} for name in sets},
        "max_new_tokens": new_tokens,
        "chat": chat,
        "nodes": nodes or DEFAULT_NODES,
        "temperature": 0.0,
        "dtype": str(model.dtype).removeprefix("torch."),
        "drafters": {
            name: {"folder": str(folders[name]), "kind": pairs[name].kind, **each.as_json()}
            for name, each in drafters.items()
        },
        "case": {
            "prompt": prompt,
            "drafters": {name: each.as_json(tokenizer, tokens) for name, each in cases.items()},
        },
        **provenance(),
    }
    write_json(out / "figures.json", whole)
    typer.echo(f"The figures and their numbers are in {out}.")


def _by_name(option: str, given: list[str], example: str) -> dict[str, Path]:
    """Parse "NAME=PATH", each name once."""
    found: dict[str, Path] = {}
    for text in given:
        name, _, path = text.partition("=")
        if not (name and path):
            raise OptionError(f"{option} {text!r} has no name before its path, as {example} has.")
        if name in found:
            raise OptionError(f"{option} {name} was given twice: call one by another name.")
        found[name] = Path(path)
    return found


if __name__ == "__main__":
    try:
        typer.run(figures)
    except (CheckpointError, OptionError, TrainError) as error:
        raise SystemExit(f"Error: {error}") from None
