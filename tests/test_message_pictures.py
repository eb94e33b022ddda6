"""The pictures of messages on the site are those of the simulator, and every card of an algorithm has one."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from messages import PATTERNS, RANKS, described, drawing, recorded, streams_of

import sparseallreduce as sar

ROOT = Path(__file__).parent.parent
NETWORK = sar.Network(1e-6, 1e9)


@pytest.mark.parametrize("name", ["ssar_recursive_doubling", "ssar_split_allgather", "dense"])
def test_a_trace_has_every_message_of_the_simulation(name):
    streams = streams_of(RANKS, 512, 30)
    out, trace = sar.simulate(streams, name, NETWORK), recorded(streams, name, NETWORK)
    assert len(trace.messages) == out.messages.sum()
    assert sum(sent.nbytes for sent in trace.messages) == out.bytes_sent.sum()
    assert max(sent.end for sent in trace.messages) == trace.time == out.time
    for sent in trace.messages:
        assert sent.end - sent.start >= (NETWORK.latency + sent.nbytes / NETWORK.bandwidth) * (1 - 1e-12)


def test_every_card_of_an_algorithm_has_a_picture():
    headings = re.findall(r"^### (.*)$", (ROOT / "docs" / "algorithms.md").read_text(), re.MULTILINE)
    assert set(PATTERNS) == set(headings) - {"auto", "Auto", "Shortcuts of other collectives"}


def test_a_picture_has_a_line_for_each_message_and_says_what_it_shows():
    trace = recorded(streams_of(4, 64, 8), "ssar_ring", NETWORK)
    picture = ElementTree.fromstring(drawing("a < b", trace))
    lines = [line for line in picture.iter("line") if line.get("class") == "message"]
    assert len(lines) == len(trace.messages) == 24
    assert picture.get("aria-label") == described("a < b", trace)
    assert "24 messages" in described("a < b", trace) and "rank 0 sends to rank 1" in described("a < b", trace)
