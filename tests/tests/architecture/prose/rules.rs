//! The rules for wording: phrases to avoid, and fragments at the start of comments.

use std::sync::LazyLock;

use regex::Regex;

use super::extract::{Kind, Passage};

/// The phrases for which plainer phrases exist.
static PHRASES: LazyLock<Regex> = LazyLock::new(|| {
    let phrases = [
        r"is no [a-z]+",
        "so many",
        "so long as",
        "of which",
        "in vain",
        "anew",
        "is told",
        "be had",
        "lacks",
        "have (?:the|a) (?:[^ ]+ ){1,6}(?:be|serve)",
        "for the sake of",
        "beforehand",
        "goes by",
        "what serves",
        "where [^.,;]{1,30} lacks",
        "be it",
    ];
    let phrases = format!(r"(?i)\b(?:{})\b|, say(?:[,.;:)]|$)", phrases.join("|"));
    Regex::new(&phrases).expect("the phrases are a regular expression")
});

/// The first words that make a documentation comment a fragment.
const FRAGMENT_STARTS: [&str; 51] = [
    "After", "Also", "And", "As", "At", "Because", "Before", "Beside", "Besides", "Beyond", "But", "By",
    "Else", "For", "From", "How", "If", "In", "Into", "Likewise", "Never", "Not", "Nothing", "Of", "On",
    "Once", "Only", "Or", "Over", "Per", "Since", "So", "Than", "That", "Then", "Through", "To", "Under",
    "Until", "Up", "Upon", "What", "Whatever", "When", "Where", "Whether", "Which", "While", "Who", "Why",
    "With",
];

/// The first words that make a comment in a body a fragment. Such comments may begin with a
/// condition.
const COMMENT_STARTS: [&str; 9] = ["Else", "How", "Of", "So", "Than", "What", "Whether", "Which", "Why"];

/// Returns the first phrase in `text` that the rules forbid.
pub(super) fn phrase(text: &str) -> Option<&str> {
    let mut hits = PHRASES.find_iter(text).map(|hit| hit.as_str());
    hits.find(|hit| !matches!(hit.to_lowercase().as_str(), "is no longer" | "is no more"))
}

/// Returns the reason why a comment begins as a fragment, or `None` if it does not.
pub(super) fn fragment(Passage { kind, text, .. }: &Passage) -> Option<String> {
    let first = text.split([' ', ',', '.', ':', ';']).next().unwrap_or(text);
    match kind {
        Kind::FunctionDoc => {
            let is_verb = first.ends_with('s') && first.starts_with(char::is_uppercase) && first != "As";
            (!is_verb).then(|| "documents a function and does not begin with a verb (“Returns”)".to_owned())
        }
        Kind::ItemDoc => {
            let fragment = FRAGMENT_STARTS.contains(&first)
                || first == "Within"
                || first == "Without"
                || text.starts_with("`…` if");
            fragment.then(|| format!("begins as a fragment: “{first}”"))
        }
        Kind::Comment => COMMENT_STARTS.contains(&first).then(|| format!("begins as a fragment: “{first}”")),
        Kind::Text | Kind::Message => None,
    }
}
