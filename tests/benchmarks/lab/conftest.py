"""A network of namespaces for each test; where there can be none, the test skips with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.net import Net, why_not


@pytest.fixture(scope="session")
def lab() -> None:
    """For tests that make their own `Net`."""
    if reason := why_not():
        pytest.skip(f"no network lab here: {reason}")


@pytest.fixture
def net(lab: None) -> Iterator[Net]:
    with Net() as net:
        yield net


@pytest.fixture(scope="session")
def whole_group() -> None:
    """For tests of whole groups, which train."""
    pytest.importorskip("torch")
