"""The report's data is what its schema and its page say."""

import json

import jax
import jax.numpy as jnp
import jsonschema
import pytest

import remat
from remat._report._build import report_from_program
from tests.hlo_programs import TARGETS, donated, stacked
from tests.report_schema import CLASSES, PAGE, SCHEMA_FILE, docstrings, page, schema


def test_schema_and_page_are_those_of_the_classes():
    made = schema()
    assert json.loads(SCHEMA_FILE.read_text()) == made, "run -m tests.report_schema"
    assert PAGE.read_text() == page(made)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_field_is_described(cls):
    assert docstrings(cls).keys() == set(cls.__dataclass_fields__)


@pytest.mark.parametrize("program", [stacked, donated])
@pytest.mark.parametrize("name", TARGETS)
def test_reports_conform(name, program):
    report = report_from_program(program(name))
    jsonschema.validate(json.loads(report.to_json()), schema())


def test_an_explanation_conforms():
    layer = jax.checkpoint(lambda x, w: jnp.tanh(jnp.sin(x @ w) @ w))
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    found = remat.explain(
        lambda w, x: layer(layer(x, w), w).sum(),
        *(shape, shape),
        target="cpu",
        against="none",
    )
    data = json.loads(found.to_json())
    jsonschema.validate(data, schema())
    assert data["diff"] and data["proof"]


def test_what_is_no_report_does_not_conform():
    data = report_from_program(stacked("cpu")).to_dict()
    data["buffers"][0]["category"] = "activations"
    with pytest.raises(jsonschema.ValidationError, match="is not one of"):
        jsonschema.validate(json.loads(json.dumps(data)), schema())
