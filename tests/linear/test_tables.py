"""Tables: every format and number of ranks gives the matrix and names of scikit-learn's encoders; errors name line and column."""

import gzip
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder
from thoroughness import examples
from thread_ranks import joined, on_ranks

import sparseallreduce as sar
from sparseallreduce.linear import DatasetError, load
from sparseallreduce.linear.data import line_blocks
from sparseallreduce.linear.data.convert import convert
from sparseallreduce.linear.data.tables import csv_text
from sparseallreduce.linear.encoding import HASHED

TEXTS = ["a", "b, c", 'say "x"', "line\nbreak", "caf\u00e9", " z ", "t;1", "tab\tbed", "'q'", "\u65e5\u672c", "\r\n"]
COLUMNS = {
    "number": st.one_of(st.none(), st.integers(-3, 3).map(float), st.floats(-1e6, 1e6, width=32)),
    "boolean": st.one_of(st.none(), st.booleans()),
    "text": st.one_of(st.none(), st.sampled_from(TEXTS)),
}


@st.composite
def tables(draw):
    """A table of numbers, booleans and strings, with missing values, and a target."""
    rows = draw(st.integers(1, 9))
    kinds = draw(st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=4))
    types = {"number": pa.float64(), "boolean": pa.bool_(), "text": pa.string()}
    columns = {
        f'{kind}, "{place}"': pa.array(draw(st.lists(COLUMNS[kind], min_size=rows, max_size=rows)), types[kind])
        for place, kind in enumerate(kinds)
    }
    target = st.sampled_from(["yes", "no", ">50K"]) if draw(st.booleans()) else st.integers(-2, 2).map(float)
    return pa.table(columns | {"y": draw(st.lists(target, min_size=rows, max_size=rows))})


def write_csv(table, path, delimiter=",", quoting="needed"):
    pa.csv.write_csv(table, path, pa.csv.WriteOptions(delimiter=delimiter, quoting_style=quoting))


def write_stream(table, path):
    with pa.ipc.new_stream(path, table.schema) as file:
        file.write_table(table, max_chunksize=2)


def write_dictionaries(table, path):
    names = [name for name in table.column_names if name.startswith("text")]
    for name in names:
        table = table.set_column(table.column_names.index(name), name, table[name].dictionary_encode())
    pa.parquet.write_table(table, path)


WRITERS = {
    "a.csv": write_csv,
    "pandas.csv": lambda table, path: table.to_pandas().to_csv(path, index=False),
    "a.tsv": partial(write_csv, delimiter="\t"),
    "a.parquet": partial(pa.parquet.write_table, row_group_size=2),
    "dictionaries.parquet": write_dictionaries,
    "a.feather": pa.feather.write_feather,
    "a.arrow": write_stream,
}


def expected(table):
    """The matrix and the names by scikit-learn's encoders, and the labels."""
    parts, names = [], []
    for name in table.column_names[:-1]:
        values = table[name].to_pylist()
        if all(value is None for value in values):
            parts.append(np.ones((len(values), 1)))
            names.append(f"{name} (missing)")
        elif name.startswith("number"):
            column = np.array([[np.nan if value is None else value] for value in values])
            parts.append(SimpleImputer(strategy="constant", fill_value=0, add_indicator=True).fit_transform(column))
            names += [name, f"{name} (missing)"][: parts[-1].shape[1]]
        else:
            words = [None if value is None else str(value).lower() if isinstance(value, bool) else value for value in values]
            encoder = OneHotEncoder(sparse_output=False).fit(np.array(words, object)[:, None])
            parts.append(encoder.transform(np.array(words, object)[:, None]))
            names += [f"{name} (missing)" if word is None else f"{name}={word}" for word in encoder.categories_[0]]
    return np.hstack(parts).astype(np.float32), names, table["y"].to_pylist()


def check(parts, table):
    matrix, names, labels = expected(table)
    found, numbers = joined(parts)
    np.testing.assert_array_equal(found.toarray(), matrix)
    assert list(parts[0].encoding.names()) == names
    assert all(part.encoding == parts[0].encoding for part in parts)
    classes = parts[0].names
    assert [number if classes is None else classes[int(number)] for number in numbers] == labels


QUOTED = pa.table({"text, 0": ["line\nbreak"] * 7 + ['say "x"', None], "number, 1": [None, 0.5] * 4 + [1.0], "y": ["yes"] * 9})


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(table=QUOTED)
@given(table=tables())
@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_what_scikit_learns_encoders_give_on_any_number_of_ranks(name, table, tmp_path, monkeypatch):
    WRITERS[name](table, tmp_path / name)
    for ranks, block in ((1, 1 << 20), (1, 7), (2, 7), (3, 1 << 20)):
        monkeypatch.setattr(line_blocks, "_BLOCK", block)
        monkeypatch.setattr(line_blocks, "_RECORDS", block)
        check(on_ranks(ranks, lambda comm: load(tmp_path / name, comm=comm, target="y")[0]), table)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=tables())
def test_a_converted_table_is_the_same_with_its_names_and_classes(table, tmp_path):
    write_csv(table, tmp_path / "a.csv")
    convert(tmp_path / "a.csv", tmp_path / "a.csr", sar.SERIAL, target="y")
    check([load(tmp_path / "a.csr", comm=sar.SERIAL)[0]], table)


@pytest.mark.parametrize("compress", [gzip.compress, lambda text: b"\xef\xbb\xbf" + text, lambda text: text.replace(b"\n", b"\r\n")])
@pytest.mark.parametrize("ranks", [1, 3])
def test_compression_a_byte_order_mark_and_line_ends_change_nothing(compress, ranks, tmp_path, monkeypatch):
    text = b'"a","b"\n1,"x"\n\n,"y, z"\n' + b'3,"x"\n' * 20
    (tmp_path / "a.csv").write_bytes(compress(text))
    parts = on_ranks(ranks, lambda comm: load(tmp_path / "a.csv", comm=comm, target="b")[0])
    samples, labels = joined(parts)
    assert samples.toarray().tolist() == [[1, 0], [0, 1]] + [[3, 0]] * 20
    assert parts[0].names == ("x", "y, z") and labels.tolist() == [0, 1] + [0] * 20


def csv(tmp_path, text, **options):
    (tmp_path / "a.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(tmp_path / "a.csv", comm=sar.SERIAL, **options)[0]


@pytest.mark.parametrize("delimiter", [";", "\t", "|", ","])
def test_the_delimiter_is_found_in_the_first_line(delimiter, tmp_path):
    found = csv(tmp_path, f'"a,;|\t"{delimiter}y\n1{delimiter}2\n', target="y")
    assert list(found.encoding.names()) == ["a,;|\t"] and found.labels.tolist() == [2]


@pytest.mark.parametrize(
    "text, options, names",
    [
        ("1,2\n3,4\n", {"target": "2"}, ["1"]),
        ("a,b\n3,4\n", {"target": "b"}, ["a"]),
        ("2019,b\n3,4\n", {"target": "b"}, ["2019"]),
        ("2019,2020\n3,4\n", {"target": "2020", "header": "yes"}, ["2019"]),
        ("a,b\nc,d\n", {"target": "1", "header": "no"}, ["2=b", "2=d"]),
        ("a,b\n3,4\n", {"features": ["a"], "target": "b"}, ["a"]),
        ("a,label,c\n3,4,5\n", {"drop": ["c"]}, ["a"]),
    ],
)
def test_the_first_line_is_a_header_if_it_looks_so_or_is_said_to(text, options, names, tmp_path):
    assert list(csv(tmp_path, text, **options).encoding.names()) == names


@pytest.mark.parametrize(
    "text, options, error",
    [
        ("", {"target": "y"}, "neither samples nor names"),
        ("a,y\n", {"target": "y"}, "no samples in it"),
        ("y\n1\n", {"target": "y"}, "no column is left to be a feature"),
        ("a,b\n1,2\n", {}, "name the column of labels by target: there are 'a' and 'b'"),
        ("a,b\n1,2\n", {"target": "c"}, "there is no column 'c' to be the target, but 'a' and 'b'"),
        ("a,b\n1,2\n", {"target": "b", "features": ["c", "d"]}, "there are no columns 'c' and 'd', but 'a' and 'b'"),
        ("a,b\n1,2\n", {"target": "b", "drop": ["c"]}, "there is no column 'c', but 'a' and 'b'"),
        ("a,b\n1,2\n", {"target": "b", "features": ["b"]}, "'b' cannot be both"),
        ("a,a,y\n1,2,3\n", {"target": "y"}, "2 columns are called 'a': rename them, or leave them out by drop"),
        ("a,y\n1,2\n1\n", {"target": "y"}, "a.csv, line 3: 1 field, but 2 columns: '1'"),
        ('a,y\n"1\n\n",2\n\n1,2,3\n', {"target": "y"}, "a.csv, line 6: 3 fields, but 2 columns: '1,2,3'"),
        ("a,y\n1,2\n1,\n", {"target": "y"}, "a.csv, line 3: the target 'y' is missing"),
        ("a,y\n1,2\n1,no\n", {"target": "y"}, "a.csv, line 3: the target 'y' is 'no', but others are numbers"),
        ("a,y\ninf,2\n", {"target": "y"}, "a.csv, line 2: the column 'a' is inf"),
        ("a,y\n1e39,2\n", {"target": "y"}, "a.csv, line 2: the column 'a' is 1e\\+39, too large for float32"),
        ("a,y\n2020-01-01,2\n", {"target": "y"}, "a.csv, line 2: the column 'a' holds dates or times.*drop=.*categorical="),
        ('a,y\n1,2\n"x,3\n4,5\n', {"target": "y"}, "a quote that opens a field is not closed"),
        (b"a,y\n1,2\n\xffx,3\n", {"target": "y"}, "a.csv, line 3: invalid start byte of UTF-8"),
        ("a,y\n1,2\n", {"target": "y", "header": "maybe"}, "header must be one of"),
        ("a,y\n1,2\n", {"target": "y", "features": "a"}, "features must be a list of columns"),
        ("a,y\n1,2\n", {"target": "y", "n_features": 7}, "become 1 features, not 7"),
    ],
)
def test_what_is_wrong_is_said_with_its_line_and_column_on_all_ranks(text, options, error, tmp_path):
    with pytest.raises(DatasetError, match=error) as raised:
        csv(tmp_path, text, **options)
    assert "\n" not in str(raised.value)
    errors = on_ranks(2, lambda comm: load(tmp_path / "a.csv", comm=comm, **options))
    assert [str(each) for each in errors] == [str(raised.value)] * 2


def test_lines_are_not_counted_unless_an_error_names_one(tmp_path, monkeypatch):
    monkeypatch.setattr(line_blocks, "_RECORDS", 8)
    monkeypatch.setattr(csv_text, "line_number", lambda *_: pytest.fail("lines were counted"))
    (tmp_path / "a.csv").write_text('n,t,b,y\n1,"a, b",true,yes\n,c,false,no\n2,,true,yes\n')
    assert joined(on_ranks(3, lambda comm: load(tmp_path / "a.csv", comm=comm, target="y")[0]))[0].shape == (3, 7)


def test_a_column_of_numbers_in_one_block_and_strings_in_another_is_categories(tmp_path, monkeypatch):
    monkeypatch.setattr(line_blocks, "_RECORDS", 8)
    found = csv(tmp_path, "a,y\n" + "1,2\n" * 8 + "1.0,2\nx,3\n", target="y")
    assert list(found.encoding.names()) == ["a=1", "a=1.0", "a=x"]


@pytest.mark.parametrize("value", ["-inf", "1e39"])
def test_what_is_no_finite_number_is_a_category_where_others_are_strings(value, tmp_path, monkeypatch):
    for block in (8, 1 << 20):
        monkeypatch.setattr(line_blocks, "_RECORDS", block)
        assert list(csv(tmp_path, f"a,y\n{value},2\n7,2\nx,2\n", target="y").encoding.names()) == [f"a={value}", "a=7", "a=x"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_labels_that_are_no_finite_numbers_are_names_where_others_are_and_refused_otherwise(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(line_blocks, "_RECORDS", 8)
    for others, names in (("yes", ["-inf", "no", "yes"]), ("1", None)):
        (tmp_path / "a.csv").write_text(f"a,y\n1,{others}\n2,{others}\n3,{'0' if names is None else 'no'}\n4,-inf\n")
        parts = on_ranks(ranks, lambda comm: load(tmp_path / "a.csv", comm=comm, target="y")[0])
        if names is None:
            assert {str(part) for part in parts} == {f"{tmp_path / 'a.csv'}, line 5: the column 'y' is -inf, which is not finite"}
        else:
            assert [list(part.names) for part in parts] == [names] * ranks


@pytest.mark.parametrize("value, names", [("0x10", ["a=0x10", "a=5.5", "a=7"]), ("16", ["a"])])
def test_hexadecimal_numbers_are_strings_in_every_block(value, names, tmp_path, monkeypatch):
    for block in (8, 1 << 20):
        monkeypatch.setattr(line_blocks, "_RECORDS", block)
        assert list(csv(tmp_path, f"a,y\n{value},2\n7,2\n5.5,2\n", target="y").encoding.names()) == names


def test_a_byte_order_mark_inside_a_file_is_part_of_a_field_in_every_block(tmp_path, monkeypatch):
    for block in (4, 1 << 20):
        monkeypatch.setattr(line_blocks, "_RECORDS", block)
        found = csv(tmp_path, "a,y\n\ufeff3,2\n7,2\n\ufeff3,1\n", target="y")
        assert list(found.encoding.names()) == ["a=7", "a=\ufeff3"]


def test_columns_that_are_said_to_be_categories_are(tmp_path):
    found = csv(tmp_path, "zip,day,y\n01,2020-01-01,1\n2,2020-01-02,0\n", target="y", categorical=["zip", "day", "y"])
    assert list(found.encoding.names()) == ["zip=01", "zip=2", "day=2020-01-01", "day=2020-01-02"]
    assert found.names == ("0", "1")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_column_of_too_many_categories_is_hashed_on_any_number_of_ranks(ranks, tmp_path):
    text = "user,y\n" + "".join(f"u{number % 12},1\n" for number in range(40)) + ",1\n"
    (tmp_path / "a.csv").write_text(text)
    options = {"target": "y", "max_categories": 11, "hash_bits": 3}
    parts = on_ranks(ranks, lambda comm: load(tmp_path / "a.csv", comm=comm, **options)[0])
    assert parts[0].encoding.columns[0].kind == HASHED and parts[0].features == 9
    whole = load(tmp_path / "a.csv", comm=sar.SERIAL, **options)[0]
    np.testing.assert_array_equal(joined(parts)[0].toarray(), whole.to_scipy().toarray())
    assert whole.indices[-1] == 8 and len(set(whole.indices[:12].tolist())) > 3
    assert load(tmp_path / "a.csv", comm=sar.SERIAL, **options | {"max_categories": 12})[0].features == 13


def test_a_test_set_is_encoded_as_the_training_set_by_names(tmp_path):
    (tmp_path / "a.csv").write_text("a,b,y\n1,red,yes\n2,blue,no\n,blue,no\n")
    (tmp_path / "b.csv").write_text("extra,y,b,a\nx,yes,green,7\ny,maybe,,\nz,no,blue,3\n")
    training, testing = load(tmp_path / "a.csv", tmp_path / "b.csv", target="y", comm=sar.SERIAL)
    assert list(training.encoding.names()) == ["a", "a (missing)", "b=blue", "b=red"]
    assert testing.to_scipy().toarray().tolist() == [[7, 0, 0, 0], [0, 1, 0, 0], [3, 0, 1, 0]]
    assert testing.named_labels.tolist() == ["yes", "maybe", "no"]


@pytest.mark.parametrize(
    "text, error",
    [
        ("b,y\nred,yes\n", "there is no column 'a', which the model was trained on, but 'b' and 'y'"),
        ("a,b,y\n1,x,no\noops,x,no\n", "b.csv, line 3: the column 'a' is 'oops', which is not a number, as it was in training"),
    ],
)
def test_a_table_that_cannot_be_encoded_as_in_training_is_refused(text, error, tmp_path):
    (tmp_path / "a.csv").write_text("a,b,y\n1,red,yes\n2,blue,no\n")
    (tmp_path / "b.csv").write_text(text)
    encoding = load(tmp_path / "a.csv", target="y", comm=sar.SERIAL)[0].encoding
    with pytest.raises(DatasetError, match=error):
        load(tmp_path / "b.csv", encoding=encoding, comm=sar.SERIAL)


def test_files_of_a_table_may_have_their_columns_in_any_order_and_fewer_rows_than_ranks(tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "1.csv").write_text("a,b,y\n1,red,0\n")
    (tmp_path / "parts" / "2.csv").write_text("")
    (tmp_path / "parts" / "3.csv").write_text("y,b,a\n1,blue,2\n")
    parts = on_ranks(3, lambda comm: load(tmp_path / "parts", comm=comm, target="y")[0])
    samples, labels = joined(parts)
    assert samples.toarray().tolist() == [[1, 0, 1], [2, 1, 0]] and labels.tolist() == [0, 1]


def test_a_test_set_is_converted_as_the_training_set(tmp_path):
    (tmp_path / "train.csv").write_text("a,y\nx,1\nz,0\n")
    (tmp_path / "test.csv").write_text("a,y\nz,0\n")
    training = load(tmp_path / "train.csv", target="y")[0]
    convert(tmp_path / "test.csv", tmp_path / "test.csr", sar.SERIAL, encoding=training.encoding)
    found = load(tmp_path / "test.csr")[0]
    assert found.encoding == training.encoding and found.to_scipy().toarray().tolist() == [[0, 1]]


@pytest.mark.parametrize("read", [load, partial(convert, out="a.csr", comm=sar.SERIAL)])
def test_a_misspelt_keyword_is_told_with_the_one_that_is_meant(read):
    with pytest.raises(TypeError, match=r"\(\) got an unexpected keyword argument 'tagret'; did you mean 'target'\?"):
        read("a.csv", tagret="y")


def test_plain_text_behind_tabs_stays_text_unless_a_column_is_named(tmp_path):
    (tmp_path / "a.tsv").write_text("y\ttext\nspam\tgood film\n")
    assert load(tmp_path / "a.tsv", comm=sar.SERIAL)[0].names == ("spam", "y")
    assert list(load(tmp_path / "a.tsv", comm=sar.SERIAL, target="y")[0].encoding.names()) == ["text=good film"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_damaged_type_of_one_row_group_is_refused_by_any_number_of_ranks(ranks, tmp_path):
    table = pa.table({"a": pa.array([1, 2, 3, 4], pa.int64()), "y": [0.0, 1.0, 0.0, 1.0]})
    pa.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2, use_dictionary=False)
    content = (tmp_path / "a.parquet").read_bytes()
    # The first field of ColumnMetaData, and the header of the list after it; the version of the format looks the same, and is before it.
    place = content.index(b"\x15\x04\x19", content.index(b"\x15\x04\x19") + 1)
    (tmp_path / "a.parquet").write_bytes(content[: place + 1] + b"\x0c" + content[place + 2 :])
    parts = on_ranks(ranks, lambda comm: load(tmp_path / "a.parquet", comm=comm, target="y")[0])
    (error,) = {str(part) for part in parts}
    assert error.startswith(f"cannot read {tmp_path / 'a.parquet'}: in row group 0: ") and error.endswith(": the file is damaged")
    assert "BYTE_ARRAY vs. INT64" in error


def test_statistics_that_contradict_the_schema_do_not_end_the_process(tmp_path):
    """pyarrow 26 ends it where the metadata of a column are looked at."""
    table = pa.table({"a": pa.array([1.5, None]), "y": [0.0, 1.0]})
    pa.parquet.write_table(table, tmp_path / "a.parquet", use_dictionary=False, compression="none")
    content = (tmp_path / "a.parquet").read_bytes()
    place = content.index(b"%\x02\x18\x01a") + 1  # an optional column, which becomes a required one
    (tmp_path / "a.parquet").write_bytes(content[:place] + b"\0" + content[place + 1 :])
    with pytest.raises(DatasetError, match=r"in row group 0: .*: the file is damaged"):
        load(tmp_path / "a.parquet", comm=sar.SERIAL, target="y")


def test_types_that_are_no_feature_are_refused_with_what_they_are(tmp_path):
    pa.parquet.write_table(pa.table({"a": [[1, 2]], "y": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DatasetError, match=r"a.parquet, row 0: the column 'a' holds list<element: int64>.*leave it out by drop"):
        load(tmp_path / "a.parquet", comm=sar.SERIAL, target="y")


@pytest.mark.parametrize("name, what", [("a.json", "JSON"), ("a.xlsx", "a spreadsheet"), ("a.h5", "HDF5")])
def test_what_is_read_is_said_of_files_that_are_not(name, what, tmp_path):
    (tmp_path / name).write_text("1 1:2\n")
    with pytest.raises(DatasetError, match=rf"it is {what}, by its name: supported formats are svmlight .*csv \(.csv\)"):
        load(tmp_path / name, comm=sar.SERIAL)


def test_a_table_that_is_taken_for_svmlight_text_says_how_to_read_it(tmp_path):
    (tmp_path / "a.txt").write_text("age,income\n1,2\n")
    with pytest.raises(DatasetError, match=r"of a table .CSV., name the column of labels by target"):
        load(tmp_path / "a.txt", comm=sar.SERIAL)
    assert load(tmp_path / "a.txt", comm=sar.SERIAL, target="income")[0].labels.tolist() == [2]


def test_columns_of_a_format_without_names_are_refused(tmp_path):
    (tmp_path / "a.svm").write_text("1 1:2\n")
    with pytest.raises(DatasetError, match="has the format svmlight, which has no named columns, but target needs them"):
        load(tmp_path / "a.svm", comm=sar.SERIAL, target="y")


def test_a_column_without_values_has_only_the_feature_of_missing_ones(tmp_path):
    """Also where a word that stands for a missing value is read as the number NaN."""
    (tmp_path / "a.csv").write_text("t,b,y\nNA,x,1\nNAn,z,0\n")
    training = load(tmp_path / "a.csv", comm=sar.SERIAL, target="y")[0]
    assert list(training.encoding.names()) == ["t (missing)", "b=x", "b=z"]
    assert training.indices.tolist() == [0, 1, 0, 2]
