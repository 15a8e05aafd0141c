"""`specblock features`: the target's features of training data, extracted once through vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from vllm_specblock.cli.options import RequiredTarget, json_option, three_layers


def features(
    target: RequiredTarget,
    data: Annotated[Path, typer.Option(help="Training data, as `specblock train` takes it.")],
    out: Annotated[Path, typer.Option(help="Folder to write the features to.")],
    length: Annotated[
        int, typer.Option(min=1, help="Tokens of the longest piece, as --length in training.")
    ],
    layer_ids: Annotated[  # typer would take a tuple for three arguments
        Any,
        typer.Option(
            parser=three_layers,
            metavar="LOW,MID,HIGH",
            help="Target layers whose states the drafter reads; i is the state after i layers. "
            "Default: 2, N//2, N-3 of N.",
        ),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="Dtype of the target and of the features."),
    ] = "auto",
    shard_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens per file; a killed run loses at most one file.")
    ] = 32768,
    engine: Annotated[
        dict[str, Any] | None,
        json_option("""Further arguments of vLLM's LLM, such as '{"tensor_parallel_size": 2}'."""),
    ] = None,
) -> None:
    """Run the target over training data once, and store the features that drafters train on.

    Each token takes four vectors of the target's width: 32 KiB for an 8B model in bf16. A killed
    run resumes with the same options.
    """
    from tqdm import tqdm

    from vllm_specblock.drafters.common.hub import target_folder
    from vllm_specblock.train.config import TrainError
    from vllm_specblock.train.data.packed_dataset import load_texts
    from vllm_specblock.train.target import feature_store, target_rows
    from vllm_specblock.train.target.target_info import describe_target, read_target

    target = target_folder(target)
    raw = read_target(target)
    longest = raw.get("max_position_embeddings")
    if longest is not None and length >= longest:
        raise TrainError(
            f"--length is {length}, but the target has {longest} positions and vLLM needs one more "
            f"than --length: give --length {longest - 1} or less."
        )
    texts = load_texts(data, raw["vocab_size"])
    sequences = [text.tokens for text in texts]
    layers = describe_target(target, layer_ids=layer_ids).layer_ids
    assert layers is not None  # the target is described
    # Older targets call it torch_dtype.
    of_target = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
    origin = feature_store.Origin(
        target=target_rows.fingerprint(target),
        data=feature_store.fingerprint(sequences),
        layer_ids=layers,
        dtype=of_target if dtype == "auto" else dtype,
        length=length,
        shard_tokens=shard_tokens,
    )
    if feature_store.begin(out, origin):
        typer.echo(f"The features in {out} are already complete.")
        return
    # vLLM reads both when it is imported. Its other runner has no hook for our connector.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm_specblock.engine.offline.target import FeatureExtractor

    extractor = FeatureExtractor(target, layers, length, origin.dtype, out / "parts", engine)
    try:
        with tqdm(total=sum(map(len, sequences)), unit="tok", unit_scale=True) as bar:
            feature_store.fill(out, origin, sequences, extractor, bar.update)
    finally:
        extractor.close()
    typer.echo(f"The features are in {out}.")
