//! The text of a completion, as the model's answers extend it.

use serde_json::{Value, json};
use shadowslice_config::CompletionsMapping;

use super::mapping::{sum, text};
use crate::tensors::OutputTensor;

/// The reason for the end if the model gives none.
const STOP: &str = "stop";

/// The part of a completion that its answers contained so far.
pub(super) struct CompletionText {
    mapping: CompletionsMapping,
    /// The first bytes of a character that the next answer completes.
    tail: Vec<u8>,
    /// The usage in the last answer.
    usage: Option<Value>,
    has_reason: bool,
}

/// A piece of a completion.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CompletionPiece {
    pub(super) text: String,
    pub(super) finish_reason: Option<String>,
}

impl CompletionPiece {
    /// Appends the piece that follows.
    pub(super) fn extend(&mut self, next: Self) {
        self.text.push_str(&next.text);
        self.finish_reason = next.finish_reason.or(self.finish_reason.take());
    }
}

impl CompletionText {
    pub(super) fn new(mapping: CompletionsMapping) -> Self {
        Self { mapping, tail: Vec::new(), usage: None, has_reason: false }
    }

    /// Returns the piece in an answer. Bytes that are not UTF-8 are replaced, because the tokens of
    /// a model can be parts of characters.
    pub(super) fn push(&mut self, outputs: &[OutputTensor]) -> CompletionPiece {
        self.tail.extend_from_slice(&text(outputs, &self.mapping.text));
        let rest = self.tail.split_off(whole_characters(&self.tail));
        let text = String::from_utf8_lossy(&std::mem::replace(&mut self.tail, rest)).into_owned();
        if let Some(usage) = &self.mapping.usage {
            let prompt = sum(outputs, &usage.prompt_tokens);
            let completion = sum(outputs, &usage.completion_tokens);
            self.usage = Some(usage_json(prompt, Some(completion)));
        }
        CompletionPiece { text, finish_reason: self.reason(outputs) }
    }

    fn reason(&mut self, outputs: &[OutputTensor]) -> Option<String> {
        let reason = text(outputs, self.mapping.finish_reason.as_deref()?);
        let reason = String::from_utf8_lossy(&reason).into_owned();
        self.has_reason = self.has_reason || !reason.is_empty();
        (!reason.is_empty()).then_some(reason)
    }

    /// Returns the piece after the last answer, if there is one.
    pub(super) fn end(&mut self) -> Option<CompletionPiece> {
        let text = String::from_utf8_lossy(&std::mem::take(&mut self.tail)).into_owned();
        let finish_reason = (!self.has_reason).then(|| STOP.to_owned());
        (!text.is_empty() || finish_reason.is_some()).then_some(CompletionPiece { text, finish_reason })
    }

    /// Returns the usage, or `None` if the model reports none.
    pub(super) fn usage(&self) -> Option<&Value> {
        self.usage.as_ref()
    }
}

/// Returns the usage for these numbers of tokens. Embeddings have no completion.
pub(super) fn usage_json(prompt: i128, completion: Option<i128>) -> Value {
    let total = prompt + completion.unwrap_or(0);
    let whole = |number: i128| u64::try_from(number).unwrap_or(0);
    match completion {
        Some(completion) => json!({
            "prompt_tokens": whole(prompt),
            "completion_tokens": whole(completion),
            "total_tokens": whole(total),
        }),
        None => json!({"prompt_tokens": whole(prompt), "total_tokens": whole(total)}),
    }
}

/// Returns the number of bytes before a last character that is incomplete.
fn whole_characters(bytes: &[u8]) -> usize {
    let start = bytes.iter().rposition(|byte| byte & 0xc0 != 0x80).unwrap_or(bytes.len());
    match std::str::from_utf8(&bytes[start..]) {
        Err(why) if why.error_len().is_none() => start,
        _ => bytes.len(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use shadowslice_shared::tensor::{Datatype, push_byte_string};

    use super::*;
    use crate::tensors::OutputForm;

    fn string(name: &str, value: &[u8]) -> OutputTensor {
        let mut data = Vec::new();
        push_byte_string(&mut data, value);
        let (name, form) = (name.to_owned(), OutputForm::Binary);
        OutputTensor { name, datatype: Datatype::Bytes, shape: vec![1], data: data.into(), form }
    }

    fn completion(reason: bool) -> CompletionText {
        CompletionText::new(CompletionsMapping {
            prompt: "p".to_owned(),
            text: "t".to_owned(),
            fields: BTreeMap::new(),
            finish_reason: reason.then(|| "r".to_owned()),
            usage: None,
        })
    }

    #[test]
    fn characters_may_be_split_between_answers() {
        let mut text = completion(false);
        let all = [&b"a\xe2"[..], b"\x82", b"\xac!\xf0\x9f", b"x", b"\xc3"];
        let pieces = all.map(|bytes| text.push(&[string("t", bytes)]).text);
        assert_eq!(pieces, ["a", "", "€!", "\u{fffd}x", ""]);
        let end = CompletionPiece { text: "\u{fffd}".to_owned(), finish_reason: Some(STOP.to_owned()) };
        assert_eq!(text.end(), Some(end));
    }

    #[test]
    fn the_model_gives_the_reason_if_it_is_mapped() {
        let mut text = completion(true);
        assert_eq!(text.push(&[string("t", b"a"), string("r", b"")]).finish_reason, None);
        let last = text.push(&[string("t", b"b"), string("r", b"length")]);
        assert_eq!(last, CompletionPiece { text: "b".to_owned(), finish_reason: Some("length".to_owned()) });
        assert_eq!(text.end(), None);
    }
}
