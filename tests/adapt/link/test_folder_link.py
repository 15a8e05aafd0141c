"""A folder between engine and trainer: whose files are private, bounded, and gone when read."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest
import torch
from support.adapting import Pair

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
    return sorted(path for path in folder.iterdir() if path.is_file())


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
    assert link.counts == {"recorded_requests": 12, "recorded_tokens": 12 * 32}


def test_what_does_not_fit_or_opted_out_is_not_written(pair, folder):
    link = link_of(pair, folder, memory=0.05, requests="marked")
    record, request = pair.request(1)
    assert not link.offer(record, request) and not link.offer(record, request, wanted=False)
    for _ in range(6):
        link.offer(record, request, wanted=True)
    link.close()
    counts = link.counts
    assert counts["opted_out_requests"] == 2
    assert counts["recorded_requests"] == len(files(folder)) >= 1
    assert counts["unrecorded_requests"] == 6 - len(files(folder)) > 0
    assert sum(path.stat().st_size for path in files(folder)) <= 0.05 * (1 << 20)


def test_an_engine_that_offers_faster_than_a_disk_drops(pair, folder):
    link = link_of(pair, folder, slots=2)
    link._write = lambda message: time.sleep(0.05)
    began = time.perf_counter()
    taken = [link.offer(*pair.request(1)) for _ in range(8)]
    assert time.perf_counter() - began < 0.3 and not all(taken)
    assert link.counts["unrecorded_requests"] == taken.count(False)
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
        str(pair.drafter), str(pair.target), "always", "all", out=str(folder / "versions"),
        seconds=0, lr=3e-3,
    )  # fmt: skip
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
