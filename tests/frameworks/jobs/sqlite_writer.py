"""One of several writers of an SQLite database: sqlite_writer.py DATABASE WRITER TRANSACTIONS.

Each transaction moves 1 from one account to another, so that the sum tells of a torn or lost one, and adds a row.
"""

from __future__ import annotations

import random
import sqlite3
import sys


def main() -> None:
    path, writer, transactions = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    database = sqlite3.connect(path, timeout=60, isolation_level=None)
    assert database.execute("pragma journal_mode").fetchone() == ("wal",)
    database.execute("pragma wal_autocheckpoint = 50")
    chance = random.Random(writer)
    for number in range(transactions):
        giver, taker = chance.sample(range(100), 2)
        database.execute("begin immediate")
        database.execute("update account set amount = amount - 1 where id = ?", (giver,))
        database.execute("insert into entry values (?, ?, ?)", (writer, number, "x" * 500))
        database.execute("update account set amount = amount + 1 where id = ?", (taker,))
        database.execute("commit")
        if number % 20 == 0:
            # A reader of the same process must see a whole state, while the other writer is at work.
            assert database.execute("select sum(amount) from account").fetchone() == (100_000,)
    database.close()


main()
