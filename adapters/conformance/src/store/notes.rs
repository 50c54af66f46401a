//! Small durable facts.

use uuid::Uuid;

use super::context::{Context, all_ok};

fn fresh() -> String {
    format!("note:{}", Uuid::new_v4())
}

pub async fn note_is_stored_once(context: &Context) {
    let key = fresh();
    assert_eq!(context.a.note(&key).await.expect("answered"), None);
    let values: Vec<_> = (0..20).map(|index| format!("value {index}")).collect();
    let calls = values.iter().enumerate().map(|(index, value)| {
        let store = if index % 2 == 0 { &context.a } else { &context.b };
        store.note_once(&key, value)
    });
    let answers = all_ok(futures::future::join_all(calls).await);
    assert!(answers.iter().all(|answer| *answer == answers[0]), "told apart: {answers:?}");
    assert!(values.contains(&answers[0]));
    let stored = context.b.note(&key).await.expect("answered");
    assert_eq!(stored.as_ref(), Some(&answers[0]));
    let late = context.a.note_once(&key, "late").await.expect("answered");
    assert_eq!(Some(late), stored, "the first one stays");
}

pub async fn note_is_replaced(context: &Context) {
    let key = fresh();
    let long = "\u{1f600}".repeat(256);
    for value in ["first", "", "second \u{e9}", &long] {
        context.a.set_note(&key, value).await.expect("stored");
        assert_eq!(context.b.note(&key).await.expect("answered").as_deref(), Some(value));
    }
    assert_eq!(context.b.note_once(&key, "late").await.expect("answered"), long);
}

pub async fn keys_compare_by_bytes(context: &Context) {
    let scope = fresh();
    let padding = "k".repeat(255 - scope.len());
    let endings = ["a", "A", "a ", "\u{e9}", "e\u{301}", padding.as_str()];
    for ending in endings {
        context.a.set_note(&format!("{scope}{ending}"), ending).await.expect("stored");
    }
    for ending in endings {
        let stored = context.a.note(&format!("{scope}{ending}")).await.expect("answered");
        assert_eq!(stored.as_deref(), Some(ending));
    }
}
