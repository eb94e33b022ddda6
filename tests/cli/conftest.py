"""Commands of these tests say nothing about compiling, which depends on what earlier tests have compiled."""

import pytest

from sparseallreduce.cli import compiling


@pytest.fixture(autouse=True)
def no_notice_of_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_PATIENCE", "_PATIENCE_WITHOUT_TERMINAL"):
        monkeypatch.setattr(compiling, name, 3600.0)
