//! Who changes something, for the log and for the audit.

use crate::admin::ACTOR_BYTES_MAX;

/// The name that is given, else user and host; visible ASCII alone, cut where it is too long.
pub(super) fn of(given: Option<&str>) -> String {
    let name = given.map_or_else(user_at_host, str::to_owned);
    let visible = name.chars().map(|character| match character {
        ' '..='~' => character,
        _ => '?',
    });
    let visible: String = visible.take(ACTOR_BYTES_MAX).collect();
    match visible.trim() {
        "" => "unknown".to_owned(),
        name => name.to_owned(),
    }
}

fn user_at_host() -> String {
    let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    let user = variable("USER").or_else(|| variable("LOGNAME"));
    let host = hostname::get().ok().and_then(|name| name.into_string().ok());
    let unknown = || "unknown".to_owned();
    format!("{}@{}", user.unwrap_or_else(unknown), host.unwrap_or_else(unknown))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_that_a_header_can_carry() {
        assert_eq!(of(Some("alice@laptop")), "alice@laptop");
        assert_eq!(of(Some(" J\u{fc}rgen\n\u{1b}[2J ")), "J?rgen??[2J");
        assert_eq!(of(Some("")), "unknown");
        assert_eq!(of(Some(&"a".repeat(500))).len(), ACTOR_BYTES_MAX);
        assert!(of(None).contains('@'));
    }
}
