//! A parser that converts YAML to a JSON tree, from which serde creates structs.

use saphyr_parser::{Event, Parser, ScalarStyle};
use serde_json::{Map, Value};

/// Parses a text that contains a single document. An error names the line.
pub(super) fn parse(text: &str) -> Result<Value, String> {
    let mut open: Vec<Open> = Vec::new();
    let mut document = None;
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| error.to_string())?;
        let at = |what: &str| Err(format!("line {}: {what}", span.start.line()));
        let done = match event {
            Event::Scalar(text, style, ..) => scalar(&text, style == ScalarStyle::Plain),
            Event::SequenceStart(..) => {
                open.push(Open::List(Vec::new()));
                continue;
            }
            Event::MappingStart(..) => {
                open.push(Open::Map(Map::new(), None));
                continue;
            }
            Event::SequenceEnd | Event::MappingEnd => match open.pop() {
                Some(Open::List(values)) => values.into(),
                Some(Open::Map(map, _)) => map.into(),
                None => return at("unexpected end of a list or map"),
            },
            Event::Alias(_) => return at("aliases are not supported; repeat the value"),
            _ => continue,
        };
        match open.last_mut() {
            None if document.is_some() => return at("unexpected second document; write one list of mixes"),
            None => document = Some(done),
            Some(Open::List(values)) => values.push(done),
            Some(Open::Map(map, key)) => match (key.take(), done) {
                (None, Value::String(name)) if map.contains_key(&name) => {
                    return at(&format!("duplicate key `{name}`"));
                }
                (None, Value::String(name)) => *key = Some(name),
                (None, other) => return at(&format!("{other} cannot be a key; quote it")),
                (Some(name), value) => drop(map.insert(name, value)),
            },
        }
    }
    document.ok_or_else(|| "the file is empty".into())
}

/// An unfinished list, or an unfinished map with the key of its next value.
enum Open {
    List(Vec<Value>),
    Map(Map<String, Value>, Option<String>),
}

/// Converts a scalar. A plain word may be a number, a boolean or null. Any other scalar is a
/// string.
fn scalar(text: &str, plain: bool) -> Value {
    if !plain {
        return text.into();
    }
    match text {
        "" | "~" | "null" => Value::Null,
        "true" => true.into(),
        "false" => false.into(),
        text => match (text.parse::<u64>(), text.parse::<f64>()) {
            (Ok(whole), _) => whole.into(),
            (_, Ok(number)) if number.is_finite() => number.into(),
            _ => text.into(),
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lists_maps_and_plain_words_have_their_types() {
        let text = "name: a mix # why\nspans_s: [10, 2.5]\nmodels:\n  - {model: 'x', python: true, none: }\n  - []\n";
        let wanted = json!({
            "name": "a mix", "spans_s": [10, 2.5], "models": [{"model": "x", "python": true, "none": null}, []],
        });
        assert_eq!(parse(text).unwrap(), wanted);
    }

    #[test]
    fn errors_name_their_line() {
        for (text, wanted) in [
            ("", "empty"),
            ("a: 1\na: 2\n", "line 2: duplicate key `a`"),
            ("a: &x 1\nb: *x\n", "line 2: aliases"),
            ("a: [1\n", "line 2"),
        ] {
            let fault = parse(text).unwrap_err();
            assert!(fault.contains(wanted), "{text:?}: {fault}");
        }
    }
}
