//! Whether prepared statements outlive the transaction that prepared them.
//!
//! A pooler in transaction mode gives each transaction whatever server connection is free. One
//! that does not carry prepared statements over fails only when connections are exchanged, which
//! is under load; so they are made to be exchanged here, when the store starts.
//!
//! Two connections take turns, each with a statement of its own that the driver gives the same
//! name. A server connection that has served both refuses the name or answers the other one's
//! statement; one that has not seen a statement yet does not know it. Without a pooler, in session
//! mode, and with one that carries them over, every turn is answered right.

use std::time::Duration;

use inboxd_contract::StoreError;
use sqlx::postgres::{PgConnectOptions, PgConnection};
use sqlx::{ConnectOptions, Connection, Row};
use tokio::time::timeout;

use crate::error::{Failure, is_transient};

/// Whose turn it is. A pooler that takes the connection used last gives both the same one at once;
/// for one that goes around any number of them, one side's turns are so many apart that it gets
/// two different ones.
const TURNS: [usize; 7] = [0, 1, 1, 0, 0, 1, 0];
/// The statements: they differ in what they answer.
const STATEMENTS: [&str; 2] =
    ["SELECT 'inboxd one ' || $1::text", "SELECT 'inboxd two ' || $1::text"];
const ANSWERS: [&str; 2] = ["inboxd one asks", "inboxd two asks"];

const DOING: &str = "asking whether prepared statements are kept";

/// What a turn came to.
enum Turn {
    Right,
    /// The statement was not there, or another one was.
    Exchanged,
}

/// Refuses a pooler that does not carry prepared statements over.
pub(crate) async fn check(options: &PgConnectOptions, within: Duration) -> Result<(), StoreError> {
    let asked = timeout(within, take_turns(options)).await;
    match asked.map_err(|_| Failure::timed_out(DOING, within))?? {
        Turn::Right => Ok(()),
        Turn::Exchanged => Err(StoreError::permanent(
            "PostgreSQL: prepared statements get lost between transactions: there is a pooler in \
             transaction mode that does not carry them over (PgBouncer before 1.21, or with \
             max_prepared_statements = 0). Set database.prepared_statements = false, or give the \
             pooler max_prepared_statements",
        )),
    }
}

/// Connects once. A pool would try again without a word where nobody listens.
pub(crate) async fn reach(options: &PgConnectOptions, within: Duration) -> Result<(), StoreError> {
    let connected = timeout(within, options.connect()).await;
    let connection = connected
        .map_err(|_| Failure::timed_out("connecting", within))?
        .map_err(|error| Failure::of("connecting", error))?;
    // An orderly goodbye is a courtesy.
    let _ = connection.close().await;
    Ok(())
}

async fn take_turns(options: &PgConnectOptions) -> Result<Turn, Failure> {
    let connect = async || {
        let connected = options.connect().await;
        connected.map_err(|error| Failure::of("connecting", error))
    };
    let mut connections = [connect().await?, connect().await?];
    for side in TURNS {
        if let Turn::Exchanged = turn(&mut connections[side], side).await? {
            return Ok(Turn::Exchanged);
        }
    }
    for connection in connections {
        // An orderly goodbye is a courtesy.
        let _ = connection.close().await;
    }
    Ok(Turn::Right)
}

async fn turn(connection: &mut PgConnection, side: usize) -> Result<Turn, Failure> {
    let row = sqlx::query(STATEMENTS[side]).bind("asks").fetch_one(connection).await;
    match row.and_then(|row| row.try_get::<String, _>(0)) {
        Ok(answer) if answer == ANSWERS[side] => Ok(Turn::Right),
        Err(error) if is_transient(&error) => Err(Failure::of(DOING, error)),
        // The server can refuse nothing about this statement but that it is another one.
        Ok(_) | Err(_) => Ok(Turn::Exchanged),
    }
}
