"""Boards between processes: nothing torn, nothing lost by a death, nothing believed that is not a record."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from burnish.real_robot.control.shared_memory import (
    HEADER,
    Board,
    blank,
    plan_dtype,
    shared_folder,
    state_dtype,
)
from burnish.real_robot.errors import RobotError

WIDE = np.dtype([("number", "<i8"), ("same", "<i8", (2000,))])

WRITER = """
import sys, numpy as np
from pathlib import Path
from burnish.real_robot.control.shared_memory import Board, blank
kind = np.dtype([("number", "<i8"), ("same", "<i8", (2000,))])
board = Board.open(Path(sys.argv[1]), kind)
n = 0
while True:
    n += 1
    board.write(blank(kind, number=n, same=n))
"""


def test_what_is_written_is_read(tmp_path):
    kind = state_dtype(3)
    mine = Board.create(tmp_path / "states", kind)
    theirs = Board.open(tmp_path / "states", kind)
    assert theirs.read() is None and theirs.count == 0
    record = blank(kind, ticks=7, q=[0.1, 0.2, 0.3], effort=np.nan)
    mine.write(record)
    found = theirs.read()
    assert found is not None and found.tobytes() == record.tobytes() and theirs.count == 1
    mine.write(blank(kind, ticks=8))
    assert int(theirs.read()["ticks"][0]) == 8 and int(found["ticks"][0]) == 7, "a record that was read is a copy"


def test_no_record_is_torn_while_another_process_writes(tmp_path):
    board = Board.create(tmp_path / "wide", WIDE)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "wide")])
    try:
        seen, deadline = set(), time.monotonic() + 20
        while len(seen) < 300 and time.monotonic() < deadline:
            record = board.read()
            if record is not None:
                assert (record["same"] == record["number"]).all()
                seen.add(int(record["number"][0]))
        assert len(seen) >= 300, "the writer was hardly seen, so nothing was shown"
    finally:
        writer.kill()
        writer.wait()
    # Killed at any instant, it leaves the last record or none; the next writer goes on either way.
    last = board.read()
    assert last is None or (last["same"] == last["number"]).all()
    board.write(blank(WIDE, number=-1, same=-1))
    assert int(board.read()["number"][0]) == -1


def test_without_the_count_a_record_would_be_torn(tmp_path):
    """The control: half of a record, as it lies in memory while somebody writes, is not handed out."""
    board = Board.create(tmp_path / "wide", WIDE)
    board.write(blank(WIDE, number=1, same=1))
    board._body[: WIDE.itemsize // 2] = 9
    assert board.read() is None, "the checksum did not see it"
    board.write(blank(WIDE, number=2, same=2))
    board._header["count"] += 1
    assert board.read() is None, "a record in the making was read"


def test_a_writer_that_is_held_up_is_not_waited_for(tmp_path):
    """While it is in the middle of a record, and if it never comes back, a reader has the one before; by its age it
    sees that nothing newer comes."""
    mine = Board.create(tmp_path / "wide", WIDE)
    theirs, late = (Board.open(tmp_path / "wide", WIDE) for _ in range(2))
    mine.write(blank(WIDE, number=1, same=1))
    assert int(theirs.read()["number"][0]) == 1
    mine._header["count"] += 1
    mine._body[: WIDE.itemsize // 2] = 9
    found = theirs.read()
    assert int(found["number"][0]) == 1 and (found["same"] == 1).all()
    assert late.read() is None, "who has read nothing before has nothing"
    mine.write(blank(WIDE, number=2, same=2))
    assert int(theirs.read()["number"][0]) == int(late.read()["number"][0]) == 2


def test_what_is_no_record_is_refused(tmp_path):
    path = tmp_path / "x"
    Board.create(path, plan_dtype(2)).write(blank(plan_dtype(2), seq=1))
    with pytest.raises(RobotError, match="one version"):
        Board.open(path, plan_dtype(3))
    with pytest.raises(FileExistsError):
        Board.create(path, plan_dtype(2))
    (tmp_path / "y").write_bytes(bytes(HEADER.itemsize + plan_dtype(2).itemsize))
    with pytest.raises(RobotError, match="no record of this program"):
        Board.open(tmp_path / "y", plan_dtype(2))
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError):
        Board.open(tmp_path / "link", plan_dtype(2))


def test_the_folder_is_ones_own():
    folder = shared_folder()
    try:
        assert folder.stat().st_mode & 0o077 == 0
    finally:
        folder.rmdir()
