"""The table of published memory has a row a setup, and its status names unexplained ones."""

import csv
import sys

from benchmarks import fits


def test_a_setup_becomes_a_row(monkeypatch, tmp_path, capsys):
    setup = fits.Setup("fcn_r18", 1, 0.01, "allocated", "here", optimizer="momentum")
    monkeypatch.setattr(fits, "SETUPS", [setup])
    path = tmp_path / "rows.csv"
    monkeypatch.setattr(sys, "argv", ["fits", "--csv", str(path)])
    assert fits.main() == 1
    (row,) = csv.DictReader(path.read_text().splitlines())
    assert 0 < float(row["keep_all"]) <= 1.0001 * float(row["eager"])
    assert "fcn_r18 1 momentum" in capsys.readouterr().out
