"""`coop-plan place`: CSV in, CSV and a picture out, one line for every mistake."""

import io
from pathlib import Path

import pytest

from coop_plan.planner.importers.buffers_csv import read_buffers, write_buffers

SMALL = "id,lower,upper,size\na,0,3,4\nb,2,5,4\nc,4,6,3\n"


def test_a_placement_is_written_and_read_again(run, folder):
    (folder / "in.csv").write_text(SMALL)
    code, out, err = run("place", "in.csv", "-o", "out.csv")
    assert (code, err) == (0, "")
    assert "peak         8 bytes" in out
    assert "yes, proved" in out
    assert (folder / "out.csv").read_text().startswith("id,lower,upper,size,offset\na,0,3,4,")
    code, again, _ = run("place", "out.csv", "--capacity", "8", "-o", "-")
    assert code == 0
    assert again == (folder / "out.csv").read_text()


CASES = Path(__file__).parents[3] / "shared/cases"


@pytest.mark.skipif(not CASES.is_dir(), reason="no ../shared/cases")
def test_the_columns_of_minimallocs_converter(run, folder):
    code, out, err = run(
        "place", str(CASES / "minimalloc_columns.csv"), "-o", "-", "--plot", "m.html"
    )
    assert (code, err) == (0, "")
    assert out.startswith("id,lower,upper,size,alignment,hint,gaps,offset\n0,5,10,15,1,0,,")
    assert ",2,-1,7-8 9-10@1:17," in out
    assert (folder / "m.html").exists()


SAME = [
    "id,lower,upper,size,gaps\na,0,6,4,2-4 5-6@1:3\nb,2,4,4,\n",
    "buffer,start,upper,gaps,size\na,0,6, 2-4  5-6@1:3 ,4\nb,2,4,,4\n",
    "Buffer_ID,begin,end,size,gaps,alignment\na,0,5,4,2-3 5-5@1:3,1\nb,2,3,4,,\n",
    "end,size,id,lower,gaps,hint\n5,4,a,0,2-3 5-9@1:3 8-9,-1\n3,4,b,2,,-1\n",
]


@pytest.mark.parametrize("text", SAME)
def test_the_names_and_forms_of_columns(run, folder, text):
    """The buffer fits into the other's gap; `end`, also of gaps, is the last moment."""
    (folder / "in.csv").write_text(text)
    code, out, err = run("place", "in.csv", "--capacity", "4", "-o", "-")
    assert (code, err) == (0, "")
    assert out == "id,lower,upper,size,gaps,offset\na,0,6,4,2-4 5-6@1:3,0\nb,2,4,4,,0\n"


def test_alignment_of_a_line_and_of_all(run, folder):
    text = "id,lower,upper,size,alignment\na,0,2,1,4\nb,0,2,1,6\nc,0,2,1,\n"
    (folder / "in.csv").write_text(text)
    code, out, _ = run("place", "in.csv", "--alignment", "2", "-o", "-")
    assert code == 0
    assert out.startswith("id,lower,upper,size,alignment,offset\n")
    rows = [list(map(int, line.split(",")[4:])) for line in out.splitlines()[1:]]
    assert [unit for unit, _ in rows] == [4, 6, 2]
    assert all(offset % unit == 0 for unit, offset in rows)
    assert sorted(offset for _, offset in rows) == [0, 2, 4]


def test_a_hint_is_followed_where_it_is_best(run, folder):
    (folder / "in.csv").write_text("id,lower,upper,size,hint\na,0,2,4,4\nb,0,2,4,0\n")
    out = run("place", "in.csv", "-o", "-")[1]
    assert out == "id,lower,upper,size,hint,offset\na,0,2,4,4,4\nb,0,2,4,0,0\n"


def test_stdin_columns_in_any_order_and_given_offsets(run, monkeypatch):
    text = "size,offset,id,upper,lower\r\n4,4,a,3,0\r\n4,,b,5,2\r\n\r\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode("utf-8-sig"))))
    code, out, _ = run("place", "-", "-o", "-")
    assert code == 0
    assert out == "id,lower,upper,size,offset\na,0,3,4,4\nb,2,5,4,0\n"


@pytest.mark.parametrize("capacity", ["7", "1"])
def test_a_capacity_that_is_proved_too_small(run, folder, capacity):
    (folder / "in.csv").write_text(SMALL)
    code, out, err = run("place", "in.csv", "--capacity", capacity, "-o", "out.csv")
    assert (code, out) == (3, "")
    assert "exists: at least 8 bytes are needed" in err
    assert not (folder / "out.csv").exists()


def test_the_memory_map(run, folder):
    (folder / "in.csv").write_text(SMALL.replace("a,", "<a&b>,"))
    assert run("place", "in.csv", "--capacity", "10", "--plot", "map.html")[0] == 0
    page = (folder / "map.html").read_text()
    assert "<a&b>" not in page
    assert '"names":["\\u003ca&b>"' in page
    assert "http" not in page


@pytest.mark.parametrize(("kind", "begin"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_memory_map_as_a_picture(run, folder, kind, begin):
    pytest.importorskip("matplotlib")
    (folder / "in.csv").write_text(SMALL)
    assert run("place", "in.csv", "--plot", f"map.{kind}")[0] == 0
    assert (folder / f"map.{kind}").read_bytes().startswith(begin)


def test_an_empty_file_of_buffers(run, folder):
    (folder / "in.csv").write_text("id,lower,upper,size\n")
    assert run("place", "in.csv", "-o", "-", "--plot", "map.html")[1].count("\n") == 1


HEADER = "id,lower,upper,size,offset\n"
GAPS = "id,lower,upper,size,gaps\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: no header: id,lower,upper,size expected"),
        ("id,lower,upper\n", "line 1: the header has no column size"),
        ("id,lower,upper,size,colour\n", "line 1: column 'colour' is unknown"),
        ("id,lower,upper,size,size\n", "line 1: a column is there twice"),
        (HEADER + "a,0,1,4\n", "line 2: 4 values for the 5 columns"),
        (HEADER + "\na,0,1,x,\n", "line 3: size is not a whole number: 'x'"),
        (HEADER + "a,0,1,4.5,\n", "line 2: size is not a whole number: '4.5'"),
        (
            HEADER + "a,0,1,99999999999999999999,\n",
            "line 2: size 99999999999999999999 is too large",
        ),
        (HEADER + "a,0,1,-4,\n", "line 2: size is negative"),
        (HEADER + "a,3,3,4,\n", "line 2: lower 3 is not below upper 3"),
        (HEADER + "a,0,1,4,\na,0,1,4,\n", "line 3: id a is there twice"),
        (HEADER + "a,0,1,4,-1\n", "line 2: offset -1 is not a multiple of 1 from 0 up"),
        ("id,start,end,size\na,3,2,4\n", "line 2: start 3 is above end 2"),
        ("id,lower,end,size,upper\n", "line 1: a column is there twice"),
        (GAPS + "a,0,4,4,1-2-3\n", "line 2: gap '1-2-3' has not the form 7-8 or 7-8@1:17"),
        (GAPS + "a,0,4,4,x\n", "line 2: gap 'x' has not the form"),
        (GAPS + "a,0,4,4,2-1\n", "line 2: gap '2-1' ends before it begins"),
        (GAPS + "a,0,4,4,1-2@0:5\n", "line 2: gap '1-2@0:5' keeps bytes that are not in 0:4"),
        (GAPS + "a,0,4,4,1-2@2:1\n", "line 2: gap '1-2@2:1' keeps bytes that are not in 0:4"),
        (GAPS + "a,0,4,4,1-3 2-4\n", "line 2: two gaps overlap: '1-3 2-4'"),
        ("id,lower,upper,size,alignment\na,0,1,4,0\n", "line 2: alignment 0 is below 1"),
        (
            "id,lower,upper,size,alignment\na,0,1,4,9999999999999\n",
            "line 2: alignment 9999999999999, with 1 of all offsets, is too large",
        ),
        ("id,lower,upper,size,hint\na,0,1,4,x\n", "line 2: hint is not a whole number: 'x'"),
        (HEADER + 'a,0,"1,4\n', "line 2: unexpected end of data"),
        (HEADER + "a,0,2,4,0\nb,1,3,4,3\n", "buffers a and b overlap at their given offsets"),
        (b"\xff\xfe", "not UTF-8 text"),
    ],
)
def test_a_bad_file_is_one_line_with_its_number(run, folder, text, message):
    (folder / "in.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    code, out, err = run("place", "in.csv", "-o", "out.csv")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert f"in.csv: {message}" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["none.csv"], 2, "none.csv: cannot be read"),
        (["in.csv", "--capacity", "lots"], 2, "'lots' is not a size"),
        (["in.csv", "-o", "none/out.csv"], 1, "none is not a folder"),
        (["in.csv", "--plot", "map.gif"], 1, "a memory map is a .html, .png or .svg file"),
        (["in.csv", "--alignment", "0"], 2, "--alignment"),
        (["in.csv", "--time-limit", "-1"], 2, "--time-limit"),
    ],
)
def test_bad_arguments(run, folder, arguments, code, message):
    (folder / "in.csv").write_text(SMALL)
    ended, out, err = run("place", *arguments)
    assert (ended, out) == (code, "")
    assert message in err


def test_the_text_round_trips():
    buffers = read_buffers(SMALL, "x")
    text = write_buffers(buffers, [0, 4, 0])
    again = read_buffers(text, "x")
    assert again.offset == [0, 4, 0]
    assert (again.id, again.size) == (buffers.id, buffers.size)
