"""The table of published memory has a row a setup, and its status names unexplained ones."""

import csv
import sys

from hypothesis import given
from hypothesis import strategies as st

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


@given(difference=st.floats(-1, 1), explains=st.floats(-1, 1), beyond=st.floats(0.011, 1))
def test_a_reason_covers_the_difference_that_it_explains_and_no_larger_one(
    difference, explains, beyond
):
    setup = fits.Setup("fcn_r18", 1, 1, "reserved", "here", reason="known", explains=explains)
    covers = setup.explained
    assert covers(explains)
    assert covers(explains / 2)
    outside = explains + beyond if explains > 0 else explains - beyond
    assert covers(outside) == (abs(outside) <= fits.TOLERANCE)
    opposite = -beyond if explains > 0 else beyond
    assert covers(opposite) == (abs(opposite) <= fits.TOLERANCE)
    bare = fits.Setup("fcn_r18", 1, 1, "allocated", "here")
    assert bare.explained(difference) == (abs(difference) <= fits.TOLERANCE)
