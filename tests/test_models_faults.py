"""Runs that are killed, damaged or out of disk: they go on, to the bit."""

import collections
import contextlib
import json
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import chex
import jax
import numpy as np
import pytest

from remat import models
from remat.models import _checkpoints, _run_directory, _seals, _train, _train_loop
from remat.models._checkpoints import Checkpoints, digest
from remat.models._train import _owned
from tests.training_runs import (
    RUN,
    SETTINGS,
    assert_same_run,
    cosines,
    losses,
    norms,
    train_cosines,
    whole_run,
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run from start to end, in one go."""
    return whole_run(tmp_path_factory)


@pytest.fixture(scope="module")
def cosine_run(tmp_path_factory):
    """Directory and last state of a run of four steps that compiles nothing."""
    out = tmp_path_factory.mktemp("cosines")
    return out, train_cosines(out)[1]


def assert_goes_on(out, cosine_run, say=print):
    """A run goes on and ends as the one in one go; returns where it began."""
    whole, wanted = cosine_run
    first, state = train_cosines(out, say=say)
    chex.assert_trees_all_equal(state, wanted)
    assert (losses(out), norms(out)) == (losses(whole), norms(whole))
    return first


# What is read back


def test_a_restored_state_is_as_one_that_was_computed(tmp_path):
    step, start, data = cosines()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, start)
        checkpoints.wait()
        restored = checkpoints.restore(start, pytest.fail)
    assert restored is not None and restored[0] == 1
    owned = _owned(restored[1], None)
    assert digest(owned) == digest(start)
    for leaf, read in zip(*map(jax.tree.leaves, (owned, restored[1])), strict=True):
        assert isinstance(leaf, jax.Array) and not np.shares_memory(leaf, read)
    computed, _ = step.take(start, data.batch(0, 0, 2), 0)
    take: Any = step.take
    take(computed, data.batch(0, 1, 2), 1)
    n_kinds = take._cache_size()
    # To the jit both are one kind of argument.
    take(owned, data.batch(0, 0, 2), 0)
    assert take._cache_size() == n_kinds


def test_what_is_being_saved_is_no_longer_the_devices(tmp_path):
    step, start, data = cosines()
    state, _ = step.take(start, data.batch(0, 0, 2), 0)
    wanted = digest(state)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state)
        # Donates and overwrites the buffers that were given to be saved.
        for number in range(1, 4):
            state, _ = step.take(state, data.batch(0, number, 2), number)
        checkpoints.wait()
        found = checkpoints.restore(start, pytest.fail)
    assert found is not None and digest(found[1]) == wanted != digest(state)


@pytest.mark.slow
def test_a_step_has_one_answer_under_load(tmp_path):
    # Restored and computed arguments, with other threads writing checkpoints and
    # keeping every core busy.
    built = models.build("gpt2-tiny", batch=2, seq=32, dtype="float32", n_layers=2)
    step = _train_loop.make_step(built.loss, SETTINGS)
    batch = _data_of(built)
    start = jax.device_get(step.start(jax.jit(built.init)(jax.random.key(0))))
    over = threading.Event()

    def burn():
        while not over.is_set():
            np.linalg.norm(np.ones((200, 200)) @ np.ones((200, 200)))

    def save():
        with Checkpoints(tmp_path, keep=1) as checkpoints:
            for number in range(1, 10**6):
                if over.is_set():
                    break
                checkpoints.save(number, start)

    threads = [threading.Thread(target=each) for each in (burn, burn, save)]
    for thread in threads:
        thread.start()
    try:
        seen = collections.Counter()
        for number in range(400):
            state = _owned(start, None) if number % 2 else start
            seen[digest(step.take(state, batch, 0))] += 1
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert list(seen.values()) == [400]


def _data_of(built):
    return _train.open_text(None, built.describe["seq"]).batch(0, 0, 2)


# Damage


DAMAGES = {
    "empty": lambda file: file.write_bytes(b""),
    "half": lambda file: file.write_bytes(
        file.read_bytes()[: file.stat().st_size // 2]
    ),
    "flipped": lambda file: file.write_bytes(
        bytes(byte ^ 0x55 for byte in file.read_bytes())
    ),
    "gone": lambda file: file.unlink(),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_file_is_told_and_passed_over(tmp_path, cosine_run, damage):
    newest = cosine_run[0] / "checkpoints" / "4"
    files = sorted(f.relative_to(newest) for f in newest.rglob("*") if f.is_file())
    assert len(files) > 8
    passed_over = []
    for number, file in enumerate(files):
        out = shutil.copytree(cosine_run[0], tmp_path / str(number))
        DAMAGES[damage](out / "checkpoints" / "4" / file)
        said = []
        first = assert_goes_on(out, cosine_run, say=said.append)
        assert (first, len(said)) in ((4, 0), (3, 1)), (file, first, said)
        passed_over += [file.as_posix()] if said else []
    print(damage, f"{len(passed_over)} of {len(files)}", passed_over)
    # A file without which the arrays can be read and proven may be missed.
    assert {file.as_posix() for file in files if "ocdbt" in file.name} <= set(
        passed_over
    )


# Disks


@contextlib.contextmanager
def disk_of(path, n_bytes):
    """A disk with room for so many bytes; gives a function that makes it larger."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={n_bytes}", "none", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small disk needs the right to mount: {done.stderr.strip()}")
    try:
        yield lambda larger: subprocess.run(
            ["mount", "-o", f"remount,size={larger}", str(path)], check=True
        )
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_point_loses_nothing(tmp_path, cosine_run):
    begun_at = []
    for n_pages in range(2, 64, 3):
        out = tmp_path / str(n_pages)
        with disk_of(out, n_pages * 4096) as enlarge:
            try:
                train_cosines(out / "run")
            except models.TrainError as error:
                assert "cannot" in str(error)
            else:
                break
            enlarge("16m")
            begun_at.append(assert_goes_on(out / "run", cosine_run))
    print("full disks; the runs went on from step", begun_at)
    assert len(begun_at) > 10 and {0, 1} <= set(begun_at)


@pytest.mark.slow
def test_a_full_disk_loses_nothing(tmp_path, uninterrupted):
    models.train("gpt2-tiny", out=tmp_path, **{**RUN, "steps": 2})
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_the_disk(metrics):
        if metrics.step == 4:  # its checkpoint is written next
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, unlimited[1]))

    try:
        with pytest.raises(models.TrainError, match=r"cannot write .* goes on from"):
            models.train("gpt2-tiny", out=tmp_path, on_step=fill_the_disk, **RUN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    done = models.train("gpt2-tiny", out=tmp_path, **RUN)
    assert done.started_at == 2
    assert_same_run(tmp_path, done, uninterrupted)


# Kills


class Killed(BaseException):
    """What no handler of a run catches."""


WRITERS = {
    module.__file__
    for module in (_checkpoints, _run_directory, _seals, _train, _train_loop)
}


@contextlib.contextmanager
def every_line(do):
    """Calls `do(file, line)` before each line of the modules that write."""

    def on_line(frame, event, _):
        if event == "line":
            do(frame.f_code.co_filename, frame.f_lineno)
        return on_line

    before = sys.gettrace()
    sys.settrace(
        lambda frame, *_: on_line if frame.f_code.co_filename in WRITERS else None
    )
    try:
        yield
    finally:
        sys.settrace(before)


@contextlib.contextmanager
def killed_at(n_lines):
    """Ends a run before the n-th line it executes of the modules that write."""
    done = 0

    def count(file, line):
        nonlocal done
        done += 1
        if done == n_lines:
            raise Killed

    with every_line(count):
        yield


def lines_of(run):
    """Every line that a run executes of the modules that write, in order."""
    lines = []
    with every_line(lambda *line: lines.append(line)):
        run()
    return lines


N_KILLS = 12


@pytest.fixture(scope="module")
def n_lines(tmp_path_factory):
    """How many lines a run executes."""
    out = tmp_path_factory.mktemp("run")
    return len(lines_of(lambda: models.train("gpt2-tiny", out=out, **RUN)))


@pytest.mark.slow
@pytest.mark.parametrize("kill", range(N_KILLS))
def test_goes_on_from_any_line(tmp_path, uninterrupted, n_lines, kill):
    at = 1 + kill * (n_lines - 1) // (N_KILLS - 1)
    with pytest.raises(Killed), killed_at(at):
        models.train("gpt2-tiny", out=tmp_path, **RUN)
    done = models.train("gpt2-tiny", out=tmp_path, **RUN)
    assert_same_run(tmp_path, done, uninterrupted)


KILLED = """
import json, sys
from remat import models
options = json.loads(sys.argv[2])
models.train("gpt2-tiny", out=sys.argv[1], on_step=lambda m: print(m.step, flush=True),
             **options)
"""


def killed_run(out, options, is_time):
    """Trains in a process of its own, killed once `is_time(steps done)`."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(out), json.dumps(options)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if is_time(int(line)):
            process.send_signal(signal.SIGKILL)
            break
    assert process.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_survives_kills(tmp_path):
    options = {**RUN, "steps": 40, "checkpoint_every": 1, "keep": 2}
    whole = models.train("gpt2-tiny", out=tmp_path / "whole", **options)
    out = tmp_path / "killed"

    def in_a_save(done):
        """Waits for a write to be under way."""
        deadline = time.monotonic() + 60
        while done >= 15 and time.monotonic() < deadline:
            if any("tmp" in path.name for path in (out / "checkpoints").iterdir()):
                return True
        return False

    killed_run(out, options, lambda done: done >= 5)
    killed_run(out, options, in_a_save)
    # What was being written is there, and is no checkpoint.
    assert any("tmp" in path.name for path in (out / "checkpoints").iterdir())
    killed_run(out, options, lambda done: done >= 25)
    done = models.train("gpt2-tiny", out=out, **options)
    assert 23 <= done.started_at < 40
    assert norms(out) == norms(tmp_path / "whole")
    assert losses(out) == losses(tmp_path / "whole")
    chex.assert_trees_all_equal(done.params, whole.params)


@pytest.mark.slow
def test_goes_on_from_every_line_that_writes(tmp_path, cosine_run):
    lines = lines_of(lambda: train_cosines(tmp_path / "counted"))
    first = {line: at for at, line in reversed([*enumerate(lines, 1)])}
    last = {line: at for at, line in enumerate(lines, 1)}
    points = sorted({*first.values(), *last.values()})
    begun_at = collections.Counter()
    for at in points:
        out = tmp_path / str(at)
        with pytest.raises(Killed), killed_at(at):
            train_cosines(out)
        begun_at[assert_goes_on(out, cosine_run)] += 1
    print(len(points), "kills; the runs went on from step", dict(begun_at))
    assert len(points) > 150 and {0, 3, 4} <= set(begun_at)
