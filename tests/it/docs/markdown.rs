//! A page of documentation, taken apart.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};

/// A fenced block.
pub struct Block {
    /// What stands behind the fence: the language, then words.
    pub info: String,
    pub text: String,
    pub line: usize,
}

/// One page.
pub struct Page {
    /// From the repository's root.
    pub path: PathBuf,
    pub blocks: Vec<Block>,
    /// Where each link goes, with its line.
    pub links: Vec<(String, usize)>,
    /// What stands between backticks, with its line.
    pub spans: Vec<(String, usize)>,
    /// Headings, with the text that follows each up to the next one.
    pub sections: Vec<(String, String)>,
    /// What a link may name behind `#`.
    pub anchors: HashSet<String>,
}

impl Page {
    pub fn read(root: &Path, path: &Path) -> Self {
        let text = std::fs::read_to_string(root.join(path)).unwrap();
        Self::parse(path, &text)
    }

    pub fn parse(path: &Path, text: &str) -> Self {
        let mut page = Self {
            path: path.to_owned(),
            blocks: Vec::new(),
            links: Vec::new(),
            spans: Vec::new(),
            sections: Vec::new(),
            anchors: HashSet::new(),
        };
        let line_of = |offset: usize| text[..offset].matches('\n').count() + 1;
        let mut block: Option<Block> = None;
        let mut heading: Option<String> = None;
        for (event, range) in Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter() {
            let line = line_of(range.start);
            match event {
                Event::Start(Tag::CodeBlock(kind)) => {
                    let info = match kind {
                        CodeBlockKind::Fenced(info) => info.into_string(),
                        CodeBlockKind::Indented => "indented".into(),
                    };
                    block = Some(Block { info, text: String::new(), line });
                }
                Event::End(TagEnd::CodeBlock) => page.blocks.extend(block.take()),
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::End(TagEnd::Heading(_)) => {
                    let title = heading.take().unwrap_or_default();
                    page.anchors.insert(anchor(&title));
                    page.sections.push((title, String::new()));
                }
                Event::Start(Tag::Link { dest_url, .. }) => {
                    page.links.push((dest_url.into_string(), line));
                }
                Event::Text(words) => page.take_words(&words, &mut block, &mut heading),
                Event::Code(words) => {
                    page.take_words(&words, &mut block, &mut heading);
                    page.spans.push((words.into_string(), line));
                }
                _ => {}
            }
        }
        page
    }

    fn take_words(&mut self, words: &str, block: &mut Option<Block>, heading: &mut Option<String>) {
        if let Some(block) = block {
            block.text.push_str(words);
        } else if let Some(heading) = heading {
            heading.push_str(words);
        } else if let Some((_, text)) = self.sections.last_mut() {
            text.push_str(words);
        }
    }

    /// `path:line`, for a complaint.
    pub fn at(&self, line: usize) -> String {
        format!("{}:{line}", self.path.display())
    }
}

/// As GitHub makes them.
fn anchor(title: &str) -> String {
    let kept = title.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}
