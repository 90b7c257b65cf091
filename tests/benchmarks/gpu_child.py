"""The processes of the GPU benchmark, and the time that they share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHADOWS = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "XLA_CLIENT_MEM_FRACTION"}
"""Variables that may not be set beside others: two names of one thing."""


class Clock:
    """The time that is left."""

    def __init__(self, seconds: float) -> None:
        self.started = time.monotonic()
        self.seconds = seconds

    @property
    def used(self) -> float:
        return time.monotonic() - self.started

    @property
    def left(self) -> float:
        return self.seconds - self.used

    def say(self, line: str) -> None:
        print(f"[{self.used:5.0f} s] {line}", flush=True)


@dataclass(frozen=True, slots=True)
class Child:
    """One part of the benchmark in a process of its own."""

    path: Path
    """The JSON file that it writes; what it prints goes to a log beside it."""
    process: subprocess.Popen

    @classmethod
    def start(cls, part: str, path: Path, env: Mapping[str, str], *args: str) -> Child:
        """Starts `tests.benchmarks.gpu_case`; what an earlier run wrote is removed."""
        path.unlink(missing_ok=True)
        own = {k: v for k, v in os.environ.items() if k not in map(SHADOWS.get, env)}
        flags = f"{own.get('XLA_FLAGS', '')} {env.get('XLA_FLAGS', '')}".strip()
        command = [sys.executable, "-m", "tests.benchmarks.gpu_case", part]
        with open(path.with_suffix(".log"), "w") as log:
            process = subprocess.Popen(
                [*command, "--out", str(path), *args],
                env={**own, **env, "XLA_FLAGS": flags},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return cls(path, process)

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """Ends it, if it runs."""
        if self.runs:
            self.process.kill()
            self.process.wait()

    def wait(self, seconds: float) -> dict[str, Any]:
        """What it wrote, or why it wrote nothing, after so many seconds at most."""
        try:
            self.process.wait(timeout=max(seconds, 1.0))
        except subprocess.TimeoutExpired:
            self.stop()
            if not self.path.exists():
                return {"failed": f"took longer than {seconds:.0f} s"}
        finally:
            self.stop()
        return self.found()

    def found(self) -> dict[str, Any]:
        """What it wrote so far; `failed` says why it ended without."""
        if self.path.exists():
            return json.loads(self.path.read_text())
        if self.runs:
            return {}
        if self.process.returncode == -signal.SIGKILL:
            return {"failed": "killed: out of time, or of the machine's memory"}
        said = self.path.with_suffix(".log").read_text().strip().splitlines()[-1:]
        return {"failed": " ".join([f"exit code {self.process.returncode}", *said])}
