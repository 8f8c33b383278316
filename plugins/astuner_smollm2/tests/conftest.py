import pytest

from ._small import use_small


@pytest.fixture
def small(tmp_path, monkeypatch):
    """As `use_small`, in ``tmp_path``."""
    return use_small(tmp_path, monkeypatch)
