"""`specblock bench`: methods side by side in vLLM."""

from __future__ import annotations

import signal

import typer

from vllm_specblock.bench.config import BenchConfig
from vllm_specblock.cli.options import options_of


@options_of(BenchConfig)
def bench(config: BenchConfig) -> None:
    """Measure speed-up, tokens/s, τ and drafting time of methods on sets of questions.

    The engines of all methods run side by side and take turns, one answer each, so that a machine
    with changing speed gives fair ratios. A killed run resumes with the same options. Writes
    OUT/table.md and OUT/results.json.
    """
    from vllm_specblock.bench.results import write_results
    from vllm_specblock.bench.run import measure, prepare
    from vllm_specblock.drafters.common.hub import drafter_folder, target_folder

    drafters = {name: drafter_folder(model) for name, model in config.drafter.items()}
    target = target_folder(config.target)
    config = config.model_copy(update={"target": target, "drafter": drafters})

    # End the engines first, as with Ctrl-C; nohup is respected.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    prepared = prepare(config)
    try:
        measure(prepared)
    except KeyboardInterrupt:
        typer.echo(f"Stopped. The answers are in {config.out}; the same command resumes.", err=True)
        raise typer.Exit(130) from None
    table, files = write_results(prepared)
    typer.echo(f"{table}\nWritten: {', '.join(map(str, files))}.")
    if prepared.failures:
        typer.echo(" ".join(["Error:", *prepared.failures.values()]), err=True)
        raise typer.Exit(1)
