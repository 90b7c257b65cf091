"""Really trained, on this CPU: `python -m tests.benchmarks.training`.

200 steps of gpt2-tiny under nothing recomputed, everything recomputed, and a plan for
half of what that saves: speed and the last loss, beside those of the first. Then the
largest difference between each family's logits and those `transformers` gave on the
committed checkpoints. A minute on two cores.
"""

import statistics
import tempfile
from typing import Any

import jax.numpy as jnp
import numpy as np

import remat
from remat import models
from tests.test_models_hf import FIXTURES, logits

SIZES: dict[str, Any] = {"batch": 8, "seq": 128}
POLICIES = ("none", "nothing", "plan")


def main() -> None:
    """Prints both."""
    curves = {name: _trained(name) for name in POLICIES}
    first_loss, first_speed = curves["none"]
    for name, (loss, speed) in curves.items():
        print(
            f"{name:8} {speed:8,.0f} tokens/s (x {speed / first_speed:.2f}), "
            f"loss {loss:.6f} at step 200 (x {loss / first_loss:.7f})"
        )
    for family in ("gpt2", "llama", "mixtral", "vit"):
        print(f"{family:8} logits differ by at most {_difference(family):.1e}")


def _trained(name: str) -> tuple[float, float]:
    """Loss at step 200, and the speed that a tenth of the steps reach."""
    rows: list[models.StepMetrics] = []
    policy = _plan() if name == "plan" else name
    with tempfile.TemporaryDirectory() as out:
        options = {"dtype": "float32", "n_sample": 0, **SIZES}
        models.train(
            "gpt2-tiny", out=out, policy=policy, on_step=rows.append, **options
        )
    # What else the machine does slows steps down, and none up.
    speeds = [row.examples_per_s for row in rows[10:]]
    return rows[-1].loss, statistics.quantiles(speeds, n=10)[-1]


def _plan() -> remat.Plan:
    built = models.build("gpt2-tiny", dtype=jnp.float32, **SIZES)
    table = remat.compare(
        built.loss, *built.args, policies=["none", "nothing"], target="cpu"
    )
    budget = sum(row.peak_bytes for row in table.rows) // 2
    return remat.plan(built.loss, *built.args, budget=budget, target="cpu")


def _difference(family: str) -> float:
    expected = np.load(FIXTURES / family / "expected.npz")
    loaded = models.load_hf(FIXTURES / family, dtype=jnp.float32)
    pairs = [
        (expected[f"{prefix}{given}"], expected[f"{prefix}logits"])
        for prefix in ("", "larger_")
        for given in ("tokens", "images")
        if f"{prefix}{given}" in expected
    ]
    return max(float(np.abs(logits(loaded, x) - y).max()) for x, y in pairs)


if __name__ == "__main__":
    from remat._targets._target import quiet_environment

    quiet_environment()
    main()
