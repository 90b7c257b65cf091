import dataclasses
import tempfile
import threading
import warnings

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import remat
from remat import _jax_compat as compat
from remat._compile._compile import CompileError, compile_lowered, program_hash
from remat._compile._dump import _has_field, dump, remove_folders
from remat._compile._lower import lower
from remat._compile._oom import parse_out_of_memory
from remat._targets._backend_query import BackendQueryWarning

MIB = 1 << 20
W = jax.ShapeDtypeStruct((256, 256), jnp.float32)
X = jax.ShapeDtypeStruct((512, 256), jnp.float32)


def loss(w, x):
    return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)


def compiled(fn, args, name, kwargs=None, donate_argnums=(), **options):
    t = remat.target(name)
    lowered = lower(fn, args, kwargs or {}, t, donate_argnums=donate_argnums)
    return compile_lowered(lowered, t, **options)


def has_buffers(program):
    return _has_field(program.hlo_proto, 3)


# Compiling


@pytest.mark.parametrize("name", ["cpu", "v5e", "h100"])
def test_program_is_what_jax_compiles(name):
    t = remat.target(name)
    program = compiled(jax.grad(loss), (W, X), name)

    args = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=t.sharding()) for a in (W, X)
    ]
    traced = jax.jit(jax.grad(loss)).trace(*args)
    plain = traced.lower(lowering_platforms=(t.lowering_platform,)).compile()
    expected = plain.memory_analysis()

    assert program.stats is not None and expected is not None
    assert program.stats.argument_bytes == expected.argument_size_in_bytes
    assert program.stats.argument_bytes == (256 * 256 + 512 * 256) * 4
    assert program.stats.output_bytes == expected.output_size_in_bytes
    assert program.stats.temp_bytes == expected.temp_size_in_bytes
    assert has_buffers(program)
    assert program.exact and program.oom is None and program.codegen_error is None
    assert (program.codegen_proto is not None) == (t.kind == "tpu")


def test_donation_aliases():
    def step(w, x):
        return w - jax.grad(loss)(w, x)

    program = compiled(step, (W, X), "cpu", donate_argnums=0)
    assert program.stats is not None
    assert program.stats.alias_bytes == 256 * 256 * 4


def test_probe_stops_after_buffer_assignment():
    program = compiled(jax.grad(loss), (W, X), "v5p", probe=True)
    assert has_buffers(program)
    assert not program.exact
    assert program.oom is None, "a probe says nothing of the device's own limit"
    assert program.executable is None and program.stats is None
    assert program.compiler_options == {"xla_tpu_max_hbm_size_mib": 1}


def test_limit_that_the_program_does_not_fit():
    program = compiled(jax.grad(loss), (W, X), "v6e", limit_bytes=MIB)
    assert program.oom is not None
    assert program.oom.limit_bytes == MIB
    assert program.oom.needed_bytes > MIB
    assert has_buffers(program) and not program.exact


def test_a_large_enough_limit_is_a_full_compile_but_not_exact():
    program = compiled(lambda x: x + 1, (X,), "v5e", limit_bytes=64 * MIB)
    assert program.executable is not None and program.oom is None
    assert not program.exact


@pytest.mark.parametrize("name", ["cpu", "h100"])
@pytest.mark.parametrize("options", [{"probe": True}, {"limit_bytes": MIB}])
def test_only_tpus_take_a_limit(name, options):
    with pytest.raises(remat.TargetError, match=f"TPU.*{name}"):
        compiled(loss, (W, X), name, **options)


def test_program_larger_than_the_device():
    huge = jax.ShapeDtypeStruct((65536, 65536), jnp.float32)  # 16 GiB
    program = compiled(lambda x: (x @ x) @ x, (huge,), "v5e")
    assert program.oom is not None
    assert program.oom.needed_bytes >= 16 << 30
    assert program.oom.limit_bytes == round(15.75 * 2**30)
    assert has_buffers(program)
    assert program.executable is None and program.codegen_error is None


@pytest.mark.parametrize("name", ["v2", "v3", "v4", "v5e"])  # equal in all versions
def test_the_limit_in_the_table_is_the_compilers(name):
    t = remat.target(name)

    def fits(n_bytes):
        x = jax.ShapeDtypeStruct((n_bytes // 4096, 8, 128), jnp.float32)
        program = compiled(lambda x: x[0, 0, :1], (x,), name)
        assert has_buffers(program)
        return program.oom is None

    assert fits(t.available_bytes - MIB)
    assert not fits(t.available_bytes + 4096)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("v5e", {"xla_no_such_thing": 1}, "Look at compiler_options"),
        ("cpu", {"xla_cpu_enable_fast_math": "perhaps"}, "Look at compiler_options"),
    ],
)
def test_wrong_options(name, options, said):
    with pytest.raises(CompileError, match=said):
        compiled(loss, (W, X), name, compiler_options=options)


def test_offload_from_a_nested_scan_on_gpu_says_what_to_do():
    from jax.ad_checkpoint import checkpoint_name

    policy = remat.policies.offload_names("h")

    def body(h, w):
        h = checkpoint_name(h, "h")
        return jnp.tanh(h @ w) @ w, None

    def outer(h, ws):
        return jax.lax.scan(jax.checkpoint(body, policy=policy), h, ws)

    def nested(ws, x):
        return jax.lax.scan(outer, x, ws)[0].sum()

    ws = jax.ShapeDtypeStruct((4, 3, 64, 64), jnp.float32)
    x = jax.ShapeDtypeStruct((128, 64), jnp.float32)
    with pytest.raises(CompileError, match="scan inside a scan like this: save"):
        compiled(jax.grad(nested), (ws, x), "h200")


@pytest.mark.parametrize("shape", [(256,), (256, 1)])
def test_offload_that_would_abort_the_compiler_is_refused(shape):
    def offloaded(carry, xs):
        step = lambda carry, x: (jnp.tanh(carry * x), None)  # noqa: E731
        return remat.scan(step, carry, xs, segments=None, offload_carry=True)[0].sum()

    args = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((8,), "f4")
    with pytest.raises(CompileError, match=r"v3.*float32\[256.*second dimension"):
        lower(jax.grad(offloaded), args, {}, remat.target("v3"))
    lower(jax.grad(offloaded), args, {}, remat.target("v5e"))
    square = jax.ShapeDtypeStruct((256, 2), jnp.float32)
    lower(jax.grad(offloaded), (square, args[1]), {}, remat.target("v3"))


def test_what_was_lowered_for_here_is_not_compiled_for_elsewhere():
    lowered = jax.jit(loss).lower(W, X)
    with pytest.raises(remat.TargetError, match=r"lowered for cpu, not for v5e.*mesh"):
        compile_lowered(lowered, remat.target("v5e"))


def test_folders_are_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    compiled(loss, (W, X), "cpu")
    compiled(loss, (W, X), "v5e", probe=True)
    with pytest.raises(CompileError):
        compiled(loss, (W, X), "cpu", compiler_options={"xla_nope": 1})
    assert list(tmp_path.iterdir()) == []


def test_folders_of_a_process_that_ends_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with dump() as one, dump() as other:
        (one.folder / "file").write_text("")
        assert len({one.folder, other.folder, *tmp_path.iterdir()}) == 2
        remove_folders()
        assert list(tmp_path.iterdir()) == []


def test_persistent_cache_is_left_alone(tmp_path):
    """Neither hides a dump, nor takes our programs, nor is off for the user's."""
    from jax.experimental.compilation_cache import compilation_cache

    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    compilation_cache.reset_cache()
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        assert has_buffers(compiled(loss, (W, X), "cpu"))
        assert list(tmp_path.iterdir()) == []
        jax.jit(loss).lower(W, X).compile()
        assert len(list(tmp_path.glob("*-cache"))) == 1
        assert has_buffers(compiled(loss, (W, X), "cpu"))
        assert len(list(tmp_path.glob("*-cache"))) == 1
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.mark.parametrize(("name", "options"), [("v5e", {"probe": True}), ("cpu", {})])
def test_threads_do_not_mix_their_programs(name, options):
    def program(n):
        def fn(x):
            return jax.grad(loss)(jnp.ones((256, 256)), x * n)

        fn.__name__ = f"program_{n}"
        return compiled(fn, (X,), name, **options)

    alone = {n: program(n) for n in (1, 2, 3)}
    together = {}
    threads = [
        threading.Thread(target=lambda n=n: together.update({n: program(n)}))
        for n in alone
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, one in alone.items():
        assert together[n].program_hash == one.program_hash
        assert together[n].stats == one.stats
        assert f"jit_program_{n}".encode() in together[n].hlo_proto
        assert has_buffers(together[n])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["v2", "v3", "v4", "v5p", "v6e", "tpu7x", "v5e:16x16", "h100:2x8"]
)
def test_every_generation_compiles_in_full(name):
    program = compiled(jax.grad(loss), (W, X), name)
    assert program.exact and program.stats is not None and has_buffers(program)


# Hashes


def test_hash_is_of_program_target_and_options():
    t = remat.target("v5e")

    def elsewhere(w, x):
        # The same program from another line.
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)

    elsewhere.__name__ = "loss"
    base = program_hash(lower(loss, (W, X), {}, t), t, {})
    assert program_hash(lower(elsewhere, (W, X), {}, t), t, {}) == base
    assert program_hash(lower(loss, (W, X), {}, t), t, {"xla_x": 1}) != base
    assert program_hash(lower(jax.grad(loss), (W, X), {}, t), t, {}) != base
    other = remat.target("v6e")
    assert program_hash(lower(loss, (W, X), {}, other), other, {}) != base


# Lowering


def test_leaves_that_are_no_arrays_are_held_static():
    seen = {}

    def fn(x, train, *, activation, sizes, mode=None):
        seen.update(train=train, sizes=sizes, mode=mode)
        return {"y": activation(x), "mode": mode, "n": 3}

    kwargs = dict(activation=jnp.tanh, sizes={"n": 2}, mode="fast")
    lowered = lower(fn, (X, True), kwargs, remat.target("v5e"))
    assert seen == {"train": True, "sizes": {"n": 2}, "mode": "fast"}
    assert [out.shape for out in jax.tree.leaves(lowered.out_info)] == [X.shape]


def test_nothing_is_allocated():
    vast = jax.ShapeDtypeStruct((1 << 20, 1 << 20), jnp.bfloat16)  # 2 TiB
    lowered = lower(lambda x: (x * 2).sum(), (vast,), {}, remat.target("cpu"))
    assert "tensor<1048576x1048576xbf16>" in lowered.as_text()


@pytest.mark.parametrize("name", ["v5e", "h100", "cpu"])
@pytest.mark.parametrize(
    "key", [jr.key(0), jax.eval_shape(lambda: jr.key(0))], ids=["key", "shape"]
)
def test_typed_keys(name, key):
    lowered = lower(lambda k: jr.normal(k, (8,)), (key,), {}, remat.target(name))
    assert lowered.out_info.shape == (8,)


def test_arrays_numpy_and_closed_over_constants():
    committed = jax.device_put(jnp.ones(8), jax.devices()[1])

    def fn(x, y, z):
        return x * committed + y + z

    args = (np.ones(8), jnp.ones(8), committed)
    program = compiled(fn, args, "v5e", probe=True)
    assert has_buffers(program)


def test_a_function_without_arrays_is_lowered_for_the_target():
    t = remat.target("v5e")
    lowered = lower(lambda n: jnp.ones(n), (8,), {}, t)
    assert compat.lowered_platform(lowered) == "tpu"


@pytest.mark.parametrize("jit", [lambda fn: fn, jax.jit, nnx.jit])
def test_nnx_modules_are_arguments(jit):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.activation = jnp.tanh

        def __call__(self, x):
            return self.activation(self.dropout(self.norm(self.linear(x))))

    @jit
    def step(model, x):
        return nnx.value_and_grad(lambda m, x: m(x).sum())(model, x)

    args = (Model(nnx.Rngs(0)), jax.ShapeDtypeStruct((4, 8), jnp.float32))
    lowered = lower(step, args, {}, remat.target("v5e"))
    assert compat.lowered_platform(lowered) == "tpu"
    value, _ = lowered.out_info
    assert value.shape == ()


def prints(x):
    def body(h, _):
        jax.debug.print("{}", h[0, 0])
        return h * 2, None

    return jax.lax.scan(body, x, None, length=2)[0]


def test_callbacks_need_the_gpu():
    line = prints.__code__.co_firstlineno + 2
    said = rf"h100.*debug_\w+ at .*test_compile.py:{line}"
    with pytest.raises(remat.TargetError, match=said):
        lower(prints, (X,), {}, remat.target("h100"))


@pytest.mark.parametrize("name", ["v5e", "cpu"])
def test_callbacks_do_not_need_a_tpu(name):
    assert has_buffers(compiled(prints, (X,), name))


# Shardings


@pytest.mark.parametrize("name", ["v5e:2x4", "cpu:8"])
def test_figures_of_a_sharded_program_are_per_device(name):
    mesh = remat.target(name).mesh((4, 2), ("data", "model"))

    def placed(array, *spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    program = compiled(loss, (placed(W, None, "model"), placed(X, "data")), name)
    assert program.stats is not None
    assert program.stats.argument_bytes == (256 * 256 // 2 + 512 * 256 // 4) * 4


def test_arrays_sharded_here_are_moved_to_the_target():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    w = jax.device_put(
        jnp.ones(W.shape), NamedSharding(mesh, PartitionSpec(None, "model"))
    )
    # An array that lies on no particular device follows the sharded one, whole.
    program = compiled(loss, (w, jnp.ones(X.shape)), "v5e:2x4")
    assert program.stats is not None
    assert program.stats.argument_bytes == (256 * 256 // 2 + 512 * 256) * 4
    with pytest.raises(remat.TargetError, match=r'v5e has 4.*"v5e:2x4"'):
        lower(loss, (w, X), {}, remat.target("v5e"))


def test_abstract_meshes_are_filled_with_the_targets_devices():
    mesh = jax.sharding.AbstractMesh((4,), ("data",))
    x = jax.ShapeDtypeStruct(
        X.shape, X.dtype, sharding=NamedSharding(mesh, PartitionSpec("data"))
    )
    program = compiled(loss, (W, x), "cpu:4")
    assert program.stats is not None
    assert program.stats.argument_bytes == (256 * 256 + 512 * 256 // 4) * 4


@pytest.mark.parametrize("single", [False, True])
def test_arguments_in_host_memory_stay_there(single):
    on_host = remat.target("v5e").sharding().with_memory_kind("pinned_host")
    here = jax.sharding.SingleDeviceSharding(
        jax.devices()[0], memory_kind="pinned_host"
    )
    sharding = here if single else on_host
    w = jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=sharding)

    def fn(w, x):
        return jax.device_put(w, jax.memory.Space.Device).sum() + x

    stats = compiled(fn, (w, X), "v5e").stats
    assert stats is not None
    assert stats.argument_bytes == 512 * 256 * 4


@pytest.mark.parametrize("kind", ["shard_map", "constraint"])
def test_functions_with_a_mesh_of_their_own(kind):
    mesh = remat.target("v5e").mesh((4,), ("data",))
    spec = PartitionSpec("data")

    def constraint(x):
        def body(h, _):
            return jax.lax.with_sharding_constraint(h * 2, NamedSharding(mesh, spec)), 0

        return jax.lax.scan(body, x, None, length=3)[0]

    fn = constraint
    if kind == "shard_map":
        fn = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=spec, out_specs=spec)
    program = compiled(fn, (X,), "v5e", probe=True)
    assert has_buffers(program)


# Models that ask for the wrong device


def test_a_mesh_of_other_devices_is_refused_with_what_to_do():
    here = NamedSharding(Mesh(jax.devices()[:1], ("data",)), PartitionSpec())

    def constrained(x):
        return jax.lax.with_sharding_constraint(x, here)

    with pytest.raises(remat.TargetError, match=r"remat\.target\('v5e'\)\.mesh"):
        lower(constrained, (X,), {}, remat.target("v5e"))


def asks(x):
    if jax.default_backend() == "tpu":
        return x
    return x * len(jax.devices()) * len(jax.devices("cpu"))


def test_asking_for_the_device_warns_with_the_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lower(asks, (X,), {}, remat.target("v5e"))
    found = [w for w in caught if w.category is BackendQueryWarning]
    first = asks.__code__.co_firstlineno + 1
    assert [w.lineno for w in found] == [first, first + 2]
    assert {w.filename for w in found} == {__file__}
    assert f"{__file__}:{first} asks jax.default_backend() and hears 'cpu'" in str(
        found[0].message
    )


def test_asking_here_or_from_elsewhere_does_not_warn():
    questions = jax.default_backend, jax.devices, jax.local_devices

    def lets_another_thread_ask(x):
        thread = threading.Thread(target=jax.default_backend)
        thread.start()
        thread.join()
        return x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lower(asks, (X,), {}, remat.target("cpu"))
        lower(lets_another_thread_ask, (X,), {}, remat.target("v5e"))
        # JAX's own questions.
        lower(lambda k: jr.normal(k, (8,)), (jr.key(0),), {}, remat.target("v5e"))
    assert questions == (jax.default_backend, jax.devices, jax.local_devices)


# What the compilers say of memory

SHORT = (
    "RESOURCE_EXHAUSTED: {code}Ran out of memory on HBM, the total memory required for "
    "HLO temporaries (51.50G) exceeds available HBM (15.75G)."
)
LONG = """RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: XLA:TPU compile permanent error.
Ran out of memory in memory space hbm. Used 1.79G of 998.00M hbm. Exceeded hbm capacity
by 9.18M.

Total hbm usage >= 2.04G:
    reserved        258.00M
"""


@pytest.mark.parametrize(
    ("message", "needed", "limit"),
    [
        (SHORT.format(code=""), 51.5 * 2**30, 15.75 * 2**30),
        (
            SHORT.format(code="E1000: CompileTimeHbmOom: "),
            51.5 * 2**30,
            15.75 * 2**30,
        ),
        (LONG, 1.79 * 2**30, 998 * MIB),
    ],
)
def test_messages_of_the_tpu_compiler(message, needed, limit):
    oom = parse_out_of_memory(message)
    assert oom is not None
    assert (oom.needed_bytes, oom.limit_bytes) == (round(needed), round(limit))
    assert oom.message == message


@pytest.mark.parametrize("message", ["", "INTERNAL: no", "Used 1G of", "(1.5G)"])
def test_other_messages(message):
    assert parse_out_of_memory(message) is None


def test_the_long_message_is_still_said():
    # The argument fits, and with it some 40 KiB of code do not.
    n = (remat.target("v5e").available_bytes - 8192) // 4096
    x = jax.ShapeDtypeStruct((n, 8, 128), jnp.float32)
    oom = compiled(lambda x: x[0, 0, :1], (x,), "v5e").oom
    assert oom is not None and "reserved" in oom.message
    assert oom.needed_bytes >= oom.limit_bytes == round(15.75 * 2**30)


def test_programs_are_values():
    program = compiled(loss, (W, X), "cpu")
    with pytest.raises(dataclasses.FrozenInstanceError):
        program.exact = False  # pyright: ignore
    assert "executable" not in repr(program)
