"""The charts of the site are drawn from the tables of docs/performance.md: each finds its table, and has a mark for every value."""

import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest

EXTENSIONS = Path(__file__).parent.parent / "docs" / "extensions"
sys.path.insert(0, str(EXTENSIONS))
from charts import CHARTS, WIDTH, _entropy_limit, draw, numbers, tables  # noqa: E402

sys.path.remove(str(EXTENSIONS))

each_chart = pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.title)


@each_chart
def test_a_chart_has_a_mark_for_every_value_of_its_columns(chart):
    rows = tables()[chart.section][chart.table]
    expected = sum(len(numbers(row[column])) for row in rows for column in chart.series)
    assert draw(chart).count('class="mark ') == expected + len(chart.series) > len(chart.series)  # and those of the legend


@each_chart
def test_marks_stand_on_a_logarithmic_axis_inside_the_picture(chart):
    marks = re.findall(r'(?:translate\(|cx=")([\d.]+)[^<]*<title>[^<]*: ([^<]*)</title>', draw(chart))
    values = [(numbers(cell.removesuffix(chart.unit)), float(x)) for x, cell in marks]
    places = np.array([(math.log10(value[0]), x) for value, x in values if len(value) == 1])
    assert len(places) >= 2 and (places[:, 1] > 0).all() and (places[:, 1] < WIDTH).all()
    slope, start = np.polyfit(*places.T, 1)
    assert slope > 0 and np.abs(start + slope * places[:, 0] - places[:, 1]).max() < 0.2


def test_the_entropy_limit_is_that_of_the_design():
    limits = [_entropy_limit({"hosts, wire": "2, 1 Gbit/s", "density": density}) for density in ("0.1 %", "1 %", "6.25 %")]
    assert limits == pytest.approx([0.73, 6.7, 39], rel=0.01)


@pytest.mark.parametrize(
    "cell,expected",
    [("7.3", [7.3]), ("0.1 %", []), ("", []), ("OkTopkSGD", []), ("128 to 136", [128, 136]), ("1/2,537", [1 / 2537]), (".5", [0.5])],
)
def test_cells_are_read_as_their_values(cell, expected):
    assert numbers(cell) == expected
