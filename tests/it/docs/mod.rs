//! The documentation is held against what it speaks of: every block is checked by its
//! language, links arrive, and what is named exists.

mod blocks;
mod commands;
mod markdown;
mod names;
mod repository;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use inboxd_contract::ErrorCode;
use strum::IntoEnumIterator as _;

use markdown::Page;
use repository::Repository;

/// All pages: those of the root and of `docs`.
fn pages(repository: &Repository) -> Vec<Page> {
    let mut paths: Vec<PathBuf> = Vec::new();
    for folder in ["", "docs"] {
        let entries = std::fs::read_dir(repository.root().join(folder)).unwrap().flatten();
        let names = entries.map(|entry| Path::new(folder).join(entry.file_name()));
        paths.extend(names.filter(|path| path.extension().is_some_and(|ending| ending == "md")));
    }
    paths.sort();
    paths.iter().map(|path| Page::read(repository.root(), path)).collect()
}

fn assert_no(complaints: &[String]) {
    assert!(complaints.is_empty(), "{} complaints:\n{}", complaints.len(), complaints.join("\n"));
}

#[test]
fn every_block_of_the_documentation_holds() {
    let repository = Repository::read();
    let mut complaints = Vec::new();
    for page in pages(&repository) {
        for block in &page.blocks {
            if let Err(why) = blocks::check(&repository, block) {
                complaints.push(format!("{}: {why}", page.at(block.line)));
            }
        }
    }
    assert_no(&complaints);
}

#[test]
fn links_arrive() {
    let repository = Repository::read();
    let pages = pages(&repository);
    let mut complaints = Vec::new();
    for page in &pages {
        for (link, line) in &page.links {
            if link.starts_with("https://") || link.starts_with("mailto:") {
                continue;
            }
            let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
            let folder = page.path.parent().unwrap_or(Path::new(""));
            let target = match path {
                "" => page.path.clone(),
                path => folder.join(path),
            };
            let there = repository.root().join(&target);
            let Ok(there) = there.canonicalize() else {
                complaints.push(format!("{}: {link} leads nowhere", page.at(*line)));
                continue;
            };
            let found = pages.iter().find(|page| {
                repository.root().join(&page.path).canonicalize().is_ok_and(|path| path == there)
            });
            if !anchor.is_empty() && !found.is_some_and(|page| page.anchors.contains(anchor)) {
                complaints.push(format!("{}: {link} names no heading", page.at(*line)));
            }
        }
    }
    assert_no(&complaints);
}

#[test]
fn what_the_documentation_names_exists() {
    let repository = Repository::read();
    let mut complaints = Vec::new();
    for page in pages(&repository) {
        for (span, line) in &page.spans {
            if let Err(why) = names::check(&repository, span) {
                complaints.push(format!("{}: `{span}`: {why}", page.at(*line)));
            }
        }
    }
    assert_no(&complaints);
}

#[test]
fn every_error_code_has_its_section_with_what_was_lost_and_what_to_do() {
    let repository = Repository::read();
    let page = Page::read(repository.root(), Path::new("docs/errors.md"));
    let codes: BTreeSet<&str> = ErrorCode::iter().map(ErrorCode::as_str).collect();
    let is_code = |title: &str| title.chars().all(|c| c.is_ascii_lowercase() || c == '_');
    let described = page.sections.iter().filter(|(title, _)| is_code(title));
    let described: BTreeSet<&str> = described.map(|(title, _)| title.as_str()).collect();
    assert_eq!(codes, described, "the codes of adapters/contract/src/code.rs and docs/errors.md");
    for (title, text) in page.sections.iter().filter(|(title, _)| codes.contains(title.as_str())) {
        for part in ["Means", "Lost", "Do", "Mended"] {
            assert!(text.contains(&format!("{part}: ")), "{title} does not say: {part}");
        }
    }
}

#[test]
fn every_error_code_is_told_somewhere_and_no_line_makes_one_up() {
    let repository = Repository::read();
    let sources = ["src", "adapters"].map(|folder| repository.sources_below(folder)).concat();
    for code in ErrorCode::iter() {
        let told = format!("ErrorCode::{code:?}");
        let by_class = [ErrorCode::DatabaseUnavailable, ErrorCode::DatabaseRefused];
        assert!(
            sources.contains(&told) || by_class.contains(&code),
            "nothing is ever logged as {code}"
        );
    }
    let literal = ["code", " = \""].concat();
    let made_up: Vec<&str> = repository
        .rust()
        .lines()
        .filter(|line| line.trim_start().starts_with(&literal) && line.contains(','))
        .collect();
    assert!(made_up.is_empty(), "codes come from ErrorCode: {made_up:?}");
}

#[test]
fn every_dependency_has_its_reason_in_the_architecture() {
    let repository = Repository::read();
    let manifest: toml::Table = repository.text("Cargo.toml").parse().unwrap();
    let architecture = repository.text("ARCHITECTURE.md");
    let table = architecture.split("## Dependencies").nth(1).expect("a section");
    let named: BTreeSet<&str> = table
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.split(" | ").next())
        .flat_map(|crates| crates.split([',', '·', ' ', '(', ')']))
        .filter(|word| !word.is_empty())
        .collect();
    let dependencies = manifest["workspace"]["dependencies"].as_table().unwrap();
    let missing: Vec<&String> = dependencies
        .keys()
        .filter(|name| !name.starts_with("inboxd-") && !named.contains(name.as_str()))
        .collect();
    assert!(missing.is_empty(), "no reason in ARCHITECTURE.md: {missing:?}");
    let gone: Vec<&&str> = named
        .iter()
        .filter(|name| name.contains('-') && !dependencies.contains_key(**name))
        .collect();
    assert!(gone.is_empty(), "in ARCHITECTURE.md and not in Cargo.toml: {gone:?}");
}

/// The checks themselves: each of these is wrong, and is found.
#[test]
fn what_is_wrong_is_found() {
    let repository = Repository::read();
    let wrong_blocks = [
        "```ruby\nputs 1\n```",
        "```console\ninboxd run --sorce amqp://h\n```",
        "```console\ninboxd run --source 'amqp://h:5672/?quue=orders' --callback http://h/\n```",
        "```console\nscripts/nothing up\n```",
        "```console\nscripts/services upp\n```",
        "```console\neval \"$(scripts/services owned kafka x)\"\n```",
        "```console\ncurl -s http://127.0.0.1:7461/nothing\n```",
        "```console\nmystery --help\n```",
        "```console\nif then\n```",
        "```json\n{\"a\": }\n```",
        "```toml\n[subscription.orders]\ncallbak = \"http://h/\"\n```",
        "```toml fragment\n[subscription.orders]\nlaese = \"15s\"\n```",
        "```python\nprint('of no file')\n```",
        "```\ninboxd run\n```",
    ];
    for text in wrong_blocks {
        let page = Page::parse(Path::new("docs/wrong.md"), text);
        let [block] = page.blocks.as_slice() else { panic!("{text}") };
        assert!(blocks::check(&repository, block).is_err(), "taken for right: {text}");
    }
    for span in [
        "--no-such-flag",
        "inboxd fly",
        "inboxd_no_such_metric_total",
        "INBOXD_NO_SUCH_VARIABLE",
        "docs/nothing.md",
        "/v1/nothing",
        "database.retentoin",
        "faults::{no_such_test_exists_here}",
        "a_test_that_is_not_there",
    ] {
        assert!(names::check(&repository, span).is_err(), "taken for right: {span}");
    }
}
