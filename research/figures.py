"""Acceptance rates, shaded answers and trees, as in figures 5 to 7 of the SpecBlock paper.

    python research/figures.py --drafter specblock=DIR --set humaneval=FILE.jsonl --out FOLDER

Drafters run along the target's own answers as in serving; no engine is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import torch
import typer
from paper_measure import DrafterFigures, measure
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from vllm_specblock.cli.draft_tree import (
    forward_colour,
    legend_line,
    save_svg,
    steps_of_text,
    terminal_tree,
)
from vllm_specblock.cli.options import Chat, Device, NewTokens, Precision, PromptTokens, TreeNodes
from vllm_specblock.config import DEFAULT_NODES, OptionError
from vllm_specblock.drafters.common.config import CheckpointError
from vllm_specblock.train.config import TrainError
from vllm_specblock.train.data.prompts import prompt_ids, read_prompts
from vllm_specblock.train.data.shards import write_json
from vllm_specblock.train.distributed import usable_device
from vllm_specblock.train.eval.evaluate import sequences_for
from vllm_specblock.train.eval.loaded import load_drafter, pair
from vllm_specblock.train.eval.steps import Step
from vllm_specblock.train.provenance import provenance
from vllm_specblock.train.target.answers import continue_prompts
from vllm_specblock.train.target.features import load_target, load_tokenizer

matplotlib.use("Agg")
from matplotlib import pyplot

Rates = list[float | None]
Cases = dict[str, list[Step]]
"""Steps of each drafter along one greedy answer."""

PROMPT = "Write a Python function to compute the Fibonacci sequence."
"""The paper's own (appendix E)."""


COLOURS = {"prefill": "#e9ecef", "accepted": "#a8dda8", "bonus": "#f4a6a6"}
"""By origin of a committed token; prefill: the target's first one, before anything is drafted."""


def case_json(steps: Sequence[Step], tokenizer: Any, count: int) -> dict[str, Any]:
    """Return the first `count` committed tokens of an answer and its first step's tree."""
    first, tokens = steps[0], committed_tokens(steps)[:count]
    return {
        "tokens": [
            {"text": tokenizer.decode([token]), "origin": origin} for token, origin in tokens
        ],
        "tree": {
            "text": [tokenizer.decode([token]) for token in first.token],
            "parent": first.parent,
            "probability": [first.probability(n) for n in range(len(first.token))],
            "forward": first.forward,
            "accepted": first.accepted,
            "bonus": None if first.bonus is None else tokenizer.decode([first.bonus]),
        },
    }


def committed_tokens(steps: Sequence[Step]) -> list[tuple[int, str]]:
    found = [(step.token[0], "prefill") for step in steps[:1]]
    for step in steps:
        found += [(step.token[node], "accepted") for node in step.accepted[1:]]
        if step.bonus is not None:
            found.append((step.bonus, "bonus"))
    return found


Lines = dict[str, list[Rates]]
"""Rates by position of each line: their mean, then those of each set."""


def block_lines(found: DrafterFigures) -> Lines:
    """Return a line per block of figure 5b; none without blocks."""
    chains = [each.chain.alpha_mj for each in found.sets.values() if each.chain]
    return {
        f"block {m + 1}": [block, *(chain[m] for chain in chains)]
        for m, block in enumerate(found.alpha_mj or [])
    }


def plot(panels: dict[str, Lines], position: str, rate: str, path: Path) -> None:
    """Draw rates by position, 0 to 1: thick lines are means over the sets."""
    size = 2.2 + 4.2 * len(panels), 4
    figure, every = pyplot.subplots(1, len(panels), sharey=True, squeeze=False, figsize=size)
    for axes, (title, lines) in zip(every[0], panels.items()):
        for number, (name, (mean, *each_set)) in enumerate(lines.items(), start=1):
            thick = {"linewidth": 2.2, "marker": "o", "label": name}
            thin = {"linewidth": 0.6, "alpha": 0.4}
            for rates, how in [(mean, thick), *((each, thin) for each in each_set)]:
                known = {k: each for k, each in enumerate(rates, start=1) if each is not None}
                axes.plot([*known], [*known.values()], color=forward_colour(number), **how)
        axes.set(title=title, xlabel=position, ylim=(0, 1.02))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    every[0][0].set_ylabel(f"acceptance rate {rate}")
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def save_text(cases: Cases, tokenizer: Any, count: int, path: Path) -> None:
    """Draw figure 6: the first `count` committed tokens of each drafter, shaded by their origin."""
    grid = Table.grid(*[""] * len(cases))
    pages = []
    for name, steps in cases.items():
        committed, page = committed_tokens(steps), Text()
        for word, origin in _words(committed[:count], tokenizer):
            page.append(word, style=f"#000000 on {COLOURS[origin]}")
        pages.append(Panel(page.append("…" * (len(committed) > count)), title=name))
    grid.add_row(*pages)
    keys = Text("  ").join(
        Text(f" {origin} ", style=f"#000000 on {COLOURS[origin]}") for origin in COLOURS
    )
    save_svg(path, "committed tokens", grid, keys, width=64 * len(cases))


def _words(tokens: list[tuple[int, str]], tokenizer: Any) -> list[tuple[str, str]]:
    """Return each token's text. Where several tokens make one letter, the last one shows it."""
    words, before, ids = [], "", []
    for token, origin in tokens:
        ids.append(token)
        whole = tokenizer.decode(ids).rstrip("\ufffd")
        words.append((whole[len(before) :], origin))
        before = whole
    return words


def save_trees(cases: Cases, names: dict[str, str], tokenizer: Any, path: Path) -> None:
    """Draw figure 7: the first step's trees side by side, coloured by drafter forward.

    names: "block" or "level", what a forward of each drafter adds.
    """
    grid, legend = Table.grid(*[""] * len(cases), padding=(0, 2)), Text()
    trees = []
    for name, (first, *_) in cases.items():
        title = f"{name}: forwards {max(first.forward)}, accepted {first.accepted_length}"
        trees.append(Panel(terminal_tree(first, tokenizer, names[name]), title=title))
        legend.append(legend_line(max(first.forward), names[name])).append("\n")
    grid.add_row(*trees)
    save_svg(path, "draft trees", grid, legend)


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
    folders = _by_name("--drafter", drafter)
    sets = _by_name("--set", data)
    pairs = {}
    for name, folder in folders.items():
        pairs[name] = pair(folder, target)
        target = pairs[name].target
    assert target is not None  # the first drafter names it
    tokenizer = load_tokenizer(target)
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
    prompt = PROMPT if case is None else case
    if not prompt:
        raise TrainError("The prompt is empty: there is nothing to draft after.")
    ids = torch.tensor(prompt_ids(prompt, tokenizer, chat))
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
    cases = {}
    for name, each in loaded.items():  # each step commits at least one token; the last one is whole
        (text,) = continue_prompts(model, [ids], tokens + each.depth + 1)
        cases[name] = list(islice(steps_of_text(model, each, text, len(ids)), tokens))
    if not all(cases.values()):
        raise TrainError(
            "The target's answer to --case ends before anything is drafted: give another prompt."
        )

    lines = {
        name: [found.alpha, *(each.main_path.alpha for each in found.sets.values())]
        for name, found in drafters.items()
    }
    title, path = "first choice accepted, given all before it", out / "fig5a_alpha.png"
    plot({title: lines}, "k, position on the main path", "α$_k$", path)
    blocks = {name: lines for name, each in drafters.items() if (lines := block_lines(each))}
    if blocks:
        plot(blocks, "j, position in the block", "α$_{m,j}$", out / "fig5b_alpha_blocks.png")
    save_text(cases, tokenizer, tokens, out / "fig6_text.svg")
    names = {name: each.forward_name for name, each in loaded.items()}
    save_trees(cases, names, tokenizer, out / "fig7_trees.svg")
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
            "drafters": {name: case_json(each, tokenizer, tokens) for name, each in cases.items()},
        },
        **provenance(),
    }
    write_json(out / "figures.json", whole)
    typer.echo(f"The figures and their numbers are in {out}.")


def _by_name(option: str, given: list[str]) -> dict[str, Path]:
    """Parse "NAME=PATH"."""
    found = {name: Path(path) for name, _, path in (text.partition("=") for text in given)}
    if len(found) < len(given) or not all("=" in text for text in given):
        raise OptionError(f"{option} is NAME=PATH, and each name is given once: {given}.")
    return found


if __name__ == "__main__":
    try:
        typer.run(figures)
    except (CheckpointError, OptionError, TrainError) as error:
        raise SystemExit(f"Error: {error}") from None
