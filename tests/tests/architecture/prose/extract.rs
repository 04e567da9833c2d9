//! The extraction of prose from files: documents without code, comments, and string literals.

use std::fmt;

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// A passage of prose, and its location.
#[derive(Debug)]
pub(crate) struct Passage {
    /// The path relative to the root of the workspace.
    pub(crate) file: String,
    /// The number of the first line, counted from 1.
    pub(crate) line: usize,
    pub(crate) kind: Kind,
    /// The text, whose lines are joined by spaces.
    pub(crate) text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A paragraph of a document, or a line of a Python file.
    Text,
    /// The documentation comment of a function.
    FunctionDoc,
    /// The documentation comment of a module, type, field, variant or constant.
    ItemDoc,
    /// A comment in a function body.
    Comment,
    /// A string literal in a Rust file.
    Message,
}

impl fmt::Display for Passage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let start: String = self.text.chars().take(60).collect();
        write!(f, "{}:{}: “{start}…”", self.file, self.line)
    }
}

/// Returns true if the rules apply to the prose in a file.
pub(crate) fn is_read(file: &str) -> bool {
    [".md", ".rs", ".py", ".pyi"].iter().any(|ending| file.ends_with(ending))
        && !file.starts_with("tests/tests/architecture/prose/")
}

pub(crate) fn passages(file: &str, text: &str) -> Vec<Passage> {
    let mut found = match file.rsplit_once('.') {
        Some((_, "md")) => document(text),
        Some((_, "rs")) => rust(text),
        _ => {
            text.lines().enumerate().map(|(at, line)| (at + 1, Kind::Text, line.trim().to_owned())).collect()
        }
    };
    found.retain(|(_, _, text)| !text.is_empty());
    let passage = |(line, kind, text)| Passage { file: file.to_owned(), line, kind, text };
    found.into_iter().map(passage).collect()
}

/// Returns the comments in a Rust text, which may be a part of a file.
pub(super) fn comments_of(text: &str) -> Vec<Passage> {
    let passage = |(line, kind, text)| Passage { file: String::new(), line, kind, text };
    comments(text).into_iter().map(passage).collect()
}

type Extracts = Vec<(usize, Kind, String)>;

/// Returns the paragraphs of a document, without its code.
fn document(text: &str) -> Extracts {
    let mut found: Extracts = Vec::new();
    let (mut fenced, mut open) = (false, false);
    for (number, line) in (1..).zip(text.lines().map(str::trim)) {
        let fence = line.starts_with("```");
        fenced ^= fence;
        let begins = line.starts_with(['*', '-', '|', '#', '>']);
        if fenced || fence || line.is_empty() {
            open = false;
        } else if let Some((_, _, last)) = found.last_mut().filter(|_| open && !begins) {
            last.push(' ');
            last.push_str(line);
        } else {
            found.push((number, Kind::Text, line.to_owned()));
            open = true;
        }
    }
    for (_, _, text) in &mut found {
        *text = without_code(text);
    }
    found
}

/// Replaces each code span in a text by `` `…` ``.
fn without_code(text: &str) -> String {
    let parts = text.split('`').enumerate();
    parts.map(|(at, part)| if at % 2 == 0 { part } else { "`…`" }).collect()
}

fn rust(text: &str) -> Extracts {
    let mut found = comments(text);
    let tokens: TokenStream = text.parse().unwrap_or_else(|error| panic!("{error}"));
    strings(tokens, &mut found);
    found
}

/// Returns the comments that are on separate lines. Joins adjacent lines.
fn comments(text: &str) -> Extracts {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let mut found = Vec::new();
    let mut at = 0;
    while at < lines.len() {
        let Some(mark) = ["///", "//!", "//"].into_iter().find(|mark| lines[at].starts_with(mark)) else {
            at += 1;
            continue;
        };
        let begin = at;
        let mut comment = Vec::new();
        while let Some(line) = lines.get(at).and_then(|line| line.strip_prefix(mark)) {
            comment.push(line.trim());
            at += 1;
        }
        let kind = match mark {
            "//" => Kind::Comment,
            "///" if documents_function(&lines[at..]) => Kind::FunctionDoc,
            _ => Kind::ItemDoc,
        };
        found.push((begin + 1, kind, without_code(comment.join(" ").trim())));
    }
    found
}

/// Returns true if the item that follows a comment is a function.
fn documents_function(lines: &[&str]) -> bool {
    let item = lines.iter().find(|line| !line.starts_with("#[") && !line.starts_with("//"));
    let Some(item) = item else { return false };
    let words = item.split_whitespace().filter(|word| !word.starts_with("pub") && !word.starts_with('"'));
    let mut words =
        words.skip_while(|word| matches!(*word, "const" | "async" | "unsafe" | "extern" | "super)"));
    words.next() == Some("fn")
}

/// Collects the string literals that have more than one word.
fn strings(tokens: TokenStream, found: &mut Extracts) {
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Punct(mark) if mark.as_char() == '#' => {
                if matches!(tokens.peek(), Some(TokenTree::Punct(mark)) if mark.as_char() == '!') {
                    tokens.next();
                }
                let is_doc = |token: TokenTree| matches!(token, TokenTree::Ident(word) if word == "doc");
                if matches!(tokens.peek(), Some(TokenTree::Group(group))
                    if group.delimiter() == Delimiter::Bracket && group.stream().into_iter().next().is_some_and(is_doc))
                {
                    tokens.next();
                }
            }
            TokenTree::Group(group) => strings(group.stream(), found),
            TokenTree::Literal(literal) => {
                let line = literal.span().start().line;
                let text = literal.to_string();
                if let Some(text) = text.strip_prefix(['"', 'r']).filter(|text| text.contains(' ')) {
                    let joined = text.split("\\\n").map(str::trim_start).collect::<String>();
                    found.push((line, Kind::Message, joined.trim_end_matches('"').to_owned()));
                }
            }
            _ => {}
        }
    }
}
