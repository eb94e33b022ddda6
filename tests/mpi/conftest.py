"""The launches of all cases, which the first test of `test_mpi.py` begins."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from mpi_outcomes import Outcomes, wanted_cases

HERE = Path(__file__).parent
WAITING = ("cases_promises", "cases_stalls", "cases_timeouts")


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    items = [item for item in request.session.items if item.path == HERE / "test_mpi.py"]
    all_outcomes = Outcomes(wanted_cases(items), tmp_path_factory, HERE, WAITING)
    yield all_outcomes
    all_outcomes.close()
