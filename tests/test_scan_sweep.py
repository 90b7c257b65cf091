"""`remat.scan` against `jax.lax.scan`: every length, body, direction and depth.

The programs that `remat.scan` makes are run step by step (`tests.step_by_step`), those
of `lax.scan` are compiled as they are. Whole compiled programs of every length are in
`test_scan.py`.

    pytest -m slow --dist load tests/test_scan_sweep.py

takes 12 minutes of CPU time (jax 0.12): 2,608 different programs.
"""

import functools

import jax
import jax.extend.core as jec
import pytest
from jax import lax

import remat
from remat._scan._nest import ScanBody
from remat._scan._rewrite import ScanOptions, choose_nest
from remat._scan._segments import balanced
from remat._scan._sizes import Sizes
from tests.scan_programs import BODIES, assert_close, inputs, value_and_gradient
from tests.step_by_step import QUICKLY, StepByStep

LENGTHS = [*range(51), 97, 1000]
TOLERANCE = {"half": 2e-2}


def program(scan, name, n, **options):
    """The traced values and gradients, and what they are shaped and nested like."""

    def traced():
        return value_and_gradient(scan, name, n, **options)

    closed, shapes = jax.make_jaxpr(traced, return_shape=True)()
    return closed, (closed.out_avals, jax.tree.structure(shapes))


def scans_of(n):
    """The directions and nests of a length; two depths of a short one can be one."""
    nests = {balanced(max(n, 1), levels) for levels in (1, 2, 3, 4)}
    return [(way, nest) for way in (False, True) for nest in sorted(nests)]


def wanted(name, n, reverse):
    """What `lax.scan` gives, compiled as it is."""
    closed, types = program(lax.scan, name, n, reverse=reverse)
    run = jax.jit(jec.jaxpr_as_fun(closed), compiler_options=QUICKLY)
    return run(), types


@pytest.mark.slow
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", BODIES)
def test_equals_lax_scan_in_every_way(n, name):
    runner = StepByStep()
    by_lax = {reverse: wanted(name, n, reverse) for reverse in (False, True)}
    for reverse, segments in scans_of(n):
        values, types = by_lax[reverse]
        for policy in ("none", "nothing"):
            options = {"reverse": reverse, "segments": segments, "policy": policy}
            closed, got_types = program(remat.scan, name, n, **options)
            assert got_types == types, options
            got = runner.run(closed, [])
            assert_close(got, values, TOLERANCE.get(name, 3e-5))


def nests_of(policies, name, n, reverse, segments):
    """What `remat.scan` makes of a scan under each of these policies."""
    body, init, xs = inputs(name, n)
    scan = functools.partial(lax.scan, body, reverse=reverse, length=n)
    closed = jax.make_jaxpr(scan)(init, xs)
    eqn = next(e for e in closed.jaxpr.eqns if e.primitive.name == "scan")
    sizes = Sizes(ScanBody.of(eqn), [v.aval for v in eqn.invars])
    options = [ScanOptions.of(one, segments, None, False) for one in policies]
    return [choose_nest(sizes.body, one, sizes) for one in options]


@pytest.mark.slow
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", BODIES)
def test_the_default_policy_makes_one_of_these_programs(n, name):
    for reverse, segments in scans_of(n):
        policies = (None, "none", "nothing")
        chosen, *others = nests_of(policies, name, n, reverse, segments)
        assert chosen.policy is None  # as good as "nothing", where it is a region
        assert (chosen.lengths, chosen.is_region) in {
            (one.lengths, one.is_region) for one in others
        }
