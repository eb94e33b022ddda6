"""The data sets by name: files, and published sizes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COLLECTION", "SETS", "Remote"]

#: URL of the collection.
COLLECTION = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"


@dataclass(frozen=True)
class Remote:
    """A data set of the collection: its files without compression suffixes, and its published size."""

    features: int
    train: str
    samples: int
    test: str | None = None
    test_samples: int | None = None
    suffixes: tuple[str, ...] = (".xz", ".bz2")  # tried in this order, because the collection has changed the compression of files

    @property
    def files(self) -> dict[str, int | None]:
        """The number of samples of each file."""
        return {self.train: self.samples} | ({self.test: self.test_samples} if self.test else {})


SETS = {
    "a9a": Remote(123, "a9a", 32_561, "a9a.t", 16_281, ("",)),
    "avazu": Remote(1_000_000, "avazu-app", 14_596_137, "avazu-app.t", 1_719_304),
    "epsilon": Remote(2_000, "epsilon_normalized", 400_000, "epsilon_normalized.t", 100_000),
    "kdd12": Remote(54_686_452, "kdd12", 149_639_105),
    "kdda": Remote(20_216_830, "kdda", 8_407_752, "kdda.t", 510_302),
    "kddb": Remote(29_890_095, "kddb", 19_264_097, "kddb.t", 748_401),
    "news20": Remote(1_355_191, "news20.binary", 19_996),
    "rcv1": Remote(47_236, "rcv1_train.binary", 20_242, "rcv1_test.binary", 677_399),
    "real-sim": Remote(20_958, "real-sim", 72_309),
    "url": Remote(3_231_961, "url_combined", 2_396_130),
    "w8a": Remote(300, "w8a", 49_749, "w8a.t", 14_951, ("",)),
    "webspam": Remote(16_609_143, "webspam_wc_normalized_trigram.svm", 350_000),
    "webspam-unigram": Remote(254, "webspam_wc_normalized_unigram.svm", 350_000),
}
