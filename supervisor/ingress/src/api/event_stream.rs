//! Answers as server-sent events.
//!
//! An event is written when its answer arrives, and the next answer is requested when the client's
//! socket has accepted the event. A client that disconnects drops the body, which closes the stream
//! in the worker. Events are never compressed, because a compressor would hold them back.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use hyper::Response;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use serde_json::Value;
use shadowslice_datapath::trace::Journal;
use tokio::time::sleep;

use super::inference::{LONG_JSON_BYTES, ModelAnswer, ModelAnswers, tensor_bytes};
use crate::admission::{Deliveries, MemoryPermit, RequestError, run_blocking};
use crate::tensors::OutputTensor;
use crate::transport::{AnswerBody, HttpAnswer, StreamedPiece};

/// The time without an answer after which a comment is written. Proxies commonly close a connection
/// that is silent for 30 s or more.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(15);

const KEEP_ALIVE: Bytes = Bytes::from_static(b": keep-alive\n\n");

const EVENT_START: &[u8] = b"data: ";
const EVENT_END: &[u8] = b"\n\n";

/// A form of the events of a request.
pub(super) trait EventWriter: Send + 'static {
    /// Returns the maximum size in bytes of the events of an answer.
    fn max_bytes(&self, outputs: &[OutputTensor]) -> usize;

    /// Writes the events of an answer.
    fn answer(&mut self, outputs: &[OutputTensor]) -> Result<Bytes, RequestError>;

    /// Writes the events after the last answer, if there are any.
    fn end(&mut self) -> Bytes;

    /// Writes the event of a failure, which is the last event.
    fn failure(why: &RequestError) -> Bytes;
}

/// Returns an event whose data `write` appends. The data must not contain a line break.
pub(super) fn event<E>(write: impl FnOnce(&mut Vec<u8>) -> Result<(), E>) -> Result<Bytes, E> {
    let mut event = EVENT_START.to_vec();
    write(&mut event)?;
    event.extend_from_slice(EVENT_END);
    Ok(event.into())
}

/// Returns an event with this data.
pub(super) fn json_event(data: &Value) -> Bytes {
    [EVENT_START, data.to_string().as_bytes(), EVENT_END].concat().into()
}

/// Returns an answer with the events of a request. Waits for the first answer, so that a failure
/// before it is an ordinary error.
pub(super) async fn respond<W: EventWriter>(
    mut answers: ModelAnswers,
    writer: W,
    journal: Option<Journal>,
    permit: Arc<MemoryPermit>,
) -> Result<HttpAnswer, RequestError> {
    let first = answers.next().await.transpose()?;
    let mut events = Events { answers, writer: Some(writer), journal, permit };
    let first = match first {
        Some(answer) => Some(events.write(answer).await?),
        None => None,
    };
    let mut response = Response::new(AnswerBody::Streamed(events.after(first)));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    Ok(response)
}

/// The events that have not been written.
struct Events<W> {
    answers: ModelAnswers,
    /// The writer, or `None` after the last event.
    writer: Option<W>,
    journal: Option<Journal>,
    permit: Arc<MemoryPermit>,
}

impl<W: EventWriter> Events<W> {
    fn after(self, first: Option<StreamedPiece>) -> BoxStream<'static, StreamedPiece> {
        let rest = stream::unfold(self, |mut events| async { Some((events.next().await?, events)) });
        stream::iter(first).chain(rest).boxed()
    }

    async fn next(&mut self) -> Option<StreamedPiece> {
        self.writer.as_ref()?;
        let answer = tokio::select! {
            biased;
            answer = self.answers.next() => answer,
            () = sleep(KEEP_ALIVE_INTERVAL) => return Some(piece(KEEP_ALIVE)),
        };
        let written = match answer {
            Some(Ok(answer)) => self.write(answer).await,
            Some(Err(why)) => Err(why),
            None => {
                let end = self.writer.take()?.end();
                return (!end.is_empty()).then(|| piece(end));
            }
        };
        Some(written.unwrap_or_else(|why| self.fail(&why)))
    }

    /// Writes the events of an answer. After an error, the writer may be gone.
    async fn write(&mut self, answer: ModelAnswer) -> Result<StreamedPiece, RequestError> {
        let ModelAnswer { outputs, deliveries } = answer;
        match self.write_outputs(outputs).await {
            Ok(bytes) => Ok(StreamedPiece { bytes, deliveries }),
            Err(why) => {
                deliveries.mark_failed(&why);
                Err(why)
            }
        }
    }

    async fn write_outputs(&mut self, outputs: Vec<OutputTensor>) -> Result<Bytes, RequestError> {
        let Some(mut writer) = self.writer.take() else { return Ok(Bytes::new()) };
        let bytes = tensor_bytes(&outputs) + writer.max_bytes(&outputs);
        self.permit.replace(bytes)?;
        let write = move || {
            let event = writer.answer(&outputs)?;
            Ok::<_, RequestError>((writer, event))
        };
        let (writer, event) = match bytes < LONG_JSON_BYTES {
            true => write()?,
            false => run_blocking("writing the answer", write).await?,
        };
        self.writer = Some(writer);
        self.permit.shrink_to(event.len());
        Ok(event)
    }

    /// Returns the event of a failure, and closes the stream.
    fn fail(&mut self, why: &RequestError) -> StreamedPiece {
        if let Some(journal) = &self.journal {
            journal.record_failure(why.message());
        }
        (self.writer, self.answers) = (None, stream::empty().boxed());
        piece(W::failure(why))
    }
}

fn piece(bytes: Bytes) -> StreamedPiece {
    StreamedPiece { bytes, deliveries: Deliveries::default() }
}

#[cfg(test)]
mod tests {
    use shadowslice_datapath::pipeline::RequestFailure;
    use tokio::time::Instant;

    use super::*;
    use crate::admission::unlimited;

    /// Writes the names of outputs. An output without a name cannot be written.
    struct Names;

    fn data(text: &str) -> Bytes {
        format!("data: {text}\n\n").into()
    }

    impl EventWriter for Names {
        fn max_bytes(&self, outputs: &[OutputTensor]) -> usize {
            outputs.len()
        }

        fn answer(&mut self, outputs: &[OutputTensor]) -> Result<Bytes, RequestError> {
            let names: Vec<_> = outputs.iter().map(|output| output.name.as_str()).collect();
            let failure = || RequestFailure::Internal("no name".to_owned()).into();
            if names.contains(&"") { Err(failure()) } else { Ok(data(&names.concat())) }
        }

        fn end(&mut self) -> Bytes {
            data("end")
        }

        fn failure(why: &RequestError) -> Bytes {
            data(&why.message())
        }
    }

    fn answer(name: &str) -> Result<ModelAnswer, RequestError> {
        let output = OutputTensor {
            name: name.to_owned(),
            datatype: shadowslice_shared::tensor::Datatype::Uint8,
            shape: vec![1],
            data: vec![7].into(),
            form: crate::tensors::OutputForm::Json,
        };
        Ok(ModelAnswer { outputs: vec![output], deliveries: Deliveries::default() })
    }

    fn lost() -> Result<ModelAnswer, RequestError> {
        Err(RequestFailure::Unavailable("lost".to_owned()).into())
    }

    async fn events(answers: ModelAnswers) -> Result<Vec<String>, String> {
        let response = respond(answers, Names, None, unlimited()).await.map_err(|why| why.message())?;
        assert_eq!(response.headers()[CONTENT_TYPE], "text/event-stream");
        let AnswerBody::Streamed(pieces) = response.into_body() else { panic!() };
        let text = pieces.map(|piece| String::from_utf8(piece.bytes.to_vec()).unwrap());
        Ok(text.collect().await)
    }

    #[tokio::test]
    async fn each_answer_is_an_event_and_a_failure_is_the_last_one() {
        let of = async |answers: Vec<_>| events(stream::iter(answers).boxed()).await;
        let all = of(vec![answer("a"), answer("b")]).await.unwrap();
        assert_eq!(all, ["data: a\n\n", "data: b\n\n", "data: end\n\n"]);
        assert_eq!(of(Vec::new()).await.unwrap(), ["data: end\n\n"]);
        assert_eq!(
            of(vec![answer("a"), lost(), answer("b")]).await.unwrap(),
            ["data: a\n\n", "data: lost\n\n"]
        );
        assert_eq!(of(vec![answer("a"), answer("")]).await.unwrap(), ["data: a\n\n", "data: no name\n\n"]);
    }

    #[tokio::test]
    async fn a_failure_before_the_first_event_is_an_ordinary_error() {
        for (first, why) in [(lost(), "lost"), (answer(""), "no name")] {
            assert_eq!(events(stream::iter([first]).boxed()).await.unwrap_err(), why);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_comment_is_written_while_no_answer_arrives() {
        let begun = Instant::now();
        let slow = stream::iter([answer("a"), answer("b")]).enumerate().then(|(place, answer)| async move {
            sleep(KEEP_ALIVE_INTERVAL.mul_f64(2.5 * place as f64)).await;
            answer
        });
        let all = events(slow.boxed()).await.unwrap();
        let comment = ": keep-alive\n\n";
        assert_eq!(all, ["data: a\n\n", comment, comment, "data: b\n\n", "data: end\n\n"]);
        assert_eq!(begun.elapsed(), KEEP_ALIVE_INTERVAL.mul_f64(2.5), "comments do not delay an answer");
    }
}
