"""Reads a view as Python clients do, and compares everything with the source.

Usage: check.py SOURCE VIEW. Prints a line for each thing that holds; the first that does not ends it.
"""

import mmap
import os
import sys
from pathlib import Path

import ml_dtypes  # noqa: F401  (it teaches numpy the type bfloat16)
import numpy
from safetensors import safe_open


def same_bytes(ours, theirs):
    """Whether two arrays are equal bit for bit, which also holds where NaN is not equal to itself."""
    raw = [numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8) for array in (ours, theirs)]
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and numpy.array_equal(*raw)


def check_tensors(source, view, files):
    """Every tensor, through both of the ways in which safetensors reads."""
    for backend in ("mmap", "pread"):
        count, types = 0, set()
        for name in files:
            with safe_open(source / name, "np") as theirs, safe_open(view / name, "np", backend=backend) as ours:
                names = sorted(theirs.keys())
                assert sorted(ours.keys()) == names, f"{name}: other tensors in the view"
                for tensor in names:
                    got, want = ours.get_tensor(tensor), theirs.get_tensor(tensor)
                    assert same_bytes(got, want), f"{name}: {tensor} differs"
                    types.add(str(got.dtype))
                    count += 1
        assert count > 0, "no tensor was compared"
        print(f"ok  safetensors by {backend}: {count} tensors are equal ({', '.join(sorted(types))})")


def check_stat(source, view, files):
    """What engines ask before they open."""
    for name in files:
        ours, theirs = os.stat(view / name), os.stat(source / name)
        assert os.path.isfile(view / name), f"{name} is no file"
        assert ours.st_size == theirs.st_size, f"{name}: {ours.st_size} bytes, not {theirs.st_size}"
        assert ours.st_mtime_ns == theirs.st_mtime_ns, f"{name}: another modification time"
        assert not ours.st_mode & 0o222, f"{name} looks writable: {ours.st_mode:o}"
    print(f"ok  stat: {len(files)} files have their size and time, and look read-only")


def check_maps(source, view, files):
    """Private maps can be written to and stay private; shared ones can only be read."""
    for name in (name for name in files if os.path.getsize(source / name) > 0):
        content = (source / name).read_bytes()
        with open(view / name, "rb") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as private:
                assert private[:] == content, f"{name}: the private map differs"
                private[0] ^= 0xFF
            with mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as shared:
                assert shared[:] == content, f"{name}: the shared map differs, or a private write got through"
    print(f"ok  mmap: {len(files)} files are equal, private and shared")


def check_immutable(view, files):
    """No way of opening leads to a write."""
    for name in files:
        for mode in ("r+b", "ab"):
            try:
                with open(view / name, mode) as file:
                    file.write(b"x")
            except OSError:
                continue
            raise AssertionError(f"{name} could be written to with mode {mode}")
        try:
            os.truncate(view / name, 0)
        except OSError:
            pass
        else:
            raise AssertionError(f"{name} could be cut off")
        for prot in (mmap.PROT_WRITE, mmap.PROT_READ | mmap.PROT_WRITE):
            try:
                with open(view / name, "r+b") as file:
                    mmap.mmap(file.fileno(), 1, flags=mmap.MAP_SHARED, prot=prot).close()
            except (OSError, ValueError):
                continue
            raise AssertionError(f"{name} could be mapped for shared writing")
    print(f"ok  immutable: {len(files)} files refuse writes, cuts and shared writable maps")


def main(source, view):
    files = sorted(str(path.relative_to(view)) for path in view.rglob("*") if path.is_file())
    weights = [name for name in files if name.endswith(".safetensors")]
    assert weights and len(files) > len(weights), f"the view has {len(files)} files, {len(weights)} of weights"
    check_stat(source, view, files)
    check_tensors(source, view, weights)
    check_maps(source, view, files)
    check_immutable(view, files)
    # What was tried must have left no trace.
    check_tensors(source, view, weights)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
