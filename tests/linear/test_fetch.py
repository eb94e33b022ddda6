"""Fetching from a server on loopback: broken transfers, changed files, errors, checksums, a shared cache."""

import bz2
import gzip
import hashlib
import io
import lzma
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests
from click_runner import CliRunner
from thread_ranks import on_ranks

import sparseallreduce as sar
from sparseallreduce.cache import CACHE_VARIABLE, default_cache
from sparseallreduce.cli import main
from sparseallreduce.linear import DatasetError, load
from sparseallreduce.linear.data.collection import download
from sparseallreduce.linear.data.collection.fetch import fetch
from sparseallreduce.linear.data.collection.sets import SETS, Remote
from sparseallreduce.linear.data.convert import convert

TEXT = b"".join(b"%d 1:%d 7:0.5\n" % (number % 2, number * 7919 % 99991 + 1) for number in range(20_000))
FILE = bz2.compress(TEXT)


class Server:
    """Files over HTTP, and how the server misbehaves: each request takes the next of `moods`, and then all is well."""

    def __init__(self):
        self.files: dict[str, bytes] = {}
        self.tag = '"first"'
        self.ranges = True
        self.lengths = True  # whether it says how long a file is
        self.moods: list[Callable | int | str] = []
        self.requests: list[tuple[str, str | None, int]] = []  # path, range, bytes sent
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer._answer(self)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/binary/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler):
        name = handler.path.rpartition("/")[2]
        mood = self.moods.pop(0) if self.moods else None
        asked = handler.headers.get("Range")
        content = self.files.get(name)
        if content is None or mood == "broken":
            self.requests.append((name, asked, 0))
            return handler.send_error(404 if content is None else 503)
        start = 0
        if asked and self.ranges and handler.headers.get("If-Range") == self.tag:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                self.requests.append((name, asked, 0))
                handler.send_response(416)
                handler.send_header("Content-Range", f"bytes */{len(content)}")
                return handler.end_headers()
            handler.send_response(206)
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            handler.send_response(200)
        if self.tag:
            handler.send_header("ETag", self.tag)
        if self.lengths:
            handler.send_header("Content-Length", str(len(content) - start))
        handler.end_headers()
        sent = content[start : start + mood] if isinstance(mood, int) else content[start:]
        self.requests.append((name, asked, len(sent)))
        handler.wfile.write(sent)  # the connection ends here, too early if the mood is a number of bytes


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(download, "_PAUSE", 0.01)
    monkeypatch.setattr(download, "_PIECE", 100)
    monkeypatch.setitem(SETS, "little", Remote(99_999, "little", 20_000, suffixes=(".bz2",)))
    server = Server()
    server.files["little.bz2"] = FILE
    yield server
    server.close()


def fetched(server, cache, name="little", **options):
    return fetch(name, sar.SERIAL, cache=cache, mirror=server.url, **options)


def test_a_set_is_fetched_and_converted(server, tmp_path):
    (tmp_path / "in.svm").write_bytes(TEXT)
    convert(tmp_path / "in.svm", tmp_path / "expected.csr", sar.SERIAL, n_features=99_999)

    assert fetched(server, tmp_path / "cache") == [tmp_path / "cache" / "little.csr"]

    assert (tmp_path / "cache" / "little.csr").read_bytes() == (tmp_path / "expected.csr").read_bytes()
    assert (tmp_path / "cache" / "little.bz2").read_bytes() == FILE
    assert not list((tmp_path / "cache").glob("*.part*"))


def test_what_is_in_the_cache_is_not_fetched_again(server, tmp_path):
    for binary in (False, True, True):
        fetched(server, tmp_path, binary=binary)
    (tmp_path / "little.csr").unlink()
    fetched(server, tmp_path)
    assert len(server.requests) == 1


@pytest.mark.parametrize("breaks", [[100], [1000, 5000, 300], [len(FILE) - 1]])
def test_a_broken_transfer_goes_on_where_it_broke(server, tmp_path, breaks):
    server.moods = list(breaks)
    [path] = fetched(server, tmp_path, binary=False)
    assert path.read_bytes() == FILE
    kept = sum(sent // 100 * 100 for sent in breaks)
    assert [sent for _, _, sent in server.requests] == [*breaks, len(FILE) - kept]
    assert server.requests[-1][1] == f"bytes={kept}-"


def test_a_later_run_goes_on_where_an_earlier_one_gave_up(server, tmp_path):
    server.moods = [5000, *["broken"] * 5]
    with pytest.raises(DatasetError, match=r"cannot fetch http.*little\.bz2: 503 .*; the 5000 bytes received are kept for the next"):
        fetched(server, tmp_path)
    assert len(server.requests) == 6
    [path] = fetched(server, tmp_path, binary=False)
    assert path.read_bytes() == FILE
    assert server.requests[-1] == ("little.bz2", "bytes=5000-", len(FILE) - 5000)


def test_a_transfer_that_broke_behind_the_last_byte_is_whole(server, tmp_path):
    (tmp_path / "little.bz2.part").write_bytes(FILE)
    (tmp_path / "little.bz2.part.version").write_text(server.tag)
    [path] = fetched(server, tmp_path, binary=False)
    assert path.read_bytes() == FILE
    assert [sent for _, _, sent in server.requests] == [0]


def test_a_file_that_has_changed_meanwhile_comes_anew(server, tmp_path):
    server.moods = [5000, *["broken"] * 5]
    with pytest.raises(DatasetError):
        fetched(server, tmp_path)
    server.files["little.bz2"], server.tag = bz2.compress(TEXT.replace(b"0.5", b"0.25")), '"second"'
    [path] = fetched(server, tmp_path, binary=False)
    assert path.read_bytes() == server.files["little.bz2"]


@pytest.mark.parametrize("why", ["ranges", "tag", "weak tag"])
def test_without_what_it_takes_to_go_on_the_file_comes_anew(server, tmp_path, why):
    server.ranges = why != "ranges"
    server.tag = {"tag": "", "weak tag": 'W/"weak"'}.get(why, server.tag)
    server.moods = [5000]
    [path] = fetched(server, tmp_path, binary=False)
    assert path.read_bytes() == FILE
    assert [sent for _, _, sent in server.requests] == [5000, len(FILE)]


def test_a_part_longer_than_the_file_comes_anew(server, tmp_path):
    (tmp_path / "little.bz2.part").write_bytes(FILE + b"more")
    (tmp_path / "little.bz2.part.version").write_text(server.tag)
    [path] = fetched(server, tmp_path, binary=False)
    assert path.read_bytes() == FILE


def packed(suffix, text=TEXT):
    return {".bz2": bz2.compress, ".xz": lzma.compress, ".gz": gzip.compress, "": bytes}[suffix](text)


@pytest.fixture(params=[".bz2", ".xz", ".gz", ""])
def unmeasured(server, monkeypatch, request):
    """The name of a file of this suffix, how long which is the server does not say."""
    monkeypatch.setitem(SETS, "little", Remote(99_999, "little", 20_000, suffixes=(request.param,)))
    server.lengths = False
    server.files[f"little{request.param}"] = packed(request.param)
    return f"little{request.param}"


@pytest.mark.parametrize("binary", [False, True])
def test_a_transfer_whose_length_nobody_said_is_whole_when_the_file_has_an_end(server, tmp_path, unmeasured, binary):
    server.moods = [5000, 7000]
    server.tag = ""
    [path] = fetched(server, tmp_path, binary=binary)
    assert (tmp_path / unmeasured).read_bytes() == server.files[unmeasured]
    assert [sent for _, _, sent in server.requests] == [5000, 7000, len(server.files[unmeasured])]
    assert binary or path == tmp_path / unmeasured


@pytest.mark.parametrize("binary", [False, True])
def test_a_transfer_that_never_comes_to_an_end_is_no_file_and_pins_nothing(server, tmp_path, unmeasured, binary):
    server.moods = [len(server.files[unmeasured]) - 3] * 20
    server.ranges = False
    with pytest.raises(DatasetError, match=r"ended after .* bytes, in the middle of the file, whose length the server did not send"):
        fetched(server, tmp_path, binary=binary)
    assert len(server.requests) == 6
    assert {path.suffix for path in tmp_path.iterdir()} <= {".part", ".version", ".lock"}


def test_a_server_that_gives_less_now_and_more_then_is_not_asked_for_ever(server, tmp_path):
    server.lengths, server.tag, server.moods = False, "", [300, 100, 200] * 20
    with pytest.raises(DatasetError, match="in the middle of the file"):
        fetched(server, tmp_path)
    assert len(server.requests) == 6


@pytest.mark.parametrize("suffix", [".bz2", ""])
@pytest.mark.parametrize(
    "text,reason",
    [
        (b"".join(TEXT.splitlines(keepends=True)[:-1]), "19999 samples in it instead of 20000"),
        (b"", "0 samples in it instead of 20000"),
        (TEXT.replace(b"1 1:7920 ", b"1 0:7920 "), "line 2: index 0, but indices count from 1"),
        (TEXT + b"1 100000:1\n", "index 100000 is above the highest of 99999"),
    ],
    ids=["a line less", "empty", "an index", "a feature"],
)
@pytest.mark.parametrize("binary", [False, True])
def test_what_is_not_the_published_set_is_refused_converted_or_not_and_pins_nothing(
    server, tmp_path, monkeypatch, suffix, text, reason, binary
):
    monkeypatch.setitem(SETS, "little", Remote(99_999, "little", 20_000, suffixes=(suffix,)))
    server.files[f"little{suffix}"] = packed(suffix, text)
    errors = on_ranks(2, lambda comm: fetch("little", comm, cache=tmp_path, mirror=server.url, binary=binary))
    assert len(set(map(str, errors))) == 1
    assert f"{tmp_path}/little{suffix}" in str(errors[0]) and reason in str(errors[0]) and "to fetch it again" in str(errors[0])
    assert not list(tmp_path.glob("*.sha256")) and not list(tmp_path.glob("*.csr"))
    server.files[f"little{suffix}"] = packed(suffix)
    (tmp_path / f"little{suffix}").unlink()
    fetched(server, tmp_path, binary=binary)
    assert list(tmp_path.glob("*.sha256"))


def test_a_file_that_has_its_checksum_is_not_read_again(server, tmp_path, monkeypatch):
    fetched(server, tmp_path, binary=False)
    monkeypatch.setattr("sparseallreduce.linear.data.collection.fetch.open_samples", None)
    assert fetched(server, tmp_path, binary=False) == [tmp_path / "little.bz2"]
    digest = hashlib.sha256(FILE).hexdigest()
    assert fetched(server, tmp_path / "other", binary=False, checksums={"little.bz2": digest}) == [tmp_path / "other" / "little.bz2"]


@pytest.mark.parametrize("content", [b"", b"abc  little.bz2\n", b"\xff" * 70, b"0" * 64 + b" x" * 4096, "pipe"])
def test_a_checksum_that_is_damaged_is_named_and_not_replaced(server, tmp_path, content):
    fetched(server, tmp_path, binary=False)
    pinned = tmp_path / "little.bz2.sha256"
    pinned.unlink()
    os.mkfifo(pinned) if content == "pipe" else pinned.write_bytes(content)
    with pytest.raises(DatasetError, match=rf"cannot read {pinned}: Not a regular file|{pinned} is damaged: there is no checksum"):
        fetched(server, tmp_path, binary=False)
    assert len(server.requests) == 1


def test_a_converted_file_that_is_damaged_is_converted_anew(server, tmp_path):
    [path] = fetched(server, tmp_path)
    good = path.read_bytes()
    for damaged in (b"", good[:100], good[:-1], good + b"\0", bytes(len(good)), b"1 1:1\n"):
        path.write_bytes(damaged)
        assert fetched(server, tmp_path) == [path] and path.read_bytes() == good
    assert len(server.requests) == 1


@pytest.mark.parametrize("name", ["little.bz2", "little.csr"])
def test_a_pipe_in_the_place_of_a_file_of_the_cache_is_an_error(server, tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(DatasetError, match=f"cannot read {tmp_path}/{name}: Not a regular file"):
        fetched(server, tmp_path)


def test_what_is_left_of_a_transfer_may_be_anything(server, tmp_path):
    part, version = tmp_path / "little.bz2.part", tmp_path / "little.bz2.part.version"
    for content in (b"\xff\xfe", b"a\nb: c", b"x" * 100_000, "pipe", "device"):
        part.write_bytes(FILE[:500])
        if content == "pipe":
            part.unlink()
            os.mkfifo(part)
            version.symlink_to("/dev/zero")
        elif content == "device":
            part.unlink()
            part.symlink_to("/dev/zero")
        else:
            version.write_bytes(content)
        [path] = fetched(server, tmp_path, binary=False)
        assert path.read_bytes() == FILE
        path.unlink()
    assert all(sent == len(FILE) for _, _, sent in server.requests)


def test_a_file_that_is_not_there(server, tmp_path):
    server.files.clear()
    with pytest.raises(DatasetError, match=r"little\.bz2: 404 Not Found; there is no little\.bz2: choose another --mirror"):
        fetched(server, tmp_path)
    assert len(server.requests) == 1


def test_nobody_listens(server, tmp_path):
    server.close()
    with pytest.raises(DatasetError, match=r"cannot fetch .*: .*Connection refused"):
        fetched(server, tmp_path)


def test_the_compression_that_the_mirror_has_is_taken(server, tmp_path, monkeypatch):
    monkeypatch.setitem(SETS, "little", Remote(99_999, "little", 20_000, suffixes=(".xz", ".bz2")))
    fetched(server, tmp_path)
    assert [name for name, _, _ in server.requests] == ["little.xz", "little.bz2"]
    (tmp_path / "little.csr").unlink()
    fetched(server, tmp_path)
    assert len(server.requests) == 2


@pytest.mark.parametrize("algorithm", ["sha256", "md5"])
def test_checksums(server, tmp_path, algorithm):
    right = hashlib.new(algorithm, FILE).hexdigest()
    prefix = "" if algorithm == "sha256" else f"{algorithm}:"
    with pytest.raises(DatasetError, match=f"another checksum than {prefix}{right[::-1]}: the received file is discarded"):
        fetched(server, tmp_path, checksums={"little.bz2": prefix + right[::-1]})
    assert not (tmp_path / "little.bz2").exists()
    assert fetched(server, tmp_path, checksums={"little.bz2": prefix + right}) == [tmp_path / "little.csr"]


def test_what_came_first_is_what_comes_later(server, tmp_path):
    fetched(server, tmp_path)
    assert (tmp_path / "little.bz2.sha256").read_text() == f"{hashlib.sha256(FILE).hexdigest()}  little.bz2\n"
    for path in (tmp_path / "little.csr", tmp_path / "little.bz2"):
        path.unlink()
    server.files["little.bz2"], server.tag = bz2.compress(TEXT, 1) + b"", '"altered"'
    assert server.files["little.bz2"] != FILE
    with pytest.raises(DatasetError, match=r"another checksum than .* if the file has been replaced since, remove .*little\.bz2\.sha256"):
        fetched(server, tmp_path)
    (tmp_path / "little.bz2.sha256").unlink()
    assert fetched(server, tmp_path) == [tmp_path / "little.csr"]


def test_a_damaged_file_pins_nothing(server, tmp_path):
    server.files["little.bz2"] = bz2.compress(TEXT * 2)
    with pytest.raises(DatasetError, match="40000 samples in it instead of 20000"):
        fetched(server, tmp_path)
    assert not list(tmp_path.glob("*.sha256"))


class Redirecting(requests.adapters.BaseAdapter):
    """Answers every request with a redirection."""

    def __init__(self, target):
        super().__init__()
        self.target = target

    def send(self, request, **_):
        response = requests.Response()
        response.status_code, response.url, response.request = 302, request.url, request
        response.headers["Location"] = self.target
        response.raw = io.BytesIO()
        return response

    def close(self):
        pass


@pytest.mark.parametrize("target", ["http://elsewhere/a", "//elsewhere/a", "ftp://elsewhere/a", "b"])
def test_a_server_asked_by_https_leads_to_no_other_protocol(tmp_path, target, monkeypatch):
    def mounted(self):
        requests.Session.__init__(self)
        self.mount("https://", Redirecting(target))

    monkeypatch.setattr(download.Secure, "__init__", mounted)
    monkeypatch.setattr(download, "_ATTEMPTS", 1)
    encrypted = target in ("//elsewhere/a", "b")  # there it goes on, in a circle
    with pytest.raises(DatasetError, match="Exceeded 30 redirects" if encrypted else f"redirects to {target}, which is not encrypted"):
        download.Downloader(tmp_path / "a.part")("https://here/a", str(tmp_path / "a"))


@pytest.mark.parametrize(
    "content,reason",
    [
        (bz2.compress(TEXT)[:-100], "ended before the end-of-stream marker"),
        (bz2.compress(TEXT * 2), "40000 samples in it instead of 20000"),
        (bz2.compress(b"<html>not found</html>"), "line 1: the label '<html>not' is not a number"),
    ],
)
def test_a_file_that_is_not_what_the_collection_lists(server, tmp_path, content, reason):
    server.files["little.bz2"] = content
    with pytest.raises(DatasetError, match=reason):
        fetched(server, tmp_path)
    assert not list(tmp_path.glob("*.csr"))


def test_training_and_test_set(server, tmp_path, monkeypatch):
    monkeypatch.setitem(SETS, "little", Remote(99_999, "little", 20_000, "little.t", 2, (".bz2",)))
    server.files["little.t.bz2"] = bz2.compress(b"1 5:1\n0 6:1\n")
    train, test = fetched(server, tmp_path)
    assert [part.total_samples for part in load(train, test, comm=sar.SERIAL)] == [20_000, 2]


def test_ranks_fetch_once_and_fail_together(server, tmp_path):
    assert on_ranks(3, lambda comm: fetch("little", comm, cache=tmp_path, mirror=server.url)) == [[tmp_path / "little.csr"]] * 3
    assert len(server.requests) == 1
    server.files.clear()
    errors = on_ranks(3, lambda comm: fetch("little", comm, cache=tmp_path / "other", mirror=server.url))
    assert len({str(error) for error in errors}) == 1 and "404" in str(errors[0])


def test_processes_that_share_a_cache_fetch_once(server, tmp_path):
    code = (
        "import sys\nimport sparseallreduce as sar\nfrom sparseallreduce.linear.data.collection.fetch import fetch\n"
        "from sparseallreduce.linear.data.collection.sets import SETS, Remote\n"
        "SETS['little'] = Remote(99_999, 'little', 20_000, suffixes=('.bz2',))\n"
        "print(*fetch('little', sar.SERIAL, cache=sys.argv[1], mirror=sys.argv[2]))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", code, str(tmp_path), server.url]
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=60)[0].strip() for process in processes] == [str(tmp_path / "little.csr")] * 2
    assert len(server.requests) == 1


def test_the_command_says_where_the_set_is(server, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setitem(SETS, "a9a", Remote(99_999, "little", 20_000, suffixes=(".bz2",)))
    result = CliRunner().invoke(
        main, ["fetch", "a9a", "--mirror", server.url, "--checksum", "little.bz2=" + hashlib.sha256(FILE).hexdigest()]
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == str(tmp_path / "little.csr")
    assert default_cache() == tmp_path
    result = CliRunner().invoke(main, ["fetch", "a9a", "--mirror", server.url, "--no-convert"])
    assert result.stdout.splitlines() == [str(tmp_path / "little.bz2")]


@pytest.mark.parametrize("arguments,status", [(["nothing"], 2), (["a9a", "--checksum", "abc"], 2), (["a9a"], 1)])
def test_the_command_fails_in_one_line(server, tmp_path, arguments, status):
    result = CliRunner().invoke(main, ["fetch", *arguments, "--mirror", server.url, "--cache", str(tmp_path)])
    assert result.exit_code == status
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1


def test_a_cache_that_cannot_be_written_is_named(server, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetError, match=f"cannot write {tmp_path}/file/cache: Not a directory"):
        fetched(server, tmp_path / "file" / "cache")
