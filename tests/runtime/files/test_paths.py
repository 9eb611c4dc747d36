"""Tests of names of folders."""

import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from spell_jax.runtime.files import paths


@pytest.mark.parametrize("name", ["[x]", "a*b", "a?b", "a\\b", "a\udcffb"])
def test_workdir_from_which_no_checkpoint_can_be_read_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"^workdir = .*could not be read again; must be UTF-8"):
        paths.make_workdir(epath.Path(tmp_path / name))
    assert not list(tmp_path.iterdir())


def test_checkpoint_can_be_read_from_a_workdir_of_other_odd_names(tmp_path):
    folder = epath.Path(tmp_path / "a b%s#{0}'\"$~:|é\n@%20")
    paths.make_workdir(folder)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(folder / "1", {"a": np.arange(4)})
        assert checkpointer.restore(folder / "1")["a"].tolist() == [0, 1, 2, 3]
