"""A network of namespaces for each test; where none can be made, tests skip with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.net import Net, why_not


@pytest.fixture(scope="session")
def lab() -> None:
    """Required by tests that make their own `Net`."""
    if reason := why_not():
        pytest.skip(f"the network lab is not available: {reason}")


@pytest.fixture
def net(lab: None) -> Iterator[Net]:
    with Net() as net:
        yield net


@pytest.fixture(scope="session")
def whole_group() -> None:
    """Required by tests whose groups train."""
    pytest.importorskip("torch")
