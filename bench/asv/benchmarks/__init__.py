"""The core figures over commits, for a maintainer: a few minutes a commit.

In bench/asv: `asv run main^!` measures the newest commit, `asv run v1.0.0..main` all since a tag, `asv continuous main HEAD` compares two,
`asv publish && asv preview` shows the curves. `asv run --quick -E existing:$PWD/../../.venv/bin/python` tries each once, in `.venv`.
"""
