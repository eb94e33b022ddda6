"""The reference of the documentation site names everything that is public in sparseallreduce.torch."""

import pytest

pytest.importorskip("torch")

from test_site import documented

import sparseallreduce.torch


def test_every_public_name_for_pytorch_is_in_the_reference():
    assert documented("sparseallreduce.torch") == set(sparseallreduce.torch.__all__)
