"""Names of hashed features: every rank finds those of its own lines, and the first has all."""

from thread_ranks import on_ranks

from sparseallreduce.linear import load
from sparseallreduce.linear.data.feature_names import feature_names

LINES = "1 'tag|ns foo:2 bar 17 |other:0.5 foo color:red\n-1 |ns bar :3 :4 | plain x:1\n"


def test_the_first_rank_has_the_names_of_all(tmp_path):
    lines = [LINES.replace("foo", f"word{number}") for number in range(20)]
    (tmp_path / "a.vw").write_text("".join(lines))

    def found(comm):
        dataset, _ = load(tmp_path / "a.vw", comm=comm)
        return feature_names(tmp_path / "a.vw", comm, dataset.features), set(dataset.indices.tolist())

    ranks = on_ranks(3, found)
    names = ranks[0][0]
    assert [each for each, _ in ranks[1:]] == [{}, {}]
    assert set(names.values()) == set().union(*(indices for _, indices in ranks))
    assert {f"ns^word{number}" for number in range(20)} <= names.keys()
