"""Reports of programs that other jobs compiled."""

import json

import pytest

import remat
from remat._hlo import HloError
from remat._report._build import report_from_program
from remat._targets._target import TargetError
from tests.hlo_programs import TARGETS, Hlo, donated, proto_of, stacked


def dumped(folder, name, program):
    path = folder / f"module_0001.{name}.after_optimizations.hlo.pb"
    path.write_bytes(proto_of(program))
    return path


@pytest.mark.parametrize("name", TARGETS)
def test_a_file_and_its_folder_give_the_same_report(name, tmp_path):
    path = dumped(tmp_path, "jit_step", stacked(name))
    (tmp_path / "module_0000.jit_tiny.before_optimizations.hlo.pb").write_bytes(b"\n\0")
    (tmp_path / "module_0001.notes.txt").write_text("not read")
    report = remat.report_from_dump(path, target=name)
    assert report.peak_bytes == report_from_program(stacked(name)).peak_bytes
    assert remat.report_from_dump(tmp_path, target=name) == report


def test_of_several_programs_the_largest_is_reported(tmp_path):
    dumped(tmp_path, "a", donated("cpu"))
    dumped(tmp_path, "b", stacked("cpu"))
    report = remat.report_from_dump(tmp_path)
    sizes = {len(proto_of(p("cpu"))): p for p in (donated, stacked)}
    assert report.peak_bytes == report_from_program(sizes[max(sizes)]("cpu")).peak_bytes
    assert "1 more programs" in report.notes[-1]


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda path: None, HloError, "no such file"),
        (lambda path: path.mkdir(), HloError, "none with a buffer assignment"),
        (lambda path: path.write_bytes(b""), HloError, "0 bytes"),
        (lambda path: path.write_bytes(b"\xff" * 100), HloError, "no HloProto"),
        (
            lambda path: path.write_bytes(proto_of(stacked("h100"))),
            TargetError,
            "say for which.*h100",
        ),
    ],
)
def test_wrong_paths_are_one_clear_error(make, error, match, tmp_path):
    make(tmp_path / "x.hlo.pb")
    with pytest.raises(error, match=match):
        remat.report_from_dump(tmp_path / "x.hlo.pb")


def test_a_target_of_another_kind_is_refused(tmp_path):
    path = dumped(tmp_path, "a", stacked("h100"))
    with pytest.raises(TargetError, match="is a TPU; choose one of"):
        remat.report_from_dump(path, target="v5e")


def test_a_program_that_tells_no_platform_takes_any_target(tmp_path):
    hlo = Hlo()
    hlo.add("parameter", [256], op_name="x")
    hlo.allocate(1024, (hlo.buffer(1), 0), is_entry_computation_parameter=True)
    path = tmp_path / "a.hlo.pb"
    path.write_bytes(hlo.bytes())
    assert remat.report_from_dump(path, target="v5e").peak_bytes == 1024
    assert remat.report_from_dump(path).target == "cpu"


def test_a_dump_of_a_job_of_its_own(tmp_path):
    import jax
    import jax.numpy as jnp

    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_proto": True}
    lowered = jax.jit(lambda x: jnp.sin(x @ x)).lower(jnp.ones((32, 32)))
    lowered.compile(compiler_options=options)
    report = remat.report_from_dump(tmp_path)
    assert report.argument_bytes == report.output_bytes == 32 * 32 * 4
    assert json.loads(report.to_json())["schema"] == "remat.report/1"
