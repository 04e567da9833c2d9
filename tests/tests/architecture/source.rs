//! The contents of Rust files and manifests that the rules check.

use std::collections::BTreeSet;

use proc_macro2::{Delimiter, Group, Span, TokenStream, TokenTree};

/// A path with `::` that a file uses, and the number of its line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Used {
    pub(crate) path: String,
    pub(crate) line: usize,
}

/// A type that other files can use, and the number of its line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Declared {
    pub(crate) name: String,
    pub(crate) line: usize,
}

/// A Rust file.
#[derive(Debug)]
pub(crate) struct Source {
    /// The path relative to the root of the workspace.
    pub(crate) name: String,
    pub(crate) lines: usize,
    /// The number of lines outside of tests that contain code.
    pub(crate) code_lines: usize,
    /// All paths outside of tests, beginning with `crate` or a crate's name. Imports are expanded.
    pub(crate) uses: Vec<Used>,
    /// All types outside of tests that are declared with some form of `pub`.
    pub(crate) types: Vec<Declared>,
    /// The numbers of the lines that contain `unsafe`.
    pub(crate) unsafe_lines: Vec<usize>,
}

impl Source {
    pub(crate) fn parse(name: &str, text: &str) -> Self {
        let tokens: TokenStream = text.parse().unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut unsafe_lines = Vec::new();
        find_unsafe(tokens.clone(), &mut unsafe_lines);
        let (mut uses, mut types, mut code) = (Vec::new(), Vec::new(), BTreeSet::new());
        if !is_test(name) {
            find_code(tokens.clone(), &mut code);
            find_types(tokens.clone(), &mut types);
            paths(tokens, "", &mut uses);
        }
        let module = module(name);
        uses.iter_mut().for_each(|used| used.path = absolute(&module, &used.path));
        let (lines, code_lines) = (text.lines().count(), code.len());
        Self { name: name.to_owned(), lines, code_lines, uses, types, unsafe_lines }
    }
}

/// Returns true if a file contains only tests.
fn is_test(name: &str) -> bool {
    !name.contains("/src/") || name.ends_with("tests.rs") || name.contains("/tests/")
}

/// Returns the module names from the crate's root to a file's module.
fn module(name: &str) -> Vec<&str> {
    let inside = name.split_once("/src/").map_or("", |(_, inside)| inside);
    let path = inside.trim_end_matches(".rs").trim_end_matches("/mod");
    path.split('/').filter(|part| !matches!(*part, "" | "lib" | "main" | "mod")).collect()
}

/// Resolves `self` and `super` in a path. Ignores inline modules, which contain only tests.
fn absolute(module: &[&str], path: &str) -> String {
    let mut above = module.len();
    let mut rest = path;
    loop {
        let (first, after) = rest.split_once("::").unwrap_or((rest, ""));
        match first {
            "super" => above = above.saturating_sub(1),
            "self" => {}
            _ if rest.len() == path.len() => return path.to_owned(),
            _ => break,
        }
        rest = after;
    }
    let parts = ["crate"].iter().chain(&module[..above]).chain(Some(&rest));
    parts.filter(|part| !part.is_empty()).copied().collect::<Vec<_>>().join("::")
}

fn find_unsafe(tokens: TokenStream, lines: &mut Vec<usize>) {
    for token in tokens {
        match token {
            TokenTree::Ident(word) if word == "unsafe" => lines.push(word.span().start().line),
            TokenTree::Group(group) => find_unsafe(group.stream(), lines),
            _ => {}
        }
    }
}

/// Collects the numbers of the lines with code. Ignores tests and documentation.
fn find_code(tokens: TokenStream, lines: &mut BTreeSet<usize>) {
    let add = |lines: &mut BTreeSet<usize>, span: Span| lines.extend(span.start().line..=span.end().line);
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Punct(mark) if mark.as_char() == '#' => {
                // The mark of an attribute of the file itself.
                tokens.next_if(|token| matches!(token, TokenTree::Punct(mark) if mark.as_char() == '!'));
                match tokens.peek() {
                    Some(TokenTree::Group(group)) if is_cfg_test(group) => skip_item(&mut tokens),
                    Some(TokenTree::Group(group)) if is_documentation(group) => drop(tokens.next()),
                    _ => add(lines, mark.span()),
                }
            }
            TokenTree::Group(group) => {
                add(lines, group.span_open());
                add(lines, group.span_close());
                find_code(group.stream(), lines);
            }
            token => add(lines, token.span()),
        }
    }
}

/// Collects the types that are declared with `pub`.
fn find_types(tokens: TokenStream, types: &mut Vec<Declared>) {
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Punct(mark) if mark.as_char() == '#' => {
                if matches!(tokens.peek(), Some(TokenTree::Group(group)) if is_cfg_test(group)) {
                    skip_item(&mut tokens);
                }
            }
            TokenTree::Group(group) => find_types(group.stream(), types),
            TokenTree::Ident(word) if word == "pub" => {
                tokens.next_if(|token| matches!(token, TokenTree::Group(_)));
                let declares = |word: &str| matches!(word, "struct" | "enum" | "trait" | "union" | "type");
                let declares = |token: &TokenTree| matches!(token, TokenTree::Ident(word) if declares(&word.to_string()));
                if tokens.next_if(declares).is_some()
                    && let Some(TokenTree::Ident(name)) = tokens.next()
                {
                    types.push(Declared { name: name.to_string(), line: name.span().start().line });
                }
            }
            _ => {}
        }
    }
}

/// Collects the paths in `tokens`, and puts `prefix` in front of each path. Ignores paths in tests.
fn paths(tokens: TokenStream, prefix: &str, found: &mut Vec<Used>) {
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Punct(mark) if mark.as_char() == '#' => {
                if matches!(tokens.peek(), Some(TokenTree::Group(group)) if is_cfg_test(group)) {
                    skip_item(&mut tokens);
                }
            }
            TokenTree::Group(group) => paths(group.stream(), "", found),
            TokenTree::Ident(word) if word == "pub" => skip_visibility(&mut tokens),
            TokenTree::Ident(word) => {
                let line = word.span().start().line;
                let mut path = format!("{prefix}{word}");
                let mut whole = true;
                while follows_colons(&mut tokens) {
                    match tokens.next() {
                        Some(TokenTree::Ident(next)) => path += &format!("::{next}"),
                        Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                            paths(group.stream(), &format!("{path}::"), found);
                            whole = false;
                        }
                        Some(TokenTree::Punct(mark)) if mark.as_char() == '*' => path += "::*",
                        // A generic argument ends a path.
                        _ => break,
                    }
                }
                if whole {
                    let path = path.trim_end_matches("::self").to_owned();
                    found.push(Used { path, line });
                }
            }
            _ => {}
        }
    }
}

type Tokens = std::iter::Peekable<proc_macro2::token_stream::IntoIter>;

/// Consumes a `::` if it is next.
fn follows_colons(tokens: &mut Tokens) -> bool {
    let mut ahead = tokens.clone();
    let colon =
        |token: Option<TokenTree>| matches!(token, Some(TokenTree::Punct(mark)) if mark.as_char() == ':');
    if colon(ahead.next()) && colon(ahead.next()) {
        *tokens = ahead;
        return true;
    }
    false
}

fn is_cfg_test(group: &Group) -> bool {
    group.stream().to_string().replace(' ', "") == "cfg(test)"
}

/// Returns true for the attribute to which the tokeniser converts a documentation comment.
fn is_documentation(group: &Group) -> bool {
    matches!(group.stream().into_iter().next(), Some(TokenTree::Ident(word)) if word == "doc")
}

/// Skips the module in the visibility of an item, because a visibility does not count as a use.
fn skip_visibility(tokens: &mut Tokens) {
    let names_a_module = |text: &str| matches!(text, "crate" | "super" | "self") || text.starts_with("in ");
    if matches!(tokens.peek(), Some(TokenTree::Group(group)) if names_a_module(&group.stream().to_string())) {
        tokens.next();
    }
}

/// Skips to the end of an item, which is a `;` or the end of the item's body.
fn skip_item(tokens: &mut Tokens) {
    for token in tokens.by_ref() {
        match token {
            TokenTree::Punct(mark) if mark.as_char() == ';' => return,
            TokenTree::Group(body) if body.delimiter() == Delimiter::Brace => return,
            _ => {}
        }
    }
}

/// A crate's manifest.
#[derive(Debug)]
pub(crate) struct Manifest {
    pub(crate) name: String,
    /// The dependencies, without those of tests and of the build script.
    pub(crate) dependencies: Vec<String>,
}

impl Manifest {
    /// Parses a manifest in the style of this workspace, where each dependency is a line or a
    /// table.
    pub(crate) fn parse(name: &str, text: &str) -> Self {
        let mut dependencies = Vec::new();
        let mut listing = false;
        for line in text.lines().map(str::trim) {
            if let Some(head) = line.strip_prefix('[') {
                let head = head.trim_end_matches(']');
                let (table, of) = head.rsplit_once("dependencies").unwrap_or(("dev-", ""));
                let counts = !table.ends_with("dev-") && !table.ends_with("build-");
                listing = counts && of.is_empty();
                dependencies.extend(of.strip_prefix('.').filter(|_| counts).map(str::to_owned));
            } else if listing && !line.starts_with('#') {
                let key: String = line.chars().take_while(|c| !matches!(c, '.' | '=' | ' ')).collect();
                dependencies.extend((!key.is_empty()).then_some(key));
            }
        }
        Self { name: name.to_owned(), dependencies }
    }
}
