"""Compiled memory of a scan's gradient against its length, on an absent target.

    python -m tests.benchmarks scan_scaling [--target h100]

Prints the peak (arguments, outputs and temporaries) of the gradient of N steps for
`lax.scan`, `lax.scan` over a region, and `remat.scan` with two levels, three levels
and `max_saved=40`, each with the exponent fitted to its growth, and the extra forward
passes, counted from the jaxpr. Writes the same to
`tests/benchmarks/results/scan_scaling.json`, by target, and draws it as
`docs/scan_scaling_TARGET.svg`; `--draw` does that alone.
"""

import argparse
import functools
import json
from pathlib import Path

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
from jax import lax

import remat
from remat._files import write_text
from remat._scan._segments import balanced
from remat._targets._target import quiet_environment
from tests.benchmarks.scan_picture import DOCS, picture

RESULTS = Path(__file__).parent / "results" / "scan_scaling.json"
WIDTH = 2**16  # floats in the carry: 256 KiB
LENGTHS = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
X = jax.ShapeDtypeStruct((WIDTH,), jnp.float32)


def step(c, _):
    """One array, its inner value as large as the carry."""
    return jnp.sin(c) * 1.01, None


def three_levels(f, init, xs, length):
    return remat.scan(f, init, xs, length, segments=balanced(length, 3))


WAYS = {
    "plain": lax.scan,
    "full remat": lambda f, *args: lax.scan(jax.checkpoint(f), *args),
    "sqrt": remat.scan,
    "three levels": three_levels,
    "max_saved=40": functools.partial(remat.scan, max_saved=40),
}


def gradient(way, n):
    return jax.grad(lambda x: (WAYS[way](step, x, None, n)[0] ** 2).sum())


def peak_bytes(way, n, target):
    """The peak of the compiled gradient."""
    return remat.analyze(gradient(way, n), X, target=target).peak_bytes


def extra_forwards(way, n):
    """How many times more than once a gradient runs the body, counted by its sines."""
    return _sines(jax.make_jaxpr(gradient(way, n))(X)) / n - 1


def extra_forwards_of(fn, x, n):
    """The same of a function whose body has one sine."""
    return _sines(jax.make_jaxpr(jax.grad(fn))(x)) / n - 1


def _sines(jaxpr, times=1):
    total = 0
    for eqn in jaxpr.eqns:
        total += times * (eqn.primitive.name == "sin")
        inner = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for sub in jec.jaxprs_in_params(eqn.params):
            total += _sines(getattr(sub, "jaxpr", sub), inner)
    return total


def exponent(peaks, lengths=LENGTHS):
    """The power of N by which peaks grow, fitted over all lengths."""
    return float(np.polyfit(np.log(lengths), np.log(peaks), 1)[0])


def print_table(peaks, target):
    mib = 2**20
    print(f"peak MiB of the gradient on {target}; carry {WIDTH * 4 / mib:.2f} MiB\n")
    print("| N | " + " | ".join(WAYS) + " |")
    print("|---|" + "---:|" * len(WAYS))
    for i, n in enumerate(LENGTHS):
        cells = (f"{peaks[way][i] / mib:,.1f}" for way in WAYS)
        print(f"| {n:,} | " + " | ".join(cells) + " |")
    cells = (f"{exponent(peaks[way]):.3f}" for way in WAYS)
    print("| exponent | " + " | ".join(cells) + " |")
    cells = (f"{extra_forwards(way, LENGTHS[-1]):.2f}" for way in WAYS)
    print(f"| extra forwards at N={LENGTHS[-1]:,} | " + " | ".join(cells) + " |")


def write(peaks, target):
    """Keeps the figures, beside those of other targets."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[target] = {
        "lengths": LENGTHS,
        "carry_bytes": WIDTH * 4,
        "peak_bytes": peaks,
        "exponent": {way: round(exponent(peaks[way]), 3) for way in WAYS},
        "extra_forwards": {way: extra_forwards(way, LENGTHS[-1]) for way in WAYS},
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description="Compiled memory against steps.")
    parser.add_argument("--target", default="h100")
    parser.add_argument("--draw", action="store_true", help="from what is kept")
    given = parser.parse_args()
    target = given.target
    if given.draw:
        peaks = json.loads(RESULTS.read_text())[target]["peak_bytes"]
    else:
        peaks = {way: [peak_bytes(way, n, target) for n in LENGTHS] for way in WAYS}
        print_table(peaks, target)
        write(peaks, target)
    path = DOCS / f"scan_scaling_{target}.svg"
    write_text(path, picture(peaks, LENGTHS, target))
    print(path)


if __name__ == "__main__":
    quiet_environment()
    main()
