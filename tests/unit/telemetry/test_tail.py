"""Growing files: each line once, also after a failure of its reader and after a rotation."""

from __future__ import annotations

from pathlib import Path

from trinity_mq.telemetry.tail import Tail


def test_a_line_whose_handling_fails_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"first\nsecond\nthird\nunfinished")
    tail = Tail(path)
    for line in tail.read():
        if line == b"second\n":
            break
    assert tail.offset == len(b"first\n")
    assert list(tail.read()) == [b"second\n", b"third\n"]
    assert list(Tail(path, tail.offset).read()) == []


def test_it_says_whether_a_bounded_read_reached_the_end(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"first\nsecond\n")
    tail = Tail(path)
    assert (list(tail.read(max_bytes=3)), tail.caught_up) == ([b"first\n"], False)
    assert (list(tail.read()), tail.caught_up) == ([b"second\n"], True)


def test_of_a_rotated_file_it_reads_only_its_own_inode(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"first\n")
    tail = Tail(path, inode=path.stat().st_ino)
    path.rename(tmp_path / "lines.1")
    path.write_bytes(b"other\n")
    assert list(tail.read()) == []
    tail.path = tmp_path / "lines.1"
    assert list(tail.read()) == [b"first\n"]
