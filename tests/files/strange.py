"""Files that have become something else, and archives that claim what they do not have."""

import io
import os
import zipfile


def npy(descr="<f4", shape="(3,)", items=bytes(12), order="False", version=(1, 0), length=None):
    """An array whose header says this, whatever is behind it."""
    text = f"{{'descr': {descr!r}, 'fortran_order': {order}, 'shape': {shape}, }}".encode() + b"\n"
    width = 2 if version == (1, 0) else 4
    return b"\x93NUMPY" + bytes(version) + (len(text) if length is None else length).to_bytes(width, "little") + text + items


#: Arrays that claim what they do not have.
CLAIMS = {
    "2**45 values": npy(shape="(35184372088832,)"),
    "a long matrix": npy(shape="(1073741824, 1073741824, 1073741824, 1073741824)"),
    "strings of gigabytes": npy("<U999999999", "(3,)"),
    "no bytes each": npy("<U0", "(35184372088832,)", b""),
    "less than there is": npy(shape="(2,)"),
    "a negative length": npy(shape="(-3,)"),
    "a length of 400 digits": npy(shape=f"({'9' * 400},)"),
    "a deep header": npy(shape="(" * 60_000),
    "a long header": npy(version=(2, 0), length=2**32 - 1),
    "another version": npy(version=(9, 0)),
    "objects": npy("|O"),
    "columns": npy([("a", "<f4")]),
    "no header": b"\x93NUMPY",
    "nothing": b"",
}


def archive(members, method=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method, compresslevel=1) as out:
        for name, content in members.items():
            out.writestr(f"{name}.npy", content)
    return file.getvalue()


def arrays_of(path):
    """The members of an `.npz`."""
    with zipfile.ZipFile(path) as given:
        return {name.removesuffix(".npy"): given.read(name) for name in given.namelist()}


def zeros(nbytes):
    """An array of so many bytes, in a thousandth of them."""
    return npy("|u1", f"({nbytes},)", bytes(nbytes))


def put(path, what, content=b""):
    """Something else in the place of a file."""
    path.unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "loop":
        path.symlink_to(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(content)
