"""Whole numbers of the command line, as people write them."""

import json

import click
import pytest
from click_runner import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from sparseallreduce.cli import main
from sparseallreduce.cli.numbers import Whole, whole_number


@pytest.mark.parametrize("text", ["1000000", "1e6", "1E+6", "1_000_000", "+1e6", "1.0e6", " 1e6 "])
def test_a_million_may_be_written_so(text):
    assert whole_number(text) == 1_000_000


@pytest.mark.parametrize("text", ["", "1.5", "1e-1", "nan", "inf", "1e999999999", "a", "1,000", "0x10", "1__0.5"])
def test_what_is_no_whole_number_is_none(text):
    assert whole_number(text) is None
    with pytest.raises(click.BadParameter, match="is not a whole number, such as 1000000, 1_000_000 or 1e6"):
        Whole().convert(text, None, None)


@given(st.integers(-(2**63), 2**63))
def test_every_whole_number_is_itself(number):
    assert whole_number(str(number)) == number


def test_bounds_hold_for_all_spellings():
    with pytest.raises(click.BadParameter, match="is not in the range"):
        Whole(max=10).convert("1e6", None, None)


def integer_options():
    for name in main.list_commands(None):
        for parameter in main.get_command(None, name).params:
            if isinstance(parameter.type, click.IntRange | type(click.INT)):
                yield name, parameter.name, parameter.type


def test_every_integer_option_takes_an_exponent():
    found = list(integer_options())
    assert len(found) > 20
    assert [(name, option) for name, option, kind in found if not isinstance(kind, Whole)] == []


def test_a_mean_is_benchmarked_and_right(tmp_path):
    sizes = ["--size", "1e4", "--density", "0.01", "--repeats", "1", "--experiments", "1", "--algorithms", "ssar_ring"]
    ran = CliRunner().invoke(main, ["bench", *sizes, "--op", "mean", "--json", str(tmp_path / "out.json")])
    assert ran.exit_code == 0, ran.output
    assert json.loads((tmp_path / "out.json").read_text())["arguments"]["size"] == 10_000
    refused = CliRunner().invoke(main, ["bench", *sizes, "--op", "mean", "--dtype", "int32"])
    assert refused.exit_code == 2 and "the mean of int32 values is not int32" in refused.output + refused.stderr
