"""The simulator page of the site computes what the library computes: its cost model is translated from Python to JavaScript."""

import json
import shutil
import subprocess

import numpy as np
import pytest
from javascript import translated
from prediction import prediction
from simulator_page import model

import sparseallreduce as sar
from sparseallreduce.algorithms.choose import choose, predicted_times, problem_of
from sparseallreduce.algorithms.cost import predicted_time
from sparseallreduce.runtime.simulator import machine_of
from sparseallreduce.streams.reduction import Reduction

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")


def evaluated(program, expression):
    """Return the value of a JavaScript expression in a program."""
    run = subprocess.run(
        ["node", "-e", f"{program};console.log(JSON.stringify({expression}))"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def random_settings(count):
    """Return arguments of `prediction` over the ranges of the page's sliders and beyond them."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        ranks, size = round(2 ** rng.uniform(1, 10)), round(2 ** rng.uniform(3, 34))
        entries = max(1, round(size * 10 ** rng.uniform(-6, 0)))
        gammas = (0.0, 0.0) if rng.random() < 0.5 else (2e-9, 3e-10)
        network = float(10 ** rng.uniform(-7, -2)), float(10 ** rng.uniform(6, 11.5))
        per_host = min(ranks, int(rng.choice([1, 1, 2, 3, 8, 64])))
        near = float(10 ** rng.uniform(-8, -6)), float(10 ** rng.uniform(9, 11))
        yield [ranks, size, entries, int(rng.choice([2, 4, 8, 64])), *network, *gammas, per_host, *near]


@needs_node
def test_the_page_predicts_the_same_to_the_last_bit():
    settings = list(random_settings(400))
    assert evaluated(model(), f"{json.dumps(settings)}.map(given => prediction(...given))") == [prediction(*given) for given in settings]


@pytest.mark.parametrize("given", [given for given in random_settings(40) if given[1] <= 1 << 20], ids=str)
def test_the_page_predicts_what_simulate_does(given):
    ranks, size, entries, value_bytes, latency, bandwidth, *gammas, per_host, near_latency, near_bandwidth = given
    network = sar.Network(latency, bandwidth, *gammas, per_host, near_latency, near_bandwidth)
    hosts, width = network.layout(ranks), value_bytes // 2
    values = np.ones(entries, np.float16) if width == 1 else np.ones((entries, width), np.float16)
    stream = sar.SparseStream(np.arange(entries), values, size)
    machine, problem = machine_of(network, hosts), problem_of(stream, entries, ranks, Reduction(), hosts=hosts)
    exact = problem._replace(entries=entries)
    found = prediction(*given)
    torus = {"dense_torus": predicted_time("dense_torus", exact, machine)} if "dense_torus" in found["times"] else {}
    assert found["times"] == {**predicted_times(exact, machine), **torus}
    assert found["choice"] == choose(problem, machine)


def halves_of(count):
    return [round(each / 2) for each in reversed(range(count)) if each % 3 != 1]


def last_bit(number, ratio=0.5):
    low = number or 7
    while low > 1 and not low & 1:
        low //= 2
    return low * ratio if 1 < low <= 9 else None


def both(count):
    return [halves_of(count), last_bit(count), last_bit(number=count, ratio=2), max(halves_of(8)), sum(each > 2 for each in range(count))]


@needs_node
@pytest.mark.parametrize("count", [0, 1, 2, 3, 6, 12, 19])
def test_python_and_javascript_agree_on_the_language(count):
    assert evaluated(translated(both), f"both({count})") == both(count)


def opened(path):
    with open(path) as file:
        return file.read()


def test_what_is_not_understood_is_not_translated():
    with pytest.raises(TypeError, match="not understood: With"):
        translated(opened)
