"""Trainer process: lowest priority; exits with the engine."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time


def main() -> int:
    """Arguments: the config as JSON, and the engine's process id."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    from vllm_specblock.adapt.trainer.trainer import TrainerConfig, serve

    config, engine = TrainerConfig(**json.loads(sys.argv[1])), int(sys.argv[2])
    assert config.link is not None
    threading.Thread(target=_end_with, args=(engine, config.link), daemon=True).start()
    return serve(config)


def _end_with(engine: int, link: str) -> None:
    """Exit with the engine, also after `kill -9`, and remove the shared folder."""
    while os.getppid() == engine:
        time.sleep(0.2)
    shutil.rmtree(link, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
