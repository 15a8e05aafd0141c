"""`specblock adapt run`, `list` and `use`: train from a folder, and manage versions."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from vllm_specblock.cli.options import TargetDir, UpdateRate

adapt = typer.Typer(
    help="Adaptation while serving: train from a folder, list versions.", no_args_is_help=True
)

Out = Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of versions.")]


@adapt.command()
def run(
    folder: Annotated[Path, typer.Argument(help="Folder that engines name as `trainer`.")],
    drafter: Annotated[Path, typer.Option(help="Drafter that the engine loads.")],
    target: TargetDir = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for versions. Default: FOLDER/versions.")
    ] = None,
    policy: Annotated[str, typer.Option(help="gain, paper or always (OSD).")] = "gain",
    actions: Annotated[str, typer.Option(help="Largest update: heads or all.")] = "heads",
    lr: UpdateRate = None,
    num_blocks: Annotated[
        int, typer.Option(min=1, max=8, help="M of the engine; 1 below 16 nodes.")
    ] = 2,
    every: Annotated[int, typer.Option(min=1, help="Requests per update.")] = 8,
    memory: Annotated[float, typer.Option(help="MiB for recorded rows.")] = 512,
    device: Annotated[str, typer.Option(help="cpu or cuda:N.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    seconds: Annotated[float, typer.Option(min=0, help="Minimum time between two versions.")] = 30,
    once: Annotated[bool, typer.Option(help="Exit when the folder is empty.")] = False,
) -> None:
    """Train on the requests in a folder, and write versions for the engines that use it.

    Requests are deleted when read. Stop with Ctrl-C; the next run resumes.
    """
    import torch

    from vllm_specblock.adapt.link.folder_link import VERSIONS, FolderSource
    from vllm_specblock.adapt.trainer.trainer import POLL, Trainer, TrainerConfig
    from vllm_specblock.train.distributed import usable_device
    from vllm_specblock.train.eval.loaded import pair

    torch.set_num_threads(threads)
    source = FolderSource(folder)
    pairing = pair(drafter, target, ["specblock"])
    config = TrainerConfig(
        str(pairing.drafter),
        str(pairing.target),
        policy,
        actions,
        lr=lr,
        num_blocks=num_blocks,
        every=every,
        memory=memory,
        out=str(out or folder / VERSIONS),
        seconds=seconds,
        device=str(usable_device(device)),
        threads=threads,
    )
    trainer = Trainer(config, source)
    try:
        while (found := trainer.step()) or not once:
            if not found:
                time.sleep(POLL)
    except KeyboardInterrupt:
        pass
    trainer.close()
    counts = [f"{name} {count}" for name, count in sorted(source.tally.items()) if count]
    typer.echo(", ".join(counts) or "nothing was learned")


@adapt.command("list")
def list_versions(out: Out) -> None:
    """List versions with their parents and gains; an asterisk marks the current one."""
    from vllm_specblock.adapt.versions import DELIVERED, VersionFolder

    folder = VersionFolder(out)
    current = folder.current() or DELIVERED
    rows = [("version", "parent", "action", "rows", "tokens per row"), (DELIVERED, *[""] * 4)]
    for name, facts in folder.listed().items():
        gain = facts.get("gain")
        known = facts.get("parent") or DELIVERED, facts.get("action", "?"), facts.get("rows", "?")
        rows.append((name, *known, "not judged" if gain is None else f"{gain:+.3f}"))
    for name, parent, action, learned, gain in rows:
        mark = "*" if name == current else ""
        typer.echo(f"{mark:2}{name:16}{parent:16}{action:8}{learned:>9}  {gain}".rstrip())


@adapt.command()
def use(
    out: Out,
    version: Annotated[str, typer.Argument(help="A name from `list`, or `delivered`.")],
) -> None:
    """Choose the version to serve; engines with this folder load it and train from it."""
    from vllm_specblock.adapt.versions import DELIVERED, VersionFolder

    VersionFolder(out).use(None if version == DELIVERED else version)
    typer.echo(f"{version} is current in {out}.")
