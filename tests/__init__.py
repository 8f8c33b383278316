"""Tests that span packages, and what all tests share: each package has its own in its folder `tests`."""
