"""Compiled kernels are kept, but never older than what they are made of."""

import pickle

import numba

import coop_plan.planner.core.compiled as kernels


def test_the_key_changes_with_any_file_beside_the_kernel(tmp_path):
    (tmp_path / "state.py").write_text("ROW = 1\n")
    (tmp_path / "kernel.py").write_text("from state import ROW\n")
    before = kernels._sources.__wrapped__(tmp_path)
    assert kernels._sources.__wrapped__(tmp_path) == before
    (tmp_path / "state.py").write_text("ROW = 2\n")
    assert kernels._sources.__wrapped__(tmp_path) != before


def test_an_index_that_names_a_class_that_moved_is_an_empty_one(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    @kernels.njit
    def double(x):
        return 2 * x

    assert double(2) == 4
    (index,) = tmp_path.rglob("*.nbi")
    with index.open("rb") as file:
        pickle.load(file)  # numba's version, which stays
        head = index.read_bytes()[: file.tell()]
    index.write_bytes(head + b"cplanner.no_such_module\nGone\n.")

    @kernels.njit
    def double(x):
        return 2 * x

    assert double(2) == 4


def test_without_a_folder_to_write_kernels_still_compile(monkeypatch):
    def refuse(_):
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(kernels, "_Cache", refuse)

    @kernels.njit
    def triple(x):
        return 3 * x

    assert triple(2) == 6
