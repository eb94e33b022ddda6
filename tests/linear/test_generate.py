"""Synthetic data: the same arguments give the same bytes, and the statistics are those that the kinds promise."""

import numpy as np
import pytest

import sparseallreduce as sar
from sparseallreduce.linear.data.files import open_text
from sparseallreduce.linear.data.generate import KINDS, generate
from sparseallreduce.linear.data.labels import two_classes
from sparseallreduce.linear.data.load import load
from sparseallreduce.linear.models import Logistic
from sparseallreduce.linear.strategies import SparseStrategy
from sparseallreduce.linear.training.schedules import Constant
from sparseallreduce.linear.training.trainer import Options, Trainer


def generated(tmp_path, kind, **arguments):
    path = tmp_path / "generated.svm"
    generate(kind, path, **arguments)
    return load(path, comm=sar.SERIAL, n_features=arguments.get("features", KINDS[kind].features))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_bytes_in_any_compression(tmp_path, kind):
    contents = []
    for name in ("a.svm", "b.svm.gz", "c.svm.bz2", "d.svm.xz"):
        generate(kind, tmp_path / name, samples=20, features=2000, seed=5)
        with open_text(tmp_path / name) as text:
            contents.append(text.read())
    generate(kind, tmp_path / "other.svm", samples=20, features=2000, seed=6)
    assert len(set(contents)) == 1
    assert contents[0].count(b"\n") == 20
    assert (tmp_path / "other.svm").read_bytes() != contents[0]


def test_a_short_file_is_the_beginning_of_a_long_one(tmp_path):
    generate("uniform", tmp_path / "long.svm", samples=50_000, features=1000, density=0.05)  # more than one chunk
    generate("uniform", tmp_path / "short.svm", samples=45_000, features=1000, density=0.05)
    assert (tmp_path / "long.svm").read_bytes().startswith((tmp_path / "short.svm").read_bytes())


@pytest.mark.parametrize("kind,samples,spread", [("uniform", 5000, 0.02), ("url-like", 5000, 0.45), ("webspam-like", 400, 0.75)])
def test_non_zeros_and_classes_are_those_of_the_kind(tmp_path, kind, samples, spread):
    dataset = generated(tmp_path, kind, samples=samples)
    lengths = np.diff(dataset.indptr)
    assert lengths.mean() == pytest.approx(KINDS[kind].nonzeros, rel=0.08)
    assert lengths.std() < spread * lengths.mean()
    assert (dataset.labels > 0).mean() == pytest.approx(KINDS[kind].positive, abs=0.08)
    assert dataset.indices.max() > 0.99 * dataset.features


def test_uniform_features_are_all_alike(tmp_path):
    dataset = generated(tmp_path, "uniform", samples=20_000, features=500, density=0.1)
    counts = np.bincount(dataset.indices, minlength=500)
    expected = 20_000 * 0.1
    assert dataset.nnz == pytest.approx(500 * expected, rel=0.005)
    assert (np.abs(counts - expected) < 6 * np.sqrt(expected)).all()
    assert (dataset.values == 1).all()


@pytest.mark.parametrize("kind", ["url-like", "webspam-like"])
def test_feature_frequencies_follow_a_power_law(tmp_path, kind):
    samples = {"url-like": 2000, "webspam-like": 300}[kind]
    dataset = generated(tmp_path, kind, samples=samples, features=200_000)
    frequencies = np.sort(np.bincount(dataset.indices, minlength=200_000))[::-1]
    assert frequencies[0] > 0.99 * samples
    ranks = np.geomspace(1000, 20_000, 8).astype(int)  # rarer than once a sample, and not so rare that chance rules
    smoothed = [frequencies[rank // 2 : rank * 2].mean() for rank in ranks]
    slope = np.polyfit(np.log(ranks), np.log(smoothed), 1)[0]
    assert slope == pytest.approx(-1, abs=0.15)


def test_frequent_features_come_first_in_url_and_anywhere_in_webspam(tmp_path):
    middles = {}
    for kind in ("url-like", "webspam-like"):
        dataset = generated(tmp_path, kind, samples=300, features=200_000)
        frequencies = np.bincount(dataset.indices, minlength=200_000)
        middles[kind] = np.median(np.argsort(frequencies)[-100:]) / 200_000
    assert middles["url-like"] < 0.001
    assert middles["webspam-like"] == pytest.approx(0.5, abs=0.15)


def test_url_values_are_ones_but_for_the_most_frequent_features(tmp_path):
    dataset = generated(tmp_path, "url-like", samples=300)
    real = dataset.indices < 64
    assert (dataset.values[~real] == 1).all()
    assert ((dataset.values[real] > 0) & (dataset.values[real] < 1)).all()
    assert dataset.values[real].mean() == pytest.approx(0.5, abs=0.02)


def test_webspam_samples_have_unit_length(tmp_path):
    dataset = generated(tmp_path, "webspam-like", samples=100)
    squares = np.add.reduceat(np.square(dataset.values.astype(float)), dataset.indptr[:-1])
    np.testing.assert_allclose(np.sqrt(squares), 1, atol=1e-4)


def test_labels_can_be_learned_up_to_the_noise(tmp_path):
    generate("url-like", tmp_path / "all.svm", samples=22_000, features=20_000)
    lines = (tmp_path / "all.svm").read_text().splitlines(keepends=True)
    (tmp_path / "a.svm").write_text("".join(lines[:20_000]))
    (tmp_path / "b.svm").write_text("".join(lines[20_000:]))
    train, test = load(tmp_path / "a.svm", tmp_path / "b.svm", comm=sar.SERIAL)
    train, test = two_classes(train, sar.SERIAL)[0], two_classes(test, sar.SERIAL)[0]
    trainer = Trainer(Logistic(), SparseStrategy(train, sar.SERIAL), Constant(0.5), Options(epochs=5))
    last = list(trainer.run(test))[-1]
    assert 0.89 < last.test_accuracy < 0.985  # 3 % of the labels are on the wrong side


def test_few_features_and_few_samples(tmp_path):
    for kind in KINDS:
        dataset = generated(tmp_path, kind, samples=1, features=2)
        assert (dataset.rows, dataset.nnz >= 1) == (1, True)


@pytest.mark.parametrize("arguments", [{"samples": 0}, {"features": 1}, {"density": 0.0}, {"density": 0.9}])
def test_impossible_sizes_are_refused(tmp_path, arguments):
    with pytest.raises(ValueError, match="must be"):
        generate("uniform", tmp_path / "x.svm", **arguments)


def test_an_interrupted_generation_leaves_no_file(tmp_path):
    def interrupt(samples):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate("uniform", tmp_path / "x.svm", samples=100, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_compressed_files_hold_neither_time_nor_name(tmp_path, suffix, monkeypatch):
    for name, now in (("a", 1e9), ("b", 1.5e9)):
        monkeypatch.setattr("time.time", lambda now=now: now)
        generate("uniform", tmp_path / f"{name}.svm{suffix}", samples=20, features=50, density=0.1)
    assert (tmp_path / f"a.svm{suffix}").read_bytes() == (tmp_path / f"b.svm{suffix}").read_bytes()
