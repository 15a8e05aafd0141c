"""`specblock bench` as users call it: Ctrl-C, and the same command again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from support.adapting import wait
from support.fake_engine import COMMAND
from support.scripts import TARGET

from vllm_specblock.bench import results


def test_ctrl_c_ends_the_engines_and_the_same_command_goes_on(tmp_path):
    """In a process of its own, with stand-ins for engines."""
    questions = tmp_path / "q.jsonl"
    lines = [{"id": f"q{number}", "turns": [f"say {number}"]} for number in range(4)]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    slow = {"slow": {"speculative": {"method": "specblock", "sleep": 0.5}}}
    given = f"bench --target {TARGET} --set q={questions} --out {tmp_path / 'out'} --raw --rounds 1"
    how = "--method=plain", "--method=slow", f"--define={json.dumps(slow)}", "--max-new-tokens=2"
    code = (
        "import vllm_specblock.bench.run as run; from vllm_specblock.cli.main import app\n"
        f"run.Bench.__init__.__defaults__ = ({COMMAND!r}, *run.Bench.__init__.__defaults__[1:])\n"
        f"app({[*given.split(), *how, '--temperature=0']!r})"
    )
    journal, store = tmp_path / "journal", tmp_path / "out/units.jsonl"
    command = [sys.executable, "-c", code]
    env = {**os.environ, "FAKE_JOURNAL": str(journal)}
    call = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    wait(store.exists)
    call.send_signal(signal.SIGTERM)
    _, said = call.communicate(timeout=180)
    assert call.returncode == 130, said
    assert said.strip().splitlines()[-1].endswith("the same command resumes.")
    pids = {json.loads(line)["pid"] for line in journal.read_text().splitlines()}
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    done = len(store.read_text().splitlines())
    assert 1 <= done < 4
    journal.write_text("")
    again = subprocess.run(command, env=env, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert len(journal.read_text().splitlines()) == 2 + 2 * (4 - done)
    assert "| slow |" in again.stdout and (tmp_path / "out" / results.TABLE).exists()
