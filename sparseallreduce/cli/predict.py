"""`sparseallreduce predict`: predict the labels of samples with a model file, under mpiexec or alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from sparseallreduce.atomic_file import atomic_file, naming
from sparseallreduce.cli.device import array_module_of, device_option
from sparseallreduce.cli.inputs import (
    SamplesCommand,
    cache_options,
    data_cache,
    format_options,
    samples_argument,
    target_options,
    zero_based_option,
)
from sparseallreduce.cli.metrics_options import asked_metrics, metrics_lines, metrics_option, metrics_record
from sparseallreduce.cli.progress import progress_bar, progress_option
from sparseallreduce.cli.report import OUTPUT_FILE, check_output, environment, write_report
from sparseallreduce.cli.terminal import wrapped
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.data.load import load
from sparseallreduce.linear.data.on_gpu import room_for_samples
from sparseallreduce.linear.data.parts import Data
from sparseallreduce.linear.data.reading import bits_of
from sparseallreduce.linear.metrics import evaluate_scores, scores_of, target_of
from sparseallreduce.linear.model_file import FittedModel, dense_weights, load_model
from sparseallreduce.linear.weights import Descent, new_gpu_weights
from sparseallreduce.runtime.communicators import world
from sparseallreduce.runtime.hosts import same_host, this_place
from sparseallreduce.runtime.objects import agreed, gather
from sparseallreduce.runtime.stalls import blocked

Array = NDArray[Any]


@click.command(cls=SamplesCommand)
@click.argument("model", type=click.Path(path_type=Path))
@samples_argument("data", "DATA")
@click.option("--out", type=OUTPUT_FILE, help="File for the predictions; the terminal by default.")
@click.option("--probabilities", is_flag=True, help="Add the probability of each class (logistic models).")
@click.option("--ignore-unknown", is_flag=True, help="Ignore features that the model does not have, instead of reporting an error.")
@metrics_option("the predictions, if DATA has labels")
@click.option("--json", "json_path", type=OUTPUT_FILE, help="File for the metrics.")
@format_options
@zero_based_option(None, "as in the training data")
@target_options
@cache_options
@progress_option()
@device_option("Where samples are scored; gpu needs CuPy.")
def predict(
    model: Path,
    data: Data,
    out: Path | None,
    probabilities: bool,
    ignore_unknown: bool,
    metrics: tuple[str, ...] | None,
    json_path: Path | None,
    device: str,
    **how: Any,
) -> None:
    """Predict the samples of DATA with MODEL, a file written by `train --model-out` or by an estimator.

    DATA may have any format that `train` reads, and may be several files, a folder, a quoted pattern, a pipe, or standard input (`-`).
    Columns of a table are found by name and encoded as in training; categories that training has not seen become zeros.

    The output has one line per sample, in the order of DATA: its label, written as in the training data, or the number that a linear
    regression predicts. With --probabilities a first line names the labels, and the probabilities follow each predicted label, as in
    LIBSVM's predict.

    If DATA has labels, the accuracy is printed too; --metrics prints other metrics, weighted by the samples' weights if DATA has them.
    """
    xp = array_module_of(device)
    comm = world()
    shown = comm.rank == 0
    agreed(comm, lambda: check_output(out, json_path) if shown else None)
    fitted = agreed(comm, lambda: load_model(model))
    if probabilities and not fitted.gives_probabilities:
        raise click.UsageError(f"--probabilities is for logistic models, but {model} is {fitted.model!r}: leave it out")
    names = asked_metrics(fitted, metrics)
    with progress_bar(comm, desc="reading", unit="B", unit_scale=True) as bar:
        known = None if ignore_unknown else fitted.n_features
        how["zero_based"] = how["zero_based"] or ("yes" if fitted.zero_based else "no")
        how["hash_bits"] = how["hash_bits"] or bits_of(fitted.n_features)
        given = {name: how[name] for name in ("format", "zero_based", "hash_bits", "target", "header")} | {"encoding": fitted.encoding}
        samples, _ = load(data, comm=comm, n_features=known, progress=bar.update, unlabelled=True, cache=data_cache(how), **given)

    scores = agreed(comm, lambda: scores_of(fitted, samples)) if xp is None else _scores_on_gpu(fitted, samples, xp, comm)
    parts = gather_to_rank_0(comm, _lines(fitted, scores, probabilities))
    verdict = _verdict(fitted, samples, scores, comm)
    found = None
    if metrics is not None or (json_path is not None and verdict.comparable):
        labels = agreed(comm, lambda: target_of(fitted, samples))
        found = evaluate_scores(fitted, scores, labels, samples.weights, comm, names)
    machine = environment(comm) if json_path is not None else {}

    def write() -> None:
        header = f"labels {' '.join(_texts(fitted.classes, in_columns=True))}\n" if probabilities else ""
        if out is None:
            with naming("standard output"):
                for part in (header, *parts):
                    click.echo(part, nl=False)
        else:
            with atomic_file(out, "w") as file:
                file.writelines([header, *parts])
        click.echo(wrapped(verdict.text), err=out is None)
        if metrics is not None and found is not None:
            click.echo(metrics_lines(found, fitted), err=out is None)
        if json_path is not None:
            results = {"samples": samples.total_samples, "metrics": None if found is None else metrics_record(found, fitted)}
            write_report(json_path, "predict", click.get_current_context().params, machine, results)

    agreed(comm, write if shown else lambda: None)


def gather_to_rank_0(comm: Any, value: str) -> list[str]:
    """Return the values of all ranks in rank order on rank 0, and an empty list on the other ranks."""
    if comm.size == 1:
        return [value]
    gather(comm, None)
    with blocked(comm.rank, comm.size, "the collection of predictions, which all ranks have entered"):
        return comm.gather(value) or []


def _scores_on_gpu(fitted: FittedModel, samples: Dataset, xp: Any, comm: Any) -> Array:
    """Return the scores of the samples, computed on a GPU; collective."""
    room = room_for_samples(xp, len(same_host(gather(comm, this_place()), comm.rank)))
    weights = np.ascontiguousarray(dense_weights(fitted).T)
    descent = Descent(intercept=True, columns=None if weights.ndim == 1 else weights.shape[1])

    def scores() -> Array:
        own = new_gpu_weights(len(weights) + 1, descent, weights.dtype, xp, room)
        own.assign_model(weights, fitted.intercept)
        return own.final_scores(samples).astype(weights.dtype, copy=False)

    return agreed(comm, scores)


def _lines(fitted: FittedModel, scores: Array, probabilities: bool) -> str:
    if len(fitted.classes) == 0:
        return "".join(f"{text}\n" for text in _texts(fitted.labels_of(scores)))
    texts = np.array(_texts(fitted.classes, in_columns=probabilities))
    columns = [replace(fitted, classes=texts).labels_of(scores).tolist()]
    if probabilities:
        columns += [[f"{share:.6g}" for share in column] for column in fitted.probabilities_of(scores).T.tolist()]
    return "".join(" ".join(line) + "\n" for line in zip(*columns))


def _texts(labels: Array, in_columns: bool = False) -> list[str]:
    """Return labels or scores as text that reads back as the same values: whole numbers without a fraction, names unchanged.

    Names that would be ambiguous in a line, or in a column of one, are quoted as in JSON.
    """
    if labels.dtype.kind == "f":
        return [str(number).removesuffix(".0") for number in labels]
    texts = [label.decode(errors="backslashreplace") if isinstance(label, bytes) else str(label) for label in labels]
    return [json.dumps(text) if _ambiguous(text, in_columns) else text for text in texts]


def _ambiguous(text: str, in_columns: bool) -> bool:
    return text.startswith('"') or text.splitlines() != [text] or (in_columns and text.split() != [text])


class Verdict(NamedTuple):
    """How well predictions agree with the labels."""

    text: str
    comparable: bool  # whether all samples have labels that the model could predict


def _verdict(fitted: FittedModel, samples: Dataset, scores: Array, comm: Any) -> Verdict:
    """Return how well the predictions of all ranks agree with the labels; collective over ``comm``."""
    predicted = fitted.labels_of(scores)
    text = f"{samples.total_samples:,} samples"
    if any(gather(comm, bool(np.isnan(samples.labels).any()))):
        return Verdict(f"{text}, not all of which have labels", False)
    labels = samples.named_labels
    if len(fitted.classes) == 0:
        if samples.names is not None:
            return Verdict(f"{text}; no error, because their labels are names and the model predicts numbers", False)
        errors = float(np.square(predicted - labels, dtype=np.float64).sum())
        return Verdict(f"{text}, mean squared error {sum(gather(comm, errors)) / samples.total_samples:.6g}", True)
    comparable = fitted.classes.dtype.kind in ("biuf" if samples.names is None else "U")
    known, right = (int(np.isin(labels, fitted.classes).sum()), int((predicted == labels).sum())) if comparable else (0, 0)
    known, right = (sum(column) for column in zip(*gather(comm, (known, right))))
    if known < samples.total_samples:
        return Verdict(f"{text}; no accuracy, because not all of their labels are among the model's", False)
    return Verdict(f"{text}, accuracy {right / samples.total_samples:.4f} ({right:,} right)", True)
