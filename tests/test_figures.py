"""The figures of the thesis's training runs: what is counted, and what is drawn."""

import figures_training
import numpy as np
import pytest
from click.testing import CliRunner
from scipy.sparse import csr_array

from sparseallreduce.linear import Dataset, batches


def test_an_index_occurs_once_in_every_iteration_that_touches_it():
    matrix = np.random.default_rng(0).random((50, 20)) < 0.1
    dataset = Dataset.from_scipy(csr_array(matrix.astype(float)), np.zeros(50))
    expected = sum((matrix[rows].any(axis=0).astype(int) for rows, _ in batches(dataset, 8, (0, 1))), np.zeros(20, int))
    counts = figures_training.sorted_counts(dataset, 8)
    assert counts.tolist() == sorted(expected[expected > 0], reverse=True)
    assert figures_training.summary(counts)["in_every_iteration"] == (expected == expected.max()).sum()


@pytest.mark.parametrize("figure,drawn", [("5.8", "figure-5.8"), pytest.param("5.12", "figure-5.12", marks=pytest.mark.release)])
def test_a_figure_is_measured_and_drawn(figure, drawn, tmp_path, monkeypatch, mpi_run):
    small = figures_training.Set("url-like", 60, 60, 5000)
    for name in ("URL", "WEBSPAM"):
        monkeypatch.setattr(figures_training, name, small)
    monkeypatch.setattr(figures_training, "FIGURES", {"5.8": ("logistic", small)})
    monkeypatch.setattr(figures_training, "BARS", figures_training.BARS[:2])
    monkeypatch.setattr(figures_training, "DATA", tmp_path)
    arguments = ["--figure", figure, "--ranks", "2", "--epochs", "1", "--batch-size", "10", "--out", str(tmp_path)]
    result = CliRunner().invoke(figures_training.figures, arguments)
    assert result.exit_code == 0, result.output
    assert (tmp_path / f"{drawn}.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / f"{drawn}.json").exists()
