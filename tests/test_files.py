import os
import threading

import pytest

from remat._files import UnwritableError, check_writable, write_text


def test_replaces_a_file_whole(tmp_path):
    path = tmp_path / "x.json"
    write_text(path, "one")
    write_text(path, "two")
    assert path.read_text() == "two"
    assert os.listdir(tmp_path) == ["x.json"]


@pytest.mark.parametrize("name", ["missing/x.json", "."])
def test_refuses_a_path_that_cannot_be_written(tmp_path, name):
    with pytest.raises(UnwritableError, match="cannot write"):
        check_writable(tmp_path / name)


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "x.json"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x.json"]


def test_two_writers_leave_one_whole_file(tmp_path):
    path = tmp_path / "x.json"
    texts = [letter * 200_000 for letter in "ab"]
    writers = [
        threading.Thread(target=lambda t=t: [write_text(path, t) for _ in range(20)])
        for t in texts
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert path.read_text() in texts
