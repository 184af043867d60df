"""The board: a reader never sees half a row, and never waits for a writer."""

import struct

import pytest

from services.worker.engines import board as boards
from trimtab.scheduling import STATS


@pytest.fixture
def pair():
    path = boards.create()
    yield boards.Board(path), boards.Board(path)
    path.unlink()


def test_the_newest_row_is_read(pair):
    writer, reader = pair
    assert reader.read() == boards.Row()
    row = boards.Row(7, 1.5, 20.0, 0, 3, 4, 500, 60, 64, 9, 10, 11)
    writer.write(row)
    assert reader.read() == row


def test_statistics_are_read_by_their_names_and_leave_the_row_alone(pair):
    writer, reader = pair
    row = boards.Row(7, 1.5, 20.0, 0, 3, 4, 500, 60, 64, 9, 10, 11, 12.5)
    writer.write(row)
    values = tuple(float(n) for n in range(1, len(STATS) + 1))
    writer.write_stats(values)
    assert reader.read_stats() == dict(zip(STATS, values, strict=True))
    assert reader.read() == row


def test_last_words_are_read_and_leave_everything_else_alone(pair):
    writer, reader = pair
    assert reader.read_words() == ""
    row, values = boards.Row(7, 1.5), tuple(float(n) for n in range(1, len(STATS) + 1))
    writer.write(row)
    writer.write_stats(values)
    writer.write_words("RuntimeError: no — wörds")
    assert reader.read_words() == "RuntimeError: no — wörds"
    writer.write_words("x" * 5000)
    assert reader.read_words() == "x" * boards.MAX_WORDS
    assert (reader.read(), tuple(reader.read_stats().values())) == (row, values)


def test_a_writer_that_was_killed_in_the_middle_leaves_the_row_before(pair):
    writer, reader = pair
    writer.write(boards.Row(step_no=5))
    assert reader.read().step_no == 5
    (seq,) = struct.unpack_from("<Q", writer._map, 0)
    struct.pack_into("<Q", writer._map, 0, seq + 1)
    assert reader.read().step_no == 5


def test_boards_of_dead_processes_are_swept_and_those_of_others_are_left(tmp_path, monkeypatch):
    dead = boards.create()
    renamed = dead.with_name("trimtab-4194305-x")
    dead.rename(renamed)
    mine = boards.create()
    assert not renamed.exists()
    mine.unlink()
