//! Small durable facts beside the inbox.

use async_trait::async_trait;
use inboxd_contract::{Notes, StoreError};
use sqlx::Row;
use sqlx::mysql::MySqlConnection;

use crate::MysqlStore;
use crate::error::is_conflict;
use crate::sql::query;

const NAME_BYTES_MAX: usize = 255;
const VALUE_BYTES_MAX: usize = 1_024;
/// Tries of a write that others are in the way of.
const TRIES: usize = 5;

fn check(name: &str, value: &str) -> Result<(), StoreError> {
    if name.len() > NAME_BYTES_MAX || value.len() > VALUE_BYTES_MAX {
        return Err(StoreError::permanent(format!(
            "a note has a name of at most {NAME_BYTES_MAX} bytes (this one: {}) and a value of \
             at most {VALUE_BYTES_MAX} (this one: {})",
            name.len(),
            value.len()
        )));
    }
    Ok(())
}

impl MysqlStore {
    async fn read_note(
        &self,
        connection: &mut MySqlConnection,
        key: &str,
    ) -> Result<Option<String>, sqlx::Error> {
        let text = self.sql.with_prefix("SELECT value FROM {p}inbox_notes WHERE name = ?");
        let row = query(text).bind(key.as_bytes()).fetch_optional(connection).await?;
        row.map(|row| {
            let value: Vec<u8> = row.try_get(0)?;
            String::from_utf8(value).map_err(|error| sqlx::Error::Decode(error.into()))
        })
        .transpose()
    }

    /// Inserts with `on_duplicate`, then reads what is there.
    async fn write_note(
        &self,
        what: &'static str,
        on_duplicate: &str,
        key: &str,
        value: &str,
    ) -> Result<String, StoreError> {
        check(key, value)?;
        let work = async {
            let mut tries_left = TRIES;
            loop {
                tries_left -= 1;
                let mut transaction = self.main.begin().await?;
                let result = async {
                    let connection = transaction.connection();
                    let text = self.sql.with_prefix(&format!(
                        "INSERT INTO {{p}}inbox_notes (name, value) VALUES (?, ?) \
                         ON DUPLICATE KEY UPDATE value = {on_duplicate}"
                    ));
                    let insert = query(text).bind(key.as_bytes()).bind(value.as_bytes());
                    insert.execute(&mut *connection).await?;
                    Ok(self.read_note(connection, key).await?.unwrap_or_default())
                }
                .await;
                match transaction.end(result).await {
                    Err(error) if is_conflict(&error) && tries_left > 0 => {}
                    result => return result,
                }
            }
        };
        self.main.in_time(what, work).await
    }
}

#[async_trait]
impl Notes for MysqlStore {
    async fn note(&self, key: &str) -> Result<Option<String>, StoreError> {
        let work = async {
            let mut transaction = self.main.begin().await?;
            let result = self.read_note(transaction.connection(), key).await;
            transaction.end(result).await
        };
        self.main.in_time("reading a note", work).await
    }

    async fn note_once(&self, key: &str, value: &str) -> Result<String, StoreError> {
        // A no-op for a row that exists; the read tells whose value it is.
        self.write_note("writing a note once", "value", key, value).await
    }

    async fn set_note(&self, key: &str, value: &str) -> Result<(), StoreError> {
        self.write_note("writing a note", "VALUES(value)", key, value).await.map(drop)
    }
}
