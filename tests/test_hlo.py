"""The reader of compiled programs."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remat._hlo import HloError, Module, parse
from remat._hlo import _trips as trips
from remat._hlo._buffers import LiveSet, peak
from remat._hlo._flow import origins, readers
from tests.hlo_programs import (
    LAYERS,
    ROWS,
    TARGETS,
    WIDTH,
    Hlo,
    buffers_of,
    donated,
    module_of,
    proto_of,
    stacked,
)


def chain() -> Hlo:
    """Parameter of 4 bytes, sine, cosine of it, a sum: buffers a, b, c of 400 bytes."""
    hlo = Hlo()
    x = hlo.add("parameter", [100], op_name="x")
    a = hlo.add("sine", [100], x, op_name="jit(f)/jvp()/sin")
    b = hlo.add("cosine", [100], a, op_name="jit(f)/jvp()/cos")
    out = hlo.add("add", [100], a, b, op_name="jit(f)/jvp()/add")
    buffers = [hlo.buffer(one) for one in (x, a, b, out)]
    hlo.allocate(400, (buffers[0], 0), is_entry_computation_parameter=True)
    hlo.allocate(400, (buffers[3], 0), maybe_live_out=True)
    hlo.allocate(1024, (buffers[1], 0), (buffers[2], 512))
    hlo.trace(("alloc", 2), ("alloc", 3), ("free", 2), ("free", 3))
    return hlo


def first_peak(module: Module) -> LiveSet:
    buffers = buffers_of(module)
    return peak(buffers, buffers.traces[0])


@pytest.mark.parametrize("name", TARGETS)
def test_a_compiled_program_is_read_whole(name):
    module = module_of(stacked(name))
    assert [p.op_name for p in module.entry.parameters] == ["w", "x"]
    assert module.entry.parameters[0].shape.dimensions == (LAYERS, WIDTH, WIDTH)
    assert module.entry.parameters[1].shape.bytes == ROWS * WIDTH * 4
    assert module.entry.schedule
    assert buffers_of(module).traces


@pytest.mark.parametrize("name", TARGETS)
def test_trip_counts_of_forward_and_backward_loop(name):
    module = module_of(stacked(name))
    assert list(trips.trip_counts(module).values()) == [LAYERS, LAYERS]


@pytest.mark.parametrize("name", TARGETS)
def test_trip_counts_can_be_derived_where_none_are_stated(name):
    module = module_of(stacked(name))
    loops = [one for one in module.instructions.values() if one.opcode == "while"]
    assert [trips._derived(module, loop) for loop in loops] == [LAYERS, LAYERS]


@pytest.mark.parametrize("name", TARGETS)
def test_bodies_run_as_often_as_their_loops(name):
    module = module_of(stacked(name))
    runs = trips.runs_of_computations(module, trips.trip_counts(module))
    bodies = [
        one.called[0] for one in module.instructions.values() if len(one.called) == 2
    ]
    assert {runs[body] for body in bodies} == {LAYERS}
    assert runs[module.entry.id] == 1


@pytest.mark.parametrize("name", TARGETS)
def test_a_donated_argument_is_an_alias(name):
    module = module_of(donated(name))
    assert [alias.parameter_number for alias in module.aliases] == [0]


@pytest.mark.parametrize("name", TARGETS)
def test_the_stack_leads_back_to_the_value_written_into_it(name):
    module = module_of(stacked(name))
    stacks = [
        (module.instructions[one.instruction], one.index)
        for one in buffers_of(module).logical.values()
        if module.instructions[one.instruction].opcode == "while"
    ]
    size = LAYERS * ROWS * WIDTH
    stack = next(v for v in stacks if v[0].shape.at(v[1]).size == size)
    met = [instruction.op_name for instruction, _ in origins(module, stack)]
    assert any(name.endswith("/tanh") for name in met)


@pytest.mark.parametrize("name", TARGETS)
def test_the_stack_is_read_by_the_backward_loop(name):
    module = module_of(stacked(name))
    forward = next(one for one in module.instructions.values() if one.opcode == "while")
    size = LAYERS * ROWS * WIDTH
    index = next(i for i, leaf in forward.shape.leaves() if leaf.size == size)
    found = [one.op_name for one in readers(module, (forward, index))]
    assert any("transpose(" in name for name in found)


def test_the_peak_of_a_heap_by_hand():
    module = parse(chain().bytes())
    live = first_peak(module)
    assert live.bytes == 400 + 400
    assert sorted(live.groups) == [(2,), (3,)]


def test_buffers_that_share_a_place_count_once():
    hlo = chain()
    del hlo.buffers.heap_simulator_traces[:]
    hlo.trace(("alloc", 2), ("share", 3, 2), ("free", 2), ("free", 3))
    module = parse(hlo.bytes())
    live = first_peak(module)
    assert live.bytes == 400
    assert live.groups == ((2,),)


def test_a_place_is_free_when_its_last_holder_is():
    hlo = chain()
    del hlo.buffers.heap_simulator_traces[:]
    hlo.trace(("alloc", 2), ("share", 3, 2), ("free", 2), ("alloc", 4))
    module = parse(hlo.bytes())
    live = first_peak(module)
    assert live.bytes == 400 + 400
    assert live.groups == ((2, 3), (4,))


def test_sizes_are_64_bit():
    hlo = chain()
    huge = 3 * 2**40
    hlo.buffers.logical_buffers[1].size = huge
    hlo.buffers.buffer_allocations[2].assigned[0].size = huge
    hlo.buffers.buffer_allocations[2].size = huge + 2**20
    module = parse(hlo.bytes())
    assert first_peak(module).bytes == huge + 400


def broken(change):
    hlo = chain()
    change(hlo)
    return hlo.bytes()


@pytest.mark.parametrize(
    ("proto", "message"),
    [
        (b"", "0 bytes"),
        (b"not a proto at all, but text", "no HloProto|no HLO module"),
        (b"\x1f\x8b\x08\x00\x00\x00", "no HloProto|no HLO module"),
        (chain().bytes()[:-7], "truncated"),
        (broken(lambda h: h.module.ClearField("computations")), "no HLO module"),
        (broken(lambda h: h.entry.ClearField("root_id")), "no root"),
        (broken(lambda h: setattr(h.module, "entry_computation_id", 9)), "no entry"),
        (
            broken(lambda h: h.entry.instructions[1].operand_ids.append(99)),
            "not defined",
        ),
        (
            broken(lambda h: setattr(h.entry.instructions[1], "id", 1)),
            "not defined|two",
        ),
        (
            broken(lambda h: h.entry.instructions[1].called_computation_ids.append(1)),
            "calls itself",
        ),
        (
            broken(lambda h: h.entry.instructions[1].called_computation_ids.append(7)),
            "not there",
        ),
        (
            broken(lambda h: setattr(h.buffers.logical_buffers[1], "size", -1)),
            "-1 bytes",
        ),
        (
            broken(lambda h: setattr(h.buffers.buffer_allocations[2], "size", 600)),
            "cannot hold",
        ),
        (
            broken(
                lambda h: setattr(
                    h.buffers.buffer_allocations[0], "parameter_number", 5
                )
            ),
            "no parameter",
        ),
        (
            broken(
                lambda h: h.buffers.heap_simulator_traces[0].events.add(buffer_id=77)
            ),
            "not there",
        ),
        (
            broken(lambda h: h.entry.instructions[0].shape.dimensions.append(-4)),
            "negative size",
        ),
    ],
)
def test_what_is_wrong_with_bytes_is_said(proto, message):
    with pytest.raises(HloError, match=message):
        parse(proto)


def test_fields_of_later_versions_are_skipped():
    later = chain().bytes() + b"\xfa\x3f\x05hello"  # field 1023, length-delimited
    assert len(parse(later).instructions) == 4


@given(st.binary(max_size=400))
def test_random_bytes_are_refused(data):
    with pytest.raises(HloError):
        parse(data)


@pytest.mark.parametrize("name", TARGETS)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(seed=st.integers(0, 2**32), n_changes=st.integers(1, 8), cut=st.booleans())
def test_mutated_programs_are_read_or_refused(name, seed, n_changes, cut):
    data = bytearray(proto_of(stacked(name)))
    chance = random.Random(seed)
    for _ in range(n_changes):
        data[chance.randrange(len(data))] = chance.randrange(256)
    if cut:
        del data[chance.randrange(len(data)) :]
    try:
        module = parse(bytes(data))
    except HloError:
        return
    trips.runs_of_computations(module, trips.trip_counts(module))
    if module.buffers:
        for trace in module.buffers.traces:
            assert peak(module.buffers, trace).bytes >= 0
