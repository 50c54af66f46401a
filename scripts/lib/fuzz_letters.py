"""Puts parked messages and dead letters into a SQLite inbox, for scripts/fuzz-api.

Bodies that are text, bytes and none; ids and errors that want escaping; every state and reason.
"""

import base64
import json
import sqlite3
import sys
import time

DEAD = [
    "refused",
    "id_conflict",
    "unidentified",
    "unrouted",
    "body_too_large",
    "attempts_exhausted",
    "too_old",
]


def envelope(number):
    def text(value):
        return base64.b64encode(value).decode()

    return json.dumps(
        {
            "version": 1,
            "content_type": text(b"application/json"),
            "message_type": text(b"order.made"),
            "headers": [
                [text(b"tenant"), text(b"a\xff\x00b")],
                [text(b"empty"), None],
            ],
            "origin": {"kafka": {"topic": "orders", "partition": 0, "offset": number,
                                 "position_scope": None}},
        }
    )


def main(path):
    now = int(time.time() * 1000)
    database = sqlite3.connect(path)
    bodies = [b'{"order": 1}', b"\xff\x00\xfe", b"x" * 300_000]
    with database:
        for number in range(400):
            state = ["dead", "dead", "dead", "due", "discarded"][number % 5]
            reason = "failed" if state == "due" else DEAD[number % len(DEAD)]
            kept = state != "discarded" and reason != "body_too_large"
            message_id = f"message {number}/\u00fc\u001b[2J"
            database.execute(
                "INSERT INTO inbox_parked (subscription, consumer_id, message_id, fingerprint,"
                " lane, envelope, attempts, due_at, last_status, last_error, first_at, parked_at,"
                " reason, state, body_kept, body) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
                (
                    "orders",
                    "fuzzed",
                    message_id,
                    f"sha256:{number:064x}",
                    b"lane \xff",
                    envelope(number),
                    number % 7,
                    now + 86_400_000 if state == "due" else None,
                    [None, 422, 503][number % 3],
                    [None, "no such field", "\u001b[31mred"][number % 3],
                    now - 3_600_000,
                    now - number * 1_000,
                    reason,
                    state,
                    kept,
                    bodies[number % 3 if number < 30 else number % 2] if kept else None,
                ),
            )
            if number % 9 == 0:
                database.execute(
                    "INSERT INTO inbox_messages (consumer_id, message_id, fingerprint,"
                    " processed_at) VALUES (?, ?, ?, ?)",
                    ("fuzzed", message_id, f"sha256:{number:064x}", now),
                )


main(sys.argv[1])
