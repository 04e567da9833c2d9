//! Parses YAML into a tree of nodes with their positions.
//!
//! The parser limits the size of a file, the nesting depth, and the number of values after the
//! expansion of aliases. It checks these limits before it builds the tree.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;
use std::sync::Arc;

use saphyr_parser::{Event, Marker, Parser, ScalarStyle, StrInput};

use super::faults::{FaultLog, Position};

/// The largest file, in bytes.
const MAX_BYTES: u64 = 1024 * 1024;

/// The deepest nesting of lists and maps.
const MAX_DEPTH: usize = 32;

/// The largest number of values in a document. An alias counts as many values as its target.
const MAX_VALUES: usize = 50_000;

#[derive(Debug, Clone)]
pub(super) struct YamlNode {
    pub(super) at: Position,
    pub(super) content: YamlContent,
    /// The number of values in the node when it was parsed, including the node itself.
    values: usize,
}

#[derive(Debug, Clone)]
pub(super) enum YamlContent {
    Scalar {
        text: String,
        plain: bool,
    },
    List(Vec<Arc<YamlNode>>),
    /// The entries of a map, in the order of the document.
    Map(Vec<YamlEntry>),
}

#[derive(Debug, Clone)]
pub(super) struct YamlEntry {
    pub(super) key: String,
    pub(super) at: Position,
    pub(super) node: Arc<YamlNode>,
}

impl YamlNode {
    /// Returns whether the node is YAML's null. A key without a value has the value null.
    pub(super) fn is_null(&self) -> bool {
        matches!(&self.content, YamlContent::Scalar { text, plain: true } if matches!(text.as_str(), "" | "~" | "null"))
    }

    /// Returns the text of a scalar.
    pub(super) fn text(&self) -> Option<&str> {
        if let YamlContent::Scalar { text, .. } = &self.content { Some(text) } else { None }
    }

    /// Returns the items of a list, or none for any other value.
    pub(super) fn items(&self) -> &[Arc<Self>] {
        if let YamlContent::List(items) = &self.content { items } else { &[] }
    }

    /// Returns the entries of a map, or none for any other value.
    pub(super) fn entries(&self) -> &[YamlEntry] {
        if let YamlContent::Map(entries) = &self.content { entries } else { &[] }
    }

    pub(super) fn get(&self, key: &str) -> Option<&Self> {
        self.entries().iter().find(|entry| entry.key == key).map(|entry| &*entry.node)
    }
}

/// Reads a file. If the file is too large or not text, records a fault and returns `None`.
pub(super) fn read(path: &Path, log: &FaultLog) -> io::Result<Option<String>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        log.add(Position::START, "", "the file is larger than 1 MiB; check its path");
        return Ok(None);
    }
    let text = match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => {
            let valid = error.utf8_error().valid_up_to();
            let before = String::from_utf8_lossy(&error.as_bytes()[..valid]).into_owned();
            log.add(end_of(&before), "", "this byte is not valid UTF-8; save the file as UTF-8 text");
            return Ok(None);
        }
    };
    let is_binary = |c: char| c.is_control() && !matches!(c, '\t' | '\n' | '\r' | '\u{85}');
    if let Some(index) = text.find(is_binary) {
        log.add(end_of(&text[..index]), "", "the text has a control character here; remove it");
        return Ok(None);
    }
    Ok(Some(text))
}

fn end_of(text: &str) -> Position {
    let line = text.matches('\n').count() + 1;
    let last = text.rsplit('\n').next().unwrap_or_default();
    Position { line, column: last.chars().count() + 1 }
}

/// Parses a document and records its faults. Returns `None` only after recording at least one
/// fault. The fault of an empty file shows `example`.
pub(super) fn parse(text: &str, example: &str, log: &FaultLog) -> Option<Arc<YamlNode>> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    match Composer::new(text, log).document(example) {
        Ok(node) => Some(node),
        Err((at, message)) => {
            log.add(at, "", message);
            None
        }
    }
}

type Stop = (Position, String);

fn position(marker: Marker) -> Position {
    Position { line: marker.line(), column: marker.col() + 1 }
}

struct Open {
    at: Position,
    anchor: usize,
    values: usize,
    kind: OpenKind,
}

enum OpenKind {
    List(Vec<Arc<YamlNode>>),
    Map { entries: Vec<YamlEntry>, lines: HashMap<String, usize>, key: Option<(String, Position)> },
}

struct Composer<'a> {
    parser: Parser<'a, StrInput<'a>>,
    log: &'a FaultLog,
    open: Vec<Open>,
    anchors: HashMap<usize, Arc<YamlNode>>,
}

impl<'a> Composer<'a> {
    fn new(text: &'a str, log: &'a FaultLog) -> Self {
        Self { parser: Parser::new_from_str(text), log, open: Vec::new(), anchors: HashMap::new() }
    }

    fn document(mut self, example: &str) -> Result<Arc<YamlNode>, Stop> {
        let mut root = None;
        while let Some(event) = self.parser.next_event() {
            let (event, span) = event
                .map_err(|error| (position(*error.marker()), format!("not valid YAML: {}", error.info())))?;
            let at = position(span.start);
            if root.is_some() && matches!(event, Event::DocumentStart(_)) {
                return Err((at, "a second document starts here; write one document per file".to_owned()));
            }
            root = self.event(event, at)?.or(root);
        }
        let message = || format!("the file is empty; use at least `{example}`");
        root.filter(|root| !root.is_null()).ok_or_else(|| (Position::START, message()))
    }

    /// Processes a parser event. Returns the root when the root is complete.
    fn event(&mut self, event: Event<'_>, at: Position) -> Result<Option<Arc<YamlNode>>, Stop> {
        match event {
            Event::Scalar(_, _, _, Some(_))
            | Event::SequenceStart(_, Some(_))
            | Event::MappingStart(_, Some(_)) => {
                Err((at, "YAML tags such as `!!str` are not supported; remove the tag".to_owned()))
            }
            Event::Scalar(text, style, anchor, None) => {
                let content =
                    YamlContent::Scalar { text: text.into_owned(), plain: style == ScalarStyle::Plain };
                self.close(YamlNode { at, content, values: 1 }, anchor)
            }
            Event::Alias(anchor) => match self.anchors.get(&anchor) {
                Some(node) => self.place(Arc::clone(node), at),
                None => {
                    Err((at, "the alias refers to a value that contains it; write out the value".to_owned()))
                }
            },
            Event::SequenceStart(anchor, None) => self.start(at, anchor, OpenKind::List(Vec::new())),
            Event::MappingStart(anchor, None) => self.start(
                at,
                anchor,
                OpenKind::Map { entries: Vec::new(), lines: HashMap::new(), key: None },
            ),
            Event::SequenceEnd | Event::MappingEnd => self.end(),
            Event::Nothing
            | Event::StreamStart
            | Event::StreamEnd
            | Event::DocumentStart(_)
            | Event::DocumentEnd => Ok(None),
        }
    }

    fn start(&mut self, at: Position, anchor: usize, kind: OpenKind) -> Result<Option<Arc<YamlNode>>, Stop> {
        if self.open.len() == MAX_DEPTH {
            return Err((at, format!("the values are nested more than {MAX_DEPTH} deep; nest them less")));
        }
        if let Some(Open { kind: OpenKind::Map { key: None, .. }, .. }) = self.open.last() {
            return Err((at, "this key is a list or a map; keys must be words".to_owned()));
        }
        self.open.push(Open { at, anchor, values: 1, kind });
        Ok(None)
    }

    fn end(&mut self) -> Result<Option<Arc<YamlNode>>, Stop> {
        let Open { at, anchor, values, kind } =
            self.open.pop().expect("the parser closes only what it opened");
        let content = match kind {
            OpenKind::List(items) => YamlContent::List(items),
            OpenKind::Map { entries, .. } => YamlContent::Map(entries),
        };
        self.close(YamlNode { at, content, values }, anchor)
    }

    fn close(&mut self, node: YamlNode, anchor: usize) -> Result<Option<Arc<YamlNode>>, Stop> {
        let (at, node) = (node.at, Arc::new(node));
        if anchor != 0 {
            self.anchors.insert(anchor, Arc::clone(&node));
        }
        self.place(node, at)
    }

    /// Adds a complete node or the target of an alias to the parent node. Returns the node if it is
    /// the root.
    fn place(&mut self, node: Arc<YamlNode>, at: Position) -> Result<Option<Arc<YamlNode>>, Stop> {
        let Some(parent) = self.open.last_mut() else {
            return Ok(Some(node));
        };
        parent.values += node.values;
        if parent.values > MAX_VALUES {
            let message = format!(
                "the document has more than {MAX_VALUES} values with its aliases written out; use fewer"
            );
            return Err((at, message));
        }
        match &mut parent.kind {
            OpenKind::List(items) => items.push(node),
            OpenKind::Map { entries, lines, key } => match key.take() {
                Some((key, at)) => entries.push(YamlEntry { key, at, node }),
                None => {
                    let name = key_text(&node, at)?;
                    let first = lines.get(&name).copied();
                    lines.entry(name.clone()).or_insert(at.line);
                    *key = Some((name, at));
                    if let Some(line) = first {
                        let message = format!("duplicate key, first in line {line}; remove one of them");
                        self.log.add(at, &self.path(), message);
                    }
                }
            },
        }
        Ok(None)
    }

    fn path(&self) -> String {
        let mut path = String::new();
        for open in &self.open {
            match &open.kind {
                OpenKind::List(items) => path.push_str(&format!("[{}]", items.len())),
                OpenKind::Map { key: Some((key, _)), .. } if path.is_empty() => path.push_str(key),
                OpenKind::Map { key: Some((key, _)), .. } => path.push_str(&format!(".{key}")),
                OpenKind::Map { key: None, .. } => {}
            }
        }
        path
    }
}

fn key_text(node: &YamlNode, at: Position) -> Result<String, Stop> {
    match &node.content {
        YamlContent::Scalar { text, .. } if text.contains(char::is_control) => {
            Err((at, "this key has a line break or another control character; keys must be words".to_owned()))
        }
        YamlContent::Scalar { text, .. } => Ok(text.clone()),
        YamlContent::List(_) | YamlContent::Map(_) => {
            Err((at, "this key is a list or a map; keys must be words".to_owned()))
        }
    }
}
