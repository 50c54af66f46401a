//! Small durable facts beside the inbox.

use std::sync::Arc;

use async_trait::async_trait;
use futures::FutureExt;
use inboxd_contract::{Notes, StoreError};
use sqlx::Row;

use crate::SqliteStore;
use crate::error::store_error;

const NAME_BYTES_MAX: usize = 255;
const VALUE_BYTES_MAX: usize = 1_024;

fn check(name: &str, value: &str) -> Result<(), StoreError> {
    if name.len() > NAME_BYTES_MAX || value.len() > VALUE_BYTES_MAX {
        return Err(StoreError::permanent(format!(
            "a note has a name of at most {NAME_BYTES_MAX} bytes (this one: {}) and a value of \
             at most {VALUE_BYTES_MAX} (this one: {})",
            name.len(),
            value.len()
        )));
    }
    if name.contains('\0') || value.contains('\0') {
        return Err(StoreError::permanent("a note has a NUL, which no column holds"));
    }
    Ok(())
}

#[async_trait]
impl Notes for SqliteStore {
    async fn note(&self, key: &str) -> Result<Option<String>, StoreError> {
        let query = self.sql.note.query().bind(key.to_owned());
        let row = query.fetch_optional(&self.readers).await;
        row.and_then(|row| row.map(|row| row.try_get(0)).transpose())
            .map_err(|error| store_error("reading a note", error))
    }

    async fn note_once(&self, key: &str, value: &str) -> Result<String, StoreError> {
        check(key, value)?;
        let (sql, key, value) = (Arc::clone(&self.sql), key.to_owned(), value.to_owned());
        self.writer
            .transaction("writing a note once", move |connection| {
                async move {
                    let query = sql.note_once.query().bind(key.clone()).bind(value);
                    query.execute(&mut *connection).await?;
                    sql.note.query().bind(key).fetch_one(connection).await?.try_get(0)
                }
                .boxed()
            })
            .await
    }

    async fn set_note(&self, key: &str, value: &str) -> Result<(), StoreError> {
        check(key, value)?;
        let (sql, key, value) = (Arc::clone(&self.sql), key.to_owned(), value.to_owned());
        self.writer
            .transaction("writing a note", move |connection| {
                async move {
                    sql.set_note.query().bind(key).bind(value).execute(connection).await.map(drop)
                }
                .boxed()
            })
            .await
    }
}
