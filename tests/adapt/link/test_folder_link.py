"""A folder between engine and trainer: whose files are private, bounded, and gone when read."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest
import torch
from support.adapting import VOCAB, Pair
from support.records import small_drafter

from vllm_specblock.adapt.link.folder_link import FolderLink, FolderSource
from vllm_specblock.adapt.trainer.trainer import Trainer, TrainerConfig
from vllm_specblock.adapt.versions import VersionFolder
from vllm_specblock.drafters.specblock import checkpoint
from vllm_specblock.train.config import TrainError


@pytest.fixture
def pair(tmp_path) -> Pair:
    return Pair.make(tmp_path)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "requests"


def link_of(pair: Pair, folder: Path, **more) -> FolderLink:
    versions = VersionFolder(folder / "versions", pair.drafter, pair.target)
    return FolderLink(folder, versions, **{"slots": 64, **more})


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("request-*"))


def wait(what, seconds: float = 60.0):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it takes too long"
        time.sleep(0.01)


def test_requests_come_out_as_they_went_in_and_their_files_are_gone(pair, folder, caplog):
    link = link_of(pair, folder)
    assert "text can be read" in caplog.text
    given = [pair.request(number) for number in range(12)]
    assert all(link.offer(*each) for each in given)
    link.close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(files(folder)) == 12
    assert {stat.S_IMODE(path.stat().st_mode) for path in files(folder)} == {0o600}
    source = FolderSource(folder)
    for record, request in given:
        found = source.next()
        assert found.request == request and found.record.request == record.request
        assert torch.equal(found.record.states, record.states)
        assert torch.equal(found.record.tokens, record.tokens)
    assert source.next() is None and not files(folder)


def test_what_has_no_room_is_not_written(pair, folder):
    link = link_of(pair, folder, memory=0.05)
    record, request = pair.request(1)
    taken = 0
    for _ in range(6):
        taken += link.offer(record, request)
        wait(link._waiting.empty)
        time.sleep(0.01)
    link.close()
    assert 1 <= len(files(folder)) < 6 and not link.offer(record, request)
    assert taken == len(files(folder)) + link.counts["dropped_records"]
    assert sum(path.stat().st_size for path in files(folder)) <= 0.05 * (1 << 20)


def test_one_engine_writes_to_a_folder(pair, folder):
    link = link_of(pair, folder)
    with pytest.raises(TrainError, match=r"Another engine or trainer uses the folder.*own\.$"):
        link_of(pair, folder)
    link.close()
    left = folder / ".request-1.rows"
    left.write_text("half a request")  # of an engine that was killed
    link_of(pair, folder).close()
    assert not left.exists()


def test_a_folder_that_cannot_be_one_s_own(pair, folder):
    folder.write_text("a file")
    with pytest.raises(TrainError, match=r"cannot be used \(.*give one of your own\.$"):
        link_of(pair, folder)


def written(pair: Pair, out: Path, seed: int = 0) -> tuple[VersionFolder, str]:
    """A version of other weights that a person chose."""
    versions = VersionFolder(out, pair.drafter, pair.target)
    versions.lock()
    name = versions.write(small_drafter(seed, vocab=VOCAB), {"parent": None})
    versions.use(name, who="person")
    versions.unlock()
    return versions, name


def test_what_is_current_is_there_at_once(pair, folder):
    """Before a thread looks: an engine serves it from its first step on."""
    _, name = written(pair, folder / "versions")
    link = link_of(pair, folder)
    found = link.staged()
    stored = dict(checkpoint.load(folder / "versions" / name).named_parameters())
    assert found.number == 1 and link.staged() is None
    assert all(torch.equal(found.tensors[name], value) for name, value in stored.items())
    link._look()
    assert link.staged() is None
    link.versions.use(None, who="person")
    link._look()
    delivered = dict(checkpoint.load(pair.drafter).named_parameters())
    found = link.staged()
    assert found.number == 0 and torch.equal(
        found.tensors["lm_head.weight"], delivered["lm_head.weight"]
    )
    link.close()


def broken(pair: Pair, out: Path, how: str) -> str:
    """Make what is current unusable; returns what the sentence says."""
    versions, name = written(pair, out)
    if how == "unreadable":
        (out / "current.json").write_text("{")
        return "current.json cannot be read"
    if how == "half written":
        (out / name / checkpoint.WEIGHTS).write_bytes(b"half")
        return "are not those that were written there"
    if how == "no version":
        (out / name / "provenance.json").unlink()
        return "is not whole"
    other = VersionFolder(out, pair.drafter, pair.target)
    other.fingerprints = {**versions.fingerprints, how: "another"}
    other.lock()
    other.use(other.write(small_drafter(0, vocab=VOCAB), {"parent": None}))
    other.unlock()
    return f"was made for another {how}"


@pytest.mark.parametrize("how", ["unreadable", "half written", "no version", "drafter", "target"])
def test_versions_that_cannot_serve_are_told_of_once(pair, folder, how, caplog):
    said = broken(pair, folder / "versions", how)
    link = link_of(pair, folder)
    (line,) = [each for each in caplog.messages if "current version" in each]
    assert said in line and line.count(". ") == 0 and line.endswith(".")
    assert link.staged() is None and link.counts["versions_refused_checksum"] == 1
    link._look()
    assert link.counts["versions_refused_checksum"] == 1
    link.close()


def test_an_engine_that_offers_faster_than_a_disk_drops(pair, folder):
    link = link_of(pair, folder, slots=2)
    link._write = lambda message: time.sleep(0.05)
    began = time.perf_counter()
    taken = [link.offer(*pair.request(1)) for _ in range(8)]
    assert time.perf_counter() - began < 0.3 and not all(taken)
    link.close()


def test_files_that_cannot_be_read_are_dropped(pair, folder):
    link = link_of(pair, folder)
    for number in range(3):
        link.offer(*pair.request(number))
    link.close()
    first, second, _ = files(folder)
    first.write_bytes(first.read_bytes()[:700])
    second.write_bytes(b"\\0" * 64)
    source = FolderSource(folder)
    assert source.next().record.request == "request 2"
    assert source.tally["dropped_records"] == 2 and not files(folder)
    with pytest.raises(TrainError, match="no folder"):
        FolderSource(folder / "none")


def test_the_engine_follows_the_versions(pair, folder):
    link = link_of(pair, folder)
    for number in range(24):
        link.offer(*pair.request(number))
    while link._waiting.qsize():
        time.sleep(0.01)
    config = TrainerConfig(
        str(pair.drafter),
        str(pair.target),
        "always",
        "all",
        out=str(folder / "versions"),
        seconds=0,
        lr=3e-3,
    )
    trainer = Trainer(config, FolderSource(folder))
    while trainer.step():
        pass
    trainer.close()
    until = time.monotonic() + 20
    while (found := link.staged()) is None:
        assert time.monotonic() < until
        time.sleep(0.05)
    path, _ = link.versions.current()
    stored = dict(checkpoint.load(path).named_parameters())
    assert found.number == int(path.name[-5:]) and set(found.tensors) == set(stored)
    assert all(torch.equal(found.tensors[name], value) for name, value in stored.items())
    delivered = dict(checkpoint.load(pair.drafter).named_parameters())
    assert not torch.equal(found.tensors["lm_head.weight"], delivered["lm_head.weight"])
    assert link.staged() is None
    link.close()
