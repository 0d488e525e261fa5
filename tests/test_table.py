"""Claims about rucksack/table.py."""

from rucksack.table import Table


def test_columns_line_up_in_a_terminal():
    """A wide character takes two columns of a terminal."""
    rows = [['中文', 1.0], ['word', 3.0]]
    lines = str(Table('title', {'token': '', 'p': '.1f'}, rows)).splitlines()
    assert lines[2:] == ['token    p', '中文   1.0', 'word   3.0']
