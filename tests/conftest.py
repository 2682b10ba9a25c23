from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator

import pytest
from tiny_models import FAMILIES


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Each tiny model family in turn."""
    return str(request.param)


@pytest.fixture
def event_loop_for_core() -> Iterator[None]:
    """Core's synchronous code takes the thread's event loop, or makes one and never closes it, which pytest reports."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Reports travel between processes as UTF-8, and what tests of odd file names print cannot always be written so."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    if isinstance(report.longrepr, str):
        report.longrepr = report.longrepr.encode(errors="backslashreplace").decode()
    return report
