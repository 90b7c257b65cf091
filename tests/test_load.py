import sys
import textwrap

import pytest

from remat._cli._load import LoadError, load_model

MINE = """
    import jax, jax.numpy as jnp
    not_a_function = 3
    shape = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    def loss(w): return (w ** 2).sum()
    def make(): return loss, (shape,)
    def sized(batch=2): return loss, (jax.ShapeDtypeStruct((batch, 4), jnp.float32),)
    def options(): return loss, [shape], {"has_aux": False}
    def wrong(): return loss
    def wrong_args(): return loss, shape
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "remat_test_mine.py").write_text(textwrap.dedent(MINE))
    (tmp_path / "remat_test_broken.py").write_text("import not_there_at_all")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "remat_test_mine"
    sys.modules.pop("remat_test_mine", None)


def test_loads_a_function(mine):
    loaded = load_model(f"{mine}:make")
    assert loaded.args[0].shape == (4, 4)
    assert load_model(f"{mine}:sized", batch=7).args[0].shape == (7, 4)
    assert load_model(f"{mine}:options").options == {"has_aux": False}


def test_loads_a_preset():
    loaded = load_model("gpt2-tiny", batch=3)
    assert loaded.name == "gpt2-tiny"
    assert loaded.describe["batch"] == 3


@pytest.mark.parametrize(
    ("name", "sizes", "match"),
    [
        ("gpt3", {}, "gpt2"),
        ("gpt2", {"batch": -1}, "batch must be at least 1"),
        ("gpt2", {"seq": 0}, "seq must be at least 1"),
        ("not_there_at_all:make", {}, "no module 'not_there_at_all'"),
        ("remat_test_broken:make", {}, "importing remat_test_broken failed"),
        (":make", {}, "not a module"),
        ("remat_test_mine:maek", {}, "did you mean make"),
        ("remat_test_mine:not_a_function", {}, "no function"),
        ("remat_test_mine:wrong", {}, "must return"),
        ("remat_test_mine:wrong_args", {}, "args as a tuple"),
        ("remat_test_mine:make", {"batch": 2}, "no parameter 'batch'"),
    ],
)
def test_says_what_is_wrong(mine, name, sizes, match):
    with pytest.raises(ValueError, match=match) as error:
        load_model(name, **sizes)
    assert isinstance(error.value, LoadError) or name == "gpt3"
