"""The launches of all cases: those that leave cores idle begin with the first test of this folder, beside which they go."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from mpi_outcomes import Outcomes, wanted_cases

HERE = Path(__file__).parent
WAITING = ("cases_promises", "cases_stalls", "cases_timeouts")


@pytest.fixture(scope="session", autouse=True)
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    items = [item for item in request.session.items if item.path == HERE / "test_mpi.py"]
    all_outcomes = Outcomes(wanted_cases(items), tmp_path_factory, HERE, WAITING)
    all_outcomes.begin()
    yield all_outcomes
    all_outcomes.close()
