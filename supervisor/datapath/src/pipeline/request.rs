//! Requests that enter a pipeline, and answers that leave it.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use shadowslice_shared::tensor::TensorSpec;

use super::pieces::Pieces;
use crate::trace::Journal;

/// A model's description, as its workers found it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Metadata {
    pub name: String,
    /// The software that runs the model, in Triton's terms: `onnxruntime_onnx`, or `emulated`.
    pub platform: &'static str,
    /// The largest batch; 0 for a model without a batch axis.
    pub max_batch: u32,
    /// The number of streams that a worker generates at once, if the model gives many answers to a
    /// request.
    pub streams: Option<u32>,
    /// The inputs that every request has, with whole shapes.
    pub inputs: Vec<TensorSpec>,
    /// The inputs that a request may leave out. They have no batch axis.
    pub optional: Vec<TensorSpec>,
    /// The outputs, with whole shapes.
    pub outputs: Vec<TensorSpec>,
}

impl Metadata {
    /// Returns a whole shape without its batch axis.
    pub fn tail<'s>(&self, shape: &'s [i64]) -> &'s [i64] {
        if self.max_batch == 0 { shape } else { shape.get(1..).unwrap_or_default() }
    }

    /// Returns the shapes of checked inputs without their batch axis.
    pub(crate) fn shapes(&self, inputs: &[RequestInput]) -> Arc<[Vec<i64>]> {
        let tail = |(place, input): (usize, &RequestInput)| match place < self.inputs.len() {
            true => self.tail(&input.shape).to_vec(),
            false => input.shape.clone(),
        };
        inputs.iter().enumerate().map(tail).collect()
    }

    /// Returns the size of checked inputs along the batch axis; 1 for a model without a batch axis.
    pub fn rows(&self, inputs: &[RequestInput]) -> u32 {
        let batched = inputs[..self.inputs.len().min(inputs.len())].first().filter(|_| self.max_batch > 0);
        let first = batched.and_then(|input| input.shape.first());
        first.map_or(1, |&rows| u32::try_from(rows).unwrap_or(u32::MAX))
    }
}

/// An input of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestInput {
    /// Its whole shape.
    pub shape: Vec<i64>,
    /// The elements, row-major and little-endian. Each BYTES element follows its length.
    pub data: Pieces,
}

impl RequestInput {
    /// Returns a placeholder for an optional input that a request leaves out while it has others.
    pub fn left_out() -> Self {
        Self { shape: LEFT_OUT.to_vec(), data: Pieces::default() }
    }
}

/// The shape of an optional input that a request leaves out. No tensor has this shape.
pub(crate) const LEFT_OUT: &[i64] = &[-1];

/// An output of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestOutput {
    /// Its whole shape.
    pub shape: Vec<i64>,
    /// The elements, as in [`RequestInput::data`].
    pub data: Bytes,
}

/// The arrival of a request.
#[derive(Debug, Clone)]
pub struct RequestArrival {
    /// The time at which the request's first part was read: over HTTP its head, over gRPC the
    /// call's headers, in a call with many messages the message's first byte. The SLO and a timeout
    /// start then, however slowly the rest arrives. If the connection was busy, the time in which
    /// the kernel held that part is not measured.
    pub began: Instant,
    /// The part of the time since then in which the request waited here, during an outage.
    pub waited: Duration,
    pub journal: Option<Journal>,
}

impl RequestArrival {
    /// Returns an arrival at the present time.
    pub fn now(journal: Option<Journal>) -> Self {
        Self { began: Instant::now(), waited: Duration::ZERO, journal }
    }
}

/// The options that a request sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RequestOptions {
    /// The priority: lower numbers are served first; 0 means [`RequestOptions::DEFAULT_PRIORITY`].
    pub priority: u64,
    /// The time after the request's arrival at which an answer is of no use any more.
    pub timeout: Option<Duration>,
}

impl RequestOptions {
    /// The priority of requests that name none. There is room before and behind it.
    pub const DEFAULT_PRIORITY: u64 = 100;

    pub(crate) fn level(&self) -> u64 {
        if self.priority == 0 { Self::DEFAULT_PRIORITY } else { self.priority }
    }
}

/// The identity of the files that a model is served from.
#[derive(Debug, Default)]
pub struct ModelContent {
    /// The time at which the files were loaded; `None` for a model without files.
    pub loaded_at: Option<SystemTime>,
    /// The SHA-256 of the model's own file in hexadecimal digits, once it is computed.
    pub sha256: OnceLock<String>,
}

/// The reason why a request got no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum RequestFailure {
    /// The model cannot serve the request now; a retry may succeed. UNAVAILABLE, 503.
    #[error("{0}")]
    Unavailable(String),
    /// There is not enough memory for it now. RESOURCE_EXHAUSTED, 503.
    #[error("{0}")]
    Exhausted(String),
    /// The model cannot serve the request. INVALID_ARGUMENT, 400.
    #[error("{0}")]
    Invalid(String),
    /// Its own timeout ended first. DEADLINE_EXCEEDED, 504.
    #[error("{0}")]
    TimedOut(String),
    /// The model failed on it. INTERNAL, 500.
    #[error("{0}")]
    Internal(String),
}

impl RequestFailure {
    pub(crate) fn timed_out(timeout: Duration) -> Self {
        let us = timeout.as_micros();
        Self::TimedOut(format!("the request was not answered within its timeout of {us} us"))
    }

    pub fn no_memory(bytes: usize) -> Self {
        Self::Exhausted(format!(
            "cannot allocate {bytes} bytes; try again later, lower limits.memory, or give the supervisor more memory"
        ))
    }
}
