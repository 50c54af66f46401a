//! What the documentation is held against: the files of this repository.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// The repository, read once.
pub struct Repository {
    root: PathBuf,
    /// All Rust sources, one after the other.
    rust: String,
    /// Scripts and the CI's entry.
    scripts: String,
    /// Names of source files and folders, without their ending.
    modules: HashSet<String>,
    routes: Vec<String>,
}

impl Repository {
    pub fn read() -> Self {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
        let (mut rust, mut modules) = (String::new(), HashSet::new());
        for folder in ["src", "adapters", "tests", "bench"] {
            visit(&root.join(folder), &mut |file| {
                let stem = file.file_stem().unwrap_or_default().to_string_lossy();
                let folder = file.parent().and_then(Path::file_name).unwrap_or_default();
                // The checks themselves name what does not exist.
                let is_check = file.parent().is_some_and(|folder| folder.ends_with("it/docs"));
                if !is_check && file.extension().is_some_and(|extension| extension == "rs") {
                    rust.push_str(&std::fs::read_to_string(file).unwrap());
                    modules.insert(stem.into_owned());
                    modules.insert(folder.to_string_lossy().into_owned());
                }
            });
        }
        let mut scripts = String::new();
        visit(&root.join("scripts"), &mut |file| {
            scripts.push_str(&std::fs::read_to_string(file).unwrap_or_default());
        });
        let mut repository = Self { root, rust, scripts, modules, routes: Vec::new() };
        let admin = repository.sources_below("src/admin");
        // As the router has them, and as they are declared.
        let routes =
            [".route(\"", "path: \""].into_iter().flat_map(|before| admin.split(before).skip(1));
        let routes = routes.filter_map(|rest| rest.split('"').next().map(str::to_owned));
        repository.routes = routes.filter(|route| route.starts_with('/')).collect();
        assert!(repository.routes.len() >= 3, "{:?}", repository.routes);
        repository
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// `*` stands for anything below.
    pub fn exists(&self, path: &str) -> bool {
        let path = path.split('*').next().unwrap_or(path);
        self.root.join(path.trim_end_matches('/')).exists()
            || path.rsplit_once('/').is_some_and(|(folder, start)| {
                let entries = std::fs::read_dir(self.root.join(folder)).into_iter().flatten();
                !start.is_empty()
                    && entries.flatten().any(|entry| {
                        path.len() > folder.len() + 1
                            && entry.file_name().to_string_lossy().starts_with(start)
                            && !path.contains('.')
                    })
            })
    }

    pub fn text(&self, path: &str) -> String {
        std::fs::read_to_string(self.root.join(path)).unwrap()
    }

    pub fn rust(&self) -> &str {
        &self.rust
    }

    pub fn sources_below(&self, folder: &str) -> String {
        let mut text = String::new();
        visit(&self.root.join(folder), &mut |file| {
            if file.extension().is_some_and(|extension| extension == "rs") {
                text.push_str(&std::fs::read_to_string(file).unwrap());
            }
        });
        text
    }

    /// A file of examples or migrations has this text.
    pub fn has_text(&self, text: &str) -> bool {
        let mut found = false;
        for folder in ["examples", "migrations"] {
            visit(&self.root.join(folder), &mut |file| {
                let content = std::fs::read_to_string(file).unwrap_or_default();
                found |= content.contains(text.trim());
            });
        }
        found
    }

    pub fn has_package(&self, name: &str) -> bool {
        let folder = name.strip_prefix("inboxd-").unwrap_or("");
        name == "inboxd"
            || self.exists(&format!("adapters/{folder}/Cargo.toml"))
            || self.exists(&format!("{folder}/Cargo.toml"))
    }

    /// A function, module, type or crate of this name exists.
    pub fn has_item(&self, name: &str) -> bool {
        let declared = |keyword: &str| {
            let wanted = format!("{keyword} {name}");
            self.rust.match_indices(&wanted).any(|(at, _)| {
                let next = self.rust[at + wanted.len()..].chars().next();
                !next.is_some_and(|c| c.is_alphanumeric() || c == '_')
            })
        };
        self.modules.contains(name)
            || ["fn", "mod", "struct", "enum", "trait", "const", "type"].into_iter().any(declared)
            || self.has_package(&name.replace('_', "-"))
    }

    /// Rust or a script says this word, as a literal or part of one.
    pub fn says(&self, word: &str) -> bool {
        self.rust.contains(word) || self.scripts.contains(word)
    }

    /// A listener has a route for this path; `{id}`, `ID` and the like stand for anything.
    pub fn has_route(&self, path: &str) -> bool {
        let path = path.split('?').next().unwrap_or(path);
        let parts: Vec<&str> = path.split('/').collect();
        self.routes.iter().any(|route| {
            let route: Vec<&str> = route.split('/').collect();
            let catches_all = route.last().is_some_and(|part| part.starts_with("{*"));
            (route.len() == parts.len() || catches_all && parts.len() > route.len())
                && route.iter().zip(&parts).all(|(route, part)| {
                    route == part || route.starts_with('{') && !part.is_empty()
                })
        })
    }
}

fn visit(folder: &Path, see: &mut impl FnMut(&Path)) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        match path.is_dir() {
            true if path.ends_with("target") => {}
            true => visit(&path, see),
            false => see(&path),
        }
    }
}
