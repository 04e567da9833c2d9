//! Writes the table as a JSON Schema, with which editors complete and check the YAML.

use std::ops::Bound;

use serde_json::{Map, Value, json};

use super::{CONFIG, Key, KeyDefault, Kind, PROFILE};

/// Returns the JSON Schema of configurations and profiles, in draft 2020-12. A document with
/// `execution_ms` is a profile.
pub fn schema() -> String {
    let schema = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "shadowslice",
        "if": {"required": ["execution_ms"]},
        "then": kind(&PROFILE),
        "else": kind(&CONFIG),
    });
    format!("{schema:#}")
}

fn kind(of: &'static Kind) -> Value {
    match of {
        Kind::Flag => json!({"type": "boolean"}),
        Kind::Text => json!({"type": ["string", "number", "boolean"]}),
        Kind::Pattern(pattern) => json!({"type": "string", "pattern": pattern}),
        Kind::Word(words) => json!({"enum": words}),
        Kind::Whole(least, most) => json!({"type": "integer", "minimum": least, "maximum": most}),
        Kind::Number(range) => {
            let mut schema = json!({"type": "number"});
            match range.least {
                Bound::Included(least) => schema["minimum"] = json!(least),
                Bound::Excluded(least) => schema["exclusiveMinimum"] = json!(least),
                Bound::Unbounded => {}
            }
            match range.most {
                Bound::Included(most) => schema["maximum"] = json!(most),
                Bound::Excluded(most) => schema["exclusiveMaximum"] = json!(most),
                Bound::Unbounded => {}
            }
            schema
        }
        Kind::Duration(..) => json!({"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(h|m|s|ms|us|ns)$"}),
        Kind::Size(least, most) => json!({
            "type": ["string", "integer"],
            "pattern": r"^[0-9]+(\.[0-9]+)?([KMGT]i)?$",
            "minimum": least,
            "maximum": most,
        }),
        Kind::Share => json!({"type": "string", "pattern": "^0*(100|[1-9][0-9]?)%$"}),
        Kind::Sample => {
            json!({"type": "string", "pattern": r"^0*(100(\.0+)?|[0-9]{1,2}(\.[0-9]{1,4}0*)?)%$"})
        }
        Kind::List(item, least, most) => {
            let mut schema = json!({"type": "array", "items": kind(item), "minItems": least});
            if *most < usize::MAX {
                schema["maxItems"] = json!(most);
            }
            schema
        }
        Kind::Map(keys) => map(keys, json!(false)),
        Kind::Open(keys, others) => map(keys, kind(others)),
        Kind::Either(kinds) => json!({"anyOf": kinds.iter().map(kind).collect::<Vec<_>>()}),
    }
}

fn map(keys: &'static [Key], others: Value) -> Value {
    let is_required = |key: &&Key| matches!(key.default, KeyDefault::Required);
    json!({
        "type": "object",
        "properties": keys.iter().map(|key| (key.name.to_owned(), property(key))).collect::<Map<_, _>>(),
        "required": keys.iter().filter(is_required).map(|key| key.name).collect::<Vec<_>>(),
        "additionalProperties": others,
    })
}

/// Returns the schema of a key. The description contains the bounds, because a schema cannot express
/// those of durations and sizes.
fn property(key: &'static Key) -> Value {
    let mut schema = kind(&key.kind);
    let mut description = key.meaning.to_owned();
    if let bounds @ [_, ..] = &key.kind.bounds()[..] {
        description += &format!("; bounds: {}", bounds.join(", "));
    }
    match key.default {
        KeyDefault::Value(text) => schema["default"] = serde_json::from_str(text).unwrap_or(json!(text)),
        KeyDefault::Unset("") | KeyDefault::Required => {}
        KeyDefault::Unset(instead) => description += &format!("; default: {instead}"),
    }
    schema["description"] = json!(description);
    schema
}
