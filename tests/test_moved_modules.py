"""Modules that moved, most of them into packages: each old name gives the same module, and says where it is now."""

import importlib
import sys
import warnings

import pytest

from astuner_compat.moved import MOVED
from tests.table import table


@table("old, now", MOVED.items())
def test_an_old_name_is_the_same_module_as_the_new_one(old: str, now: str):
    there = importlib.import_module(now)
    spec = there.__spec__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(old.rpartition(".")[0])
    sys.modules.pop(old, None)
    with pytest.warns(FutureWarning, match=f"^{old} .*{now}; "):
        assert importlib.import_module(old) is there
    assert there.__spec__ is spec
    assert there.__name__ == now
