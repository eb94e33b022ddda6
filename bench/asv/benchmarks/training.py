"""Training, and what a program waits for before its first sum."""

import tempfile
from pathlib import Path

from scipy.sparse import csr_array

from sparseallreduce import SERIAL
from sparseallreduce.linear import LogisticRegression, generate, load


class Training:
    """Logistic regression on 20,000 samples like those of the URL data set, at the default settings."""

    timeout = 180

    def setup_cache(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "train.svm")
            generate("url-like", path, samples=20_000)
            dataset, _ = load(path, comm=SERIAL)
        rows = csr_array((dataset.values, dataset.indices, dataset.indptr), shape=(len(dataset.labels), dataset.features))
        return rows, dataset.labels

    def setup(self, data):
        LogisticRegression(max_iter=1).fit(*data)  # compiles

    def time_fit(self, data):
        LogisticRegression().fit(*data)

    def track_accuracy(self, data):
        return LogisticRegression().fit(*data).score(*data)

    def peakmem_fit(self, data):
        LogisticRegression().fit(*data)


def timeraw_import():
    return "import sparseallreduce"


def timeraw_first_sum():
    return """
    import sparseallreduce as sar
    stream = sar.SparseStream([1, 4], [10.0, 40.0], 2**20)
    sar.allreduce(stream, sar.SERIAL)
    """
