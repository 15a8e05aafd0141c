"""Parser for lines of chat data."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from vllm_specblock.train.config import TrainError

Message = dict[str, str]
"""{"role": "system" | "user" | "assistant", "content": ...}"""

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}


class BrokenLine(ValueError):
    """An unusable line; the message says why, without file and line number."""


class Conversation(NamedTuple):
    """An optional system turn, then alternating turns, a user's first."""

    messages: tuple[Message, ...]


class Prompt(NamedTuple):
    """A prompt: one user turn, or text to continue."""

    text: str


class Document(NamedTuple):
    """A text to train on unchanged."""

    text: str


Entry = Conversation | Prompt | Document


def parse(line: bytes) -> Entry:
    """Parse one line of JSON; its keys determine the layout.

    ShareGPT `conversations`, UltraChat `messages` or `data` (turns in a list of strings, the
    user's first), `prompt`, `text`, or a benchmark's `turns`, of which the first question is used.
    Assistant turns before the first user turn are dropped. Raises `BrokenLine` for other lines.
    """
    entry = _json_object(line)
    if "conversations" in entry:
        return _conversation(_turns(entry["conversations"], "from", "value"))
    if "messages" in entry:
        return _conversation(_turns(entry["messages"], "role", "content"))
    if "data" in entry:
        if not isinstance(entry["data"], list):
            raise BrokenLine('"data" is not a list')
        turns = [_string(turn, f"turn {n}") for n, turn in enumerate(entry["data"], start=1)]
        return _conversation(list(zip(cycle(("user", "assistant")), turns)))
    if "prompt" in entry:
        return Prompt(_string(entry["prompt"], '"prompt"'))
    if "text" in entry:
        return Document(_string(entry["text"], '"text"'))
    if "turns" in entry:
        turns = entry["turns"]
        if not isinstance(turns, list) or not turns:
            raise BrokenLine('"turns" is not a list of questions')
        return Prompt(_string(turns[0], "turn 1"))
    raise BrokenLine(
        'it has none of the keys "conversations", "messages", "data", "prompt", "text", "turns"'
    )


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise BrokenLine("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise BrokenLine(f"it is not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError):  # a number of too many digits, or too deep a nesting
        raise BrokenLine("it is not JSON of a size that can be read") from None
    if not isinstance(entry, dict):
        raise BrokenLine("it is not a JSON object")
    return entry


def _turns(turns: Any, role_key: str, text_key: str) -> list[tuple[str, str]]:
    if not isinstance(turns, list):
        raise BrokenLine("its turns are not a list")
    found = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or role_key not in turn or text_key not in turn:
            raise BrokenLine(f'turn {number} has no "{role_key}" and "{text_key}"')
        role = turn[role_key]
        if not isinstance(role, str) or role not in _ROLES:
            raise BrokenLine(f"turn {number} is by {role!r}, not by a user or an assistant")
        found.append((_ROLES[role], _string(turn[text_key], f"turn {number}")))
    return found


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise BrokenLine(f"{what} is not a string")
    if not value.strip():
        raise BrokenLine(f"{what} is empty")
    try:
        value.encode()
    except UnicodeEncodeError:  # valid in JSON, but not in a tokenizer
        raise BrokenLine(f"{what} holds half of a surrogate pair") from None
    return value


def _conversation(turns: list[tuple[str, str]]) -> Conversation:
    messages = [{"role": role, "content": text} for role, text in turns]
    system = [messages.pop(0)] if messages and messages[0]["role"] == "system" else []
    while messages and messages[0]["role"] == "assistant":
        messages.pop(0)
    if not any(message["role"] == "user" for message in messages):
        raise BrokenLine("it has no user turn")
    for index, message in enumerate(messages):
        expected = ("user", "assistant")[index % 2]
        if message["role"] != expected:
            number = len(turns) - len(messages) + index + 1
            raise BrokenLine(f"turn {number} is the {message['role']}'s, not the {expected}'s")
    return Conversation((*system, *messages))


def read_lines(
    files: Sequence[Path], limit: int | None, chat: bool, report: Callable[[str], None]
) -> Iterator[tuple[str, Entry]]:
    """Yield the usable lines, each with its place `file:line`.

    Args:
        files: JSON lines, plain or .gz; blank lines are skipped.
        limit: stop after this many usable lines.
        chat: whether conversations can be used.
        report: called with `file:line: reason` for every broken line.

    Raises:
        TrainError: none of the lines can be used, or there is a conversation without `chat`.
    """
    usable = broken = 0
    for path in files:
        for number, line in enumerate(_lines(path), start=1):
            if usable == limit:
                return
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                entry = parse(line)
            except BrokenLine as reason:
                broken += 1
                report(f"{where}: {reason}")
                continue
            if isinstance(entry, Conversation) and not chat:
                raise TrainError(
                    f"{where} is a conversation, but the target's tokenizer has no chat template: "
                    "use lines with a prompt or a text, or a chat model."
                )
            usable += 1
            yield where, entry
    if not usable:
        names = ", ".join(map(str, files))
        raise TrainError(
            f"None of the lines in {names} can be used ({broken:,} are broken); expected JSON "
            "lines with conversations, messages, data, prompt or text."
        )


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TrainError(f"{path} is not a whole gzip file: {error}.") from None


def fingerprint(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Name, size and SHA-256 of each file; raises `TrainError` where one is missing."""
    found = []
    for path in files:
        if not path.is_file():
            raise TrainError(f"There is no file {path}; --input takes .jsonl and .jsonl.gz files.")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        found.append({"name": path.name, "bytes": path.stat().st_size, "sha256": digest})
    return found


def report(reason: str) -> None:
    """Print why a line is skipped, beside the progress bar."""
    tqdm.write(reason, file=sys.stderr)
