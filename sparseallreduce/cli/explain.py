"""`sparseallreduce explain`: show how much each feature contributes to the scores of some samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import click
from scipy.sparse import csr_array

from sparseallreduce.cli.inputs import SamplesCommand, format_options, samples_argument, target_options, zero_based_option
from sparseallreduce.cli.interpretation_options import Names, chosen_class, display_options, label_of, table, write_text
from sparseallreduce.cli.numbers import Whole
from sparseallreduce.cli.parameter import Parameter
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.data.load import load
from sparseallreduce.linear.data.parts import Data
from sparseallreduce.linear.data.reading import bits_of
from sparseallreduce.linear.interpretation import Contributions, contributions
from sparseallreduce.linear.model_file import FittedModel, load_model
from sparseallreduce.runtime.communicators import world
from sparseallreduce.runtime.objects import agreed, gather

_MOST = 10_000  # samples per call


class Rows(Parameter):
    """Sample numbers from 1 and ranges of them, separated by commas; the command gets zero-based numbers in the same order."""

    name = "rows"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> list[int]:
        if not isinstance(value, str):
            return list(value)
        found: list[int] = []
        for part in value.split(","):
            first, dash, last = (word.strip().replace("_", "") for word in part.partition("-"))
            last = last if dash else first
            if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
                self.fail(f"{part!r} is neither a sample number from 1, such as 3, nor a range, such as 1-5", parameter, context)
            if len(found) + int(last) - int(first) >= _MOST:
                self.fail(f"at most {_MOST:,} samples can be explained at once", parameter, context)
            found += range(int(first) - 1, int(last))
        return list(dict.fromkeys(found))


class Explained(NamedTuple):
    """The explanation of one sample's score."""

    made: Contributions
    number: int | None  # number of the class whose score is explained; None if there is only one score
    predicted: Any
    probability: float | None  # probability of that class
    label: Any  # None if the sample has no label


@click.command(cls=SamplesCommand)
@click.argument("model", type=click.Path(path_type=Path))
@samples_argument("data", "DATA")
@click.option("--rows", type=Rows(), default="1", show_default=True, metavar="ROWS", help="Sample numbers from 1, such as 1-5 or 2,7.")
@click.option("--top", type=Whole(min=0), default=20, show_default=True, help="Features to show per sample; 0 for all.")
@click.option("--ignore-unknown", is_flag=True, help="Ignore features that the model does not have, instead of reporting an error.")
@display_options
@format_options
@zero_based_option(None, "as in the training data")
@target_options
def explain(
    model: Path,
    data: Data,
    rows: list[int],
    top: int,
    ignore_unknown: bool,
    label: str | None,
    names: Path | None,
    json_path: Path | None,
    csv_path: Path | None,
    **how: Any,
) -> None:
    """Show how much each feature contributes to the scores that MODEL gives to samples of DATA.

    A score is the intercept plus a contribution of each feature: its value times its weight. Contributions are sorted by magnitude, the
    largest first. With two classes the score is that of the second class; with more, that of the predicted class, unless --class names
    another. JSON and CSV contain all features. DATA may have any format that `predict` reads.
    """
    comm = world()
    fitted = agreed(comm, lambda: load_model(model))
    number = chosen_class(fitted, label)
    how["zero_based"] = how["zero_based"] or ("yes" if fitted.zero_based else "no")
    how["hash_bits"] = how["hash_bits"] or bits_of(fitted.n_features)
    known = None if ignore_unknown else fitted.n_features
    samples, _ = load(data, comm=comm, n_features=known, unlabelled=True, encoding=fitted.encoding, **how)
    if max(rows) >= samples.total_samples:
        raise click.UsageError(f"--rows: there is no sample {max(rows) + 1} in DATA, which has {samples.total_samples:,}")
    called = agreed(comm, lambda: Names(fitted, names) if comm.rank == 0 else None)
    found = {row: each for own in gather(comm, agreed(comm, lambda: _own(fitted, samples, rows, number))) for row, each in own.items()}

    def write() -> None:
        assert called is not None
        records = [_record(fitted, row, found[row], called) for row in rows]
        header = ["sample", "feature", "value", "weight", "contribution"]
        sheet = [
            [record["sample"], *(each[name] for name in header[1:])]
            for record in records
            for each in [*record["contributions"], _intercept_row(record["intercept"])]
        ]
        if not write_text(json_path, csv_path, {"schema": 1, "command": "explain", "samples": records}, header, sheet):
            click.echo("\n\n".join(_shown(record, top) for record in records))

    agreed(comm, write if comm.rank == 0 else lambda: None)


def _own(model: FittedModel, samples: Dataset, rows: list[int], number: int | None) -> dict[int, Explained]:
    """Return the explanations of those ``rows`` that this rank holds, by row."""
    found = {}
    for row in rows:
        own = row - samples.first_sample
        if 0 <= own < samples.rows:
            sample = _sample(samples, own, model.n_features)
            scores = model.decision_function(sample)
            label = samples.labels[own]
            labelled = label == label
            named = label if samples.names is None or not labelled else samples.names[int(label)]
            chosen = int(scores[0].argmax()) if len(model.classes) > 2 and number is None else number
            probability = _probability(model, scores, chosen)
            predicted = model.labels_of(scores).tolist()[0]
            made = contributions(model, sample, chosen)
            found[row] = Explained(made, chosen, predicted, probability, named if labelled else None)
    return found


def _sample(samples: Dataset, row: int, features: int) -> csr_array:
    """Return a row as a SciPy array, without features that the model does not have."""
    inside = slice(*samples.indptr[row : row + 2])
    indices = samples.indices[inside].astype("int64")
    known = indices < features
    return csr_array((samples.values[inside][known], indices[known], [0, int(known.sum())]), shape=(1, features))


def _probability(model: FittedModel, scores: Any, number: int | None) -> float | None:
    """Return the probability of the class whose score is explained."""
    return float(model.probabilities_of(scores)[0, 1 if number is None else number]) if model.gives_probabilities else None


def _record(model: FittedModel, row: int, of: Explained, called: Names) -> dict[str, Any]:
    """Return a sample's record for --json."""
    made = of.made
    number = 1 if of.number is None and len(model.classes) == 2 else of.number
    columns = made.indices.tolist(), made.values.tolist(), made.weights.tolist(), made.products.tolist()
    return {
        "sample": row + 1,
        "label": of.label,
        "predicted": of.predicted,
        "class": None if number is None else label_of(model, number),
        "score": made.score,
        "probability": of.probability,
        "intercept": made.intercept,
        "contributions": [
            {"feature": called[index], "index": index, "value": value, "weight": weight, "contribution": product}
            for index, value, weight, product in zip(*columns, strict=True)
        ],
    }


def _intercept_row(intercept: float) -> dict[str, Any]:
    return {"feature": "(intercept)", "value": 1.0, "weight": intercept, "contribution": intercept}


def _shown(record: dict[str, Any], top: int) -> str:
    """Return a sample as a table."""
    title = [f"sample {record['sample']}", f"predicted {_plain(record['predicted'])}"]
    title += [] if record["label"] is None else [f"label {_plain(record['label'])}"]
    title += [] if record["probability"] is None else [f"probability of {record['class']} {record['probability']:.4g}"]
    parts = record["contributions"]
    shown = parts if top == 0 else parts[:top]
    rows = [[part["feature"], part["value"], part["weight"], part["contribution"]] for part in shown]
    if len(shown) < len(parts):
        rest = sum(part["contribution"] for part in parts[len(shown) :])
        rows.append([f"({len(parts) - len(shown):,} more)", "", "", f"{rest:.6g}"])
    of = "" if record["class"] is None else f" of {record['class']}"
    rows += [["(intercept)", "", "", f"{record['intercept']:.6g}"], [f"score{of}", "", "", f"{record['score']:.6g}"]]
    return ", ".join(title) + "\n" + table(["feature", "value", "weight", "contribution"], rows)


def _plain(label: Any) -> str:
    return f"{label:g}" if isinstance(label, float) else str(label)
