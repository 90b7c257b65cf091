"""Training: it learns, goes on to the bit where it was left, and loses nothing."""

import contextlib
import dataclasses
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat import models
from remat.models import _checkpoints, _run_directory, _seals, _train, _train_loop
from remat.models._checkpoints import digest
from remat.models._data import open_text
from remat.models._run_directory import open_run, read_rows
from remat.models._train_loop import make_step
from remat.models._train_settings import Settings

SMALL: dict[str, Any] = {"n_layers": 1, "n_heads": 2, "d_model": 8}
RUN: dict[str, Any] = {
    "steps": 6,
    "batch": 2,
    "seq": 8,
    "dtype": "float32",
    "options": SMALL,
    "checkpoint_every": 2,
    "n_sample": 0,
}


class Stop(Exception):
    """What interrupts a run in these tests."""


def stop_at(step):
    """An `on_step` that interrupts a run."""

    def on_step(metrics):
        if metrics.step == step:
            raise Stop

    return on_step


def losses(out):
    """Step to loss, as a run logged them."""
    rows = read_rows(pathlib.Path(out) / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run from start to end, in one go."""
    out = tmp_path_factory.mktemp("run") / "whole"
    return out, models.train("gpt2-tiny", out=out, **RUN)


def assert_same_run(out, done, uninterrupted):
    """A run's parameters and losses are those of the run in one go, to the bit."""
    whole, wanted = uninterrupted
    chex.assert_trees_all_equal(done.params, wanted.params)
    assert losses(out) == losses(whole)
    assert done.held_out_loss == wanted.held_out_loss


@pytest.mark.parametrize(
    "step", [3, *[pytest.param(s, marks=pytest.mark.slow) for s in (1, 2, 4, 5, 6)]]
)
def test_goes_on_to_the_bit(tmp_path, uninterrupted, step):
    with pytest.raises(Stop):
        models.train("gpt2-tiny", out=tmp_path, on_step=stop_at(step), **RUN)
    done = models.train("gpt2-tiny", out=tmp_path, **RUN)
    assert done.started_at == (step - 1) // 2 * 2
    assert_same_run(tmp_path, done, uninterrupted)


@pytest.mark.slow
def test_goes_on_to_the_bit_with_dropout_and_passes(tmp_path):
    options = {**RUN, "dropout": 0.2, "accumulate": 2, "seed": 5}
    wanted = models.train("gpt2-tiny", out=tmp_path / "whole", **options)
    with pytest.raises(Stop):
        models.train("gpt2-tiny", out=tmp_path / "cut", on_step=stop_at(3), **options)
    done = models.train("gpt2-tiny", out=tmp_path / "cut", **options)
    assert_same_run(tmp_path / "cut", done, (tmp_path / "whole", wanted))


@pytest.fixture
def copy(tmp_path, uninterrupted):
    """A copy of the finished run."""
    return shutil.copytree(uninterrupted[0], tmp_path / "copy")


def test_a_broken_checkpoint_is_passed_over(copy, uninterrupted, capfd):
    for file in (copy / "checkpoints" / "6" / "state").rglob("d/*"):
        damaged = bytearray(file.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        file.write_bytes(damaged)
    said = []
    done = models.train("gpt2-tiny", out=copy, say=said.append, **RUN)
    assert [line.split(" (")[0] for line in said] == [
        "the checkpoint of step 6 is broken"
    ]
    assert done.started_at == 4
    assert (copy / "broken-checkpoints" / "6-0").is_dir()
    # Reads that were begun on broken files would say so, long after.
    assert "Traceback" not in capfd.readouterr().err
    assert_same_run(copy, done, uninterrupted)


@pytest.mark.slow
def test_arrays_are_checked_where_a_kill_left_no_seal(copy, uninterrupted):
    (copy / "checkpoints" / "6" / "seal.json").unlink()
    meta = copy / "checkpoints" / "6" / "meta" / "metadata"
    digest = json.loads(meta.read_text())["digest"]
    meta.write_text(meta.read_text().replace(digest, "0" * 64))
    said = []
    done = models.train("gpt2-tiny", out=copy, say=said.append, **RUN)
    assert "its arrays are not those that were saved" in said[0]
    assert done.started_at == 4
    assert_same_run(copy, done, uninterrupted)


@pytest.mark.slow
def test_a_checkpoint_cut_short_is_passed_over(copy, uninterrupted):
    for file in (copy / "checkpoints" / "6").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    shutil.rmtree(copy / "checkpoints" / "4" / "state")
    said = []
    done = models.train("gpt2-tiny", out=copy, say=said.append, **RUN)
    assert len(said) == 2 and done.started_at == 2
    assert_same_run(copy, done, uninterrupted)


def test_options_left_out_are_the_runs(copy, uninterrupted):
    # Nothing is left to do, so nothing but the judging is compiled.
    done = models.train("gpt2-tiny", out=copy, steps=6, policy="save_dots", n_sample=0)
    assert done.started_at == 6
    assert_same_run(copy, done, uninterrupted)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, "has seed 0, given 1; leave the option out to go on"),
        ({"learning_rate": 0.1}, "has learning_rate 0.001, given 0.1"),
        ({"steps": 5}, "has done 6 steps; ask for more than that, given 5"),
        ({"policy": "save_dotz"}, "save_dots"),
        ({"policy": "/no/plan.json"}, "/no/plan.json"),
        ({"data": __file__}, "the data is not what the run was started with"),
    ],
)
def test_a_run_stays_what_it_is(copy, options, message):
    with pytest.raises(ValueError, match=message):
        models.train("gpt2-tiny", out=copy, **{**RUN, **options})


def test_a_second_run_in_one_directory_is_refused(tmp_path):
    with (
        open_run(tmp_path / "run"),
        pytest.raises(models.TrainError, match="another run is training into"),
    ):
        models.train("gpt2-tiny", out=tmp_path / "run", **RUN)
    with open_run(tmp_path / "run"):
        pass  # the first is over


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be a whole number from 1"),
        ({"data": "/nothing/here.txt"}, "cannot read the text /nothing/here.txt"),
        ({"data": os.devnull}, "has 0 bytes; windows of 8 tokens need at least 100"),
        ({"dtype": "float16"}, 'dtype must be "bfloat16" or "float32"'),
        ({"warmup": 50, "horizon": 20}, "warmup of 50 steps must end before"),
        ({"learning_rate": -1.0}, "learning_rate must be above 0, given -1.0"),
        ({"options": {"vocab_size": 100}}, "bytes are 256 words, the model has 100"),
        ({"options": {"layers": 100}}, "no option 'layers'"),
        ({"options": {"policy": "none"}}, "'policy', which is an argument of its own"),
        ({"options": {"n_layers": object()}}, r"must fit it: .*not JSON serializable"),
        ({"clip_norm": 0.0}, "clip_norm must be above 0, given 0.0"),
    ],
)
def test_wrong_requests_start_nothing(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        models.train("gpt2-tiny", out=tmp_path, **{**RUN, **options})
    assert not (tmp_path / "run.json").exists()


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("!")
    with pytest.raises(
        models.TrainError, match=r"holds 'thesis\.tex' and no run\.json"
    ):
        models.train("gpt2-tiny", out=tmp_path, **RUN)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_metrics_are_rewound_and_mended(tmp_path):
    with open_run(tmp_path) as run:
        for step in (1, 2, 3):
            run.log({"step": step, "loss": step / 2})
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "lo')
        run.rewind_metrics(2)
        assert [r["step"] for r in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]
        run.log({"step": 3, "loss": 0.0})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_what_a_kill_leaves_behind_is_cleaned(tmp_path):
    (tmp_path / "run.123.partial").write_text("{")
    with open_run(tmp_path) as run:
        assert run.settings() is None
        assert sorted(file.name for file in tmp_path.iterdir()) == ["lock"]


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


class Killed(BaseException):
    """What no handler of a run catches."""


WRITERS = (_checkpoints, _run_directory, _seals, _train, _train_loop)


@contextlib.contextmanager
def killed_at(n_lines):
    """Ends a run before the n-th line it executes of the modules that write."""
    files = {module.__file__ for module in WRITERS}
    done = 0

    def on_line(frame, event, _):
        nonlocal done
        done += event == "line"
        if done == n_lines:
            sys.settrace(None)
            raise Killed
        return on_line

    def on_call(frame, event, _):
        return on_line if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield lambda: done
    finally:
        sys.settrace(before)


N_KILLS = 12


@pytest.fixture(scope="module")
def n_lines(tmp_path_factory):
    """How many lines a run executes."""
    with killed_at(-1) as count:
        models.train("gpt2-tiny", out=tmp_path_factory.mktemp("run"), **RUN)
    return count()


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
    chex.assert_trees_all_equal(done.params, whole.params)
    assert losses(out) == losses(tmp_path / "whole")


def test_passes_add_up_to_the_step_of_a_larger_batch():
    def loss(params, batch):
        guess = jnp.cos(batch["tokens"] * params["kernel"]).sum(-1)
        return jnp.mean((guess - batch["targets"][:, 0]) ** 2)

    settings = Settings(model="", dtype="float32", warmup=1, clip_norm=0.1)
    batch = open_text(None, 8).batch(0, 0, 4)
    ends = []
    for passes in (1, 2):
        split = dataclasses.replace(settings, accumulate=passes)
        step = make_step(loss, split)
        start = step.start({"kernel": jnp.linspace(0, 1, 8)})
        ends.append(step.take(start, batch, 1))
    chex.assert_trees_all_close(ends[0], ends[1], rtol=1e-5, atol=1e-7)


def test_progress_shows_loss_speed_and_memory(capsys):
    with models.progress_bar(20) as on_step:
        on_step(
            models.StepMetrics(
                step=7,
                loss=2.5,
                gradient_norm=1.0,
                learning_rate=1e-3,
                examples_per_s=12345.6,
                unit="tokens",
                peak_bytes=3 * 2**29,
            )
        )
    shown = " ".join(capsys.readouterr().out.split())
    assert "7/20" in shown
    assert "loss 2.5000 12,346 tokens/s peak 1.50 GiB" in shown


def test_a_digest_sees_every_bit_and_place():
    state = {"a": np.zeros(3, np.float32), "b": np.zeros((), np.int32)}
    assert digest(state) == digest(jax.tree.map(jnp.asarray, state))
    others = [
        {"a": np.array([0, 0, 1e-45], np.float32), "b": state["b"]},
        {"a": state["a"], "c": state["b"]},
        {"a": state["a"].astype(np.int32), "b": state["b"]},
        {"a": state["a"][None], "b": state["b"]},
    ]
    assert len({digest(other) for other in [state, *others]}) == 5
