//! The tables of keys in docs/configuration.md, from the declarations.

use super::address::BrokerKind;
use super::declare::{Group, Key, Kind};
use super::keys;
use super::units::{show_duration, show_size};

/// Every key of the file, as tables in Markdown.
pub fn reference() -> String {
    let mut apart = Vec::new();
    let mut text = String::from("### The process\n\n");
    table(&mut text, &keys::ROOT, "", &mut apart);
    // Each may name further ones.
    while !apart.is_empty() {
        let Apart { name, doc, group } = apart.remove(0);
        text.push_str(&format!("\n### `[{name}]`\n\n{}.\n\n", capital(doc)));
        let mut below = Vec::new();
        table(&mut text, group, "", &mut below);
        let below =
            below.into_iter().map(|one| Apart { name: format!("{name}.{}", one.name), ..one });
        apart.splice(0..0, below);
    }
    text
}

/// A table with a heading of its own.
struct Apart {
    name: String,
    doc: &'static str,
    group: &'static Group,
}

fn table(text: &mut String, group: &'static Group, prefix: &str, apart: &mut Vec<Apart>) {
    if prefix.is_empty() {
        text.push_str("| key | default | limits | |\n|---|---|---|---|\n");
    }
    for key in group.keys {
        let name = format!("{prefix}{}", key.name);
        match key.kind {
            Kind::Table(group) if group.apart => apart.push(Apart { name, doc: key.doc, group }),
            Kind::Tables { group, .. } => {
                apart.push(Apart { name: format!("{name}.NAME"), doc: key.doc, group });
            }
            Kind::Table(group) => table(text, group, &format!("{name}."), apart),
            Kind::SwitchOrTable(group) => {
                row(text, &name, key);
                table(text, group, &format!("{name}."), apart);
            }
            _ => row(text, &name, key),
        }
    }
}

fn row(text: &mut String, name: &str, key: &Key) {
    let named = match key.kind {
        Kind::Values { value: Kind::Secret(_), .. } => {
            format!("`{name}.NAME`, `{name}.NAME_file`")
        }
        Kind::Values { .. } => format!("`{name}.NAME`"),
        Kind::Secret(_) => format!("`{name}`, `{name}_file`"),
        Kind::Secrets { twin, .. } => {
            let parent = name.strip_suffix(key.name).unwrap_or_default();
            format!("`{name}`, `{parent}{twin}`")
        }
        _ => format!("`{name}`"),
    };
    let unset = match key.unset {
        "" => key.kind.default_text().map_or("none".to_owned(), |text| grouped(&text)),
        unset => unset.to_owned(),
    };
    text.push_str(&format!("| {named} | {unset} | {} | {} |\n", limits(key), key.doc));
}

/// What bounds a key's value, in words.
pub(super) fn limits(key: &Key) -> String {
    let only = key.only.map(|kind| match kind {
        BrokerKind::Kafka => "Kafka only",
        BrokerKind::RabbitMq => "RabbitMQ only",
    });
    let parts = [Some(bounds(&key.kind)), Some(key.limits.to_owned()), only.map(str::to_owned)];
    let parts: Vec<_> = parts.into_iter().flatten().filter(|part| !part.is_empty()).collect();
    parts.join("; ")
}

fn bounds(kind: &Kind) -> String {
    match kind {
        Kind::Duration { least, most, .. } => {
            format!("{} – {}", show_duration(*least), show_duration(*most))
        }
        Kind::Size { least, most, .. } => format!("{} – {}", show_size(*least), show_size(*most)),
        Kind::Count { least, most, .. } => {
            format!("{} – {}", grouped(&least.to_string()), grouped(&most.to_string()))
        }
        Kind::Number { least, most, .. } => format!("{least} – {most}"),
        Kind::Switch { .. } => "true, false".to_owned(),
        Kind::SwitchOrTable(_) => "true, false or a table".to_owned(),
        Kind::Choice { words, .. } => words.join(", "),
        Kind::Text(form) | Kind::Secret(form) => form.limits.to_owned(),
        Kind::PemFile => "a readable file, PEM".to_owned(),
        Kind::List { entry, most, .. } | Kind::Secrets { entry, most, .. } => {
            format!("{}; at most {}", entry.limits, grouped(&most.to_string()))
        }
        Kind::Values { names, value: Kind::Secret(_), .. } => names.limits.to_owned(),
        Kind::Values { names, value, .. } => format!("{}; {}", names.limits, bounds(value)),
        Kind::Table(_) | Kind::Tables { .. } => String::new(),
    }
}

/// `100000` as `100,000`; what is no number stays.
fn grouped(text: &str) -> String {
    if !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return text.to_owned();
    }
    let mut grouped = String::new();
    for (at, digit) in text.chars().enumerate() {
        if at > 0 && (text.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

fn capital(text: &str) -> String {
    let mut characters = text.chars();
    characters
        .next()
        .map_or_else(String::new, |first| first.to_uppercase().chain(characters).collect())
}

#[cfg(test)]
mod tests {
    const BEGIN: &str = "<!-- The keys: made from src/config/keys.rs. -->\n";
    const END: &str = "<!-- End of the keys. -->\n";

    #[test]
    fn the_documentation_has_every_key_as_it_is_declared() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/configuration.md");
        let documentation = std::fs::read_to_string(path).unwrap();
        let (before, rest) = documentation.split_once(BEGIN).unwrap();
        let (written, after) = rest.split_once(END).unwrap();
        let declared = format!("\n{}\n", super::reference());
        if written == declared {
            return;
        }
        assert!(
            std::env::var_os("INBOXD_BLESS").is_some(),
            "docs/configuration.md differs from src/config/keys.rs; to write it anew: \
             INBOXD_BLESS=1 cargo test -p inboxd --lib config::reference"
        );
        std::fs::write(path, format!("{before}{BEGIN}{declared}{END}{after}")).unwrap();
    }
}
