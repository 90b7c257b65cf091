"""Training: it learns, goes on to the bit where it was left, and loses nothing."""

import dataclasses
import json
import os
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat import models
from remat.models._checkpoints import digest
from remat.models._data import open_text
from remat.models._run_directory import open_run, read_rows
from remat.models._train_loop import make_step
from remat.models._train_settings import Settings
from tests.training_runs import RUN, Stop, assert_same_run, stop_at, whole_run


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run from start to end, in one go."""
    return whole_run(tmp_path_factory)


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
