//! JSON objects in requests. This file does no I/O.
//!
//! serde also reads a struct from a list, in the order of the fields in the source. A client that
//! sends a list by mistake would be answered, or would receive an error in terms of the source.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde::forward_to_deserialize_any;
use shadowslice_datapath::pipeline::RequestFailure;

/// A struct that is only read from an object. `#[serde(expecting)]` describes the struct in errors.
#[derive(Debug, Default)]
pub(super) struct Object<T>(pub(super) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        T::deserialize(ObjectOnly(deserializer)).map(Self)
    }
}

struct ObjectOnly<D>(D);

impl<'de, D: Deserializer<'de>> Deserializer<'de> for ObjectOnly<D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.0.deserialize_any(MapOnly(visitor))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

struct MapOnly<V>(V);

impl<'de, V: Visitor<'de>> Visitor<'de> for MapOnly<V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.expecting(f)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<V::Value, A::Error> {
        self.0.visit_map(map)
    }
}

/// Parses a text, which must be an object of the form `expected`.
pub(crate) fn parse_object<'a, T: Deserialize<'a>>(
    text: &'a [u8],
    expected: &str,
) -> Result<T, RequestFailure> {
    let Object(value) = serde_json::from_slice(text).map_err(|why| {
        let found = text.iter().find(|byte| !byte.is_ascii_whitespace());
        let why = if why.is_data() && found.is_some_and(|first| *first != b'{') {
            format!("the body must be {expected}")
        } else if let Some(word) = not_a_number(text, &why) {
            format!(
                "{word} in line {} column {}: JSON does not support NaN and Infinity; send the tensor as binary data",
                why.line(),
                why.column()
            )
        } else {
            why.to_string()
        };
        RequestFailure::Invalid(format!("failed to parse the request JSON: {why}"))
    })?;
    Ok(value)
}

/// Returns the word at which parsing failed if the word is NaN or an infinity. Python's
/// `json.dumps` writes these words, which JSON does not have.
fn not_a_number<'a>(text: &'a [u8], why: &serde_json::Error) -> Option<&'a str> {
    if !why.is_syntax() {
        return None;
    }
    let line = text.split(|byte| *byte == b'\n').nth(why.line().checked_sub(1)?)?;
    let at = why.column().saturating_sub(1).min(line.len());
    let outside = |byte: &u8| !byte.is_ascii_alphabetic();
    let start = line[..at].iter().rposition(outside).map_or(0, |before| before + 1);
    let end = line[at..].iter().position(outside).map_or(line.len(), |length| at + length);
    let word = std::str::from_utf8(&line[start..end]).ok()?;
    ["nan", "inf", "infinity"].iter().any(|name| word.eq_ignore_ascii_case(name)).then_some(word)
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Default, PartialEq, Eq, Deserialize)]
    #[serde(default, expecting = "an object with `a`")]
    struct Outer {
        a: u8,
        b: Option<Object<Inner>>,
    }

    #[derive(Debug, Default, PartialEq, Eq, Deserialize)]
    #[serde(default, expecting = "an object with `c`")]
    struct Inner {
        c: u8,
    }

    impl PartialEq for Object<Inner> {
        fn eq(&self, other: &Self) -> bool {
            self.0 == other.0
        }
    }

    impl Eq for Object<Inner> {}

    fn read(text: &str) -> Result<Outer, String> {
        parse_object(text.as_bytes(), "an object with `a`").map_err(|why: RequestFailure| {
            why.to_string().strip_prefix("failed to parse the request JSON: ").unwrap().to_owned()
        })
    }

    #[test]
    fn an_object_is_read_and_a_list_is_not() {
        assert_eq!(read(" {}").unwrap(), Outer::default());
        assert_eq!(read(r#"{"a": 1, "b": {"c": 2}}"#).unwrap().b, Some(Object(Inner { c: 2 })));
        assert_eq!(read(r#"{"b": null}"#).unwrap().b, None);
        for other in ["[]", "[1, null]", " [1]", "7", "\"a\"", "null", "true"] {
            assert_eq!(read(other).unwrap_err(), "the body must be an object with `a`", "{other}");
        }
        for other in ["[2]", "7", "\"c\"", "true"] {
            let why = read(&format!(r#"{{"b": {other}}}"#)).unwrap_err();
            assert!(why.contains("expected an object with `c`"), "{other}: {why}");
        }
        assert!(read("{\"a\": 1").unwrap_err().contains("EOF"));
    }

    #[test]
    fn numbers_that_json_lacks_are_named() {
        for word in ["NaN", "Infinity", "-Infinity", "nan", "inf", "-inf", "INF", "-NaN"] {
            for text in [
                format!(r#"{{"a": {word}}}"#),
                format!("{{\n\"x\": [1,\n {word}, 1]}}"),
                format!(r#"{{"x": [[0.5, {word}]]}}"#),
                format!(r#"{{"x": {word}"#),
            ] {
                let why = read(&text).unwrap_err();
                let named = word.trim_start_matches('-');
                assert!(why.starts_with(named) && why.contains("as binary data"), "{text}: {why}");
            }
        }
        for text in [r#"{"a": none}"#, r#"{"a": nano}"#, r#"{"NaN": 1,}"#, "{\"NaN\"", "", "\n", "{\n\n"] {
            let why = read(text).unwrap_err();
            assert!(!why.contains("binary data"), "{text}: {why}");
        }
    }
}
