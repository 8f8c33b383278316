"""The plugin is found, cheap to list, and as good as its word."""

from astuner.testing import check_plugin


def test_plugin():
    plugin = check_plugin("older")
    assert set(plugin.provides) == {"judge", "task reader", "workflow", "environment", "backbone"}
