//! Requests as they enter a pipeline, and answers as they leave it.

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
    /// The software that runs the model, in Triton's words: `onnxruntime_onnx`, or `emulated`.
    pub platform: &'static str,
    /// The largest batch; 0 for a model without a batch axis.
    pub max_batch: u32,
    /// How many streams a worker generates at a time, if the model gives many answers to a request.
    pub streams: Option<u32>,
    /// Its inputs, whole shapes.
    pub inputs: Vec<TensorSpec>,
    /// The inputs that a request may leave out. They have no batch axis.
    pub optional: Vec<TensorSpec>,
    /// Its outputs, whole shapes.
    pub outputs: Vec<TensorSpec>,
}

impl Metadata {
    /// A whole shape without its batch axis.
    pub fn tail<'s>(&self, shape: &'s [i64]) -> &'s [i64] {
        if self.max_batch == 0 { shape } else { shape.get(1..).unwrap_or_default() }
    }

    /// The shapes of checked inputs, without their batch axis.
    pub(crate) fn shapes(&self, inputs: &[Input]) -> Arc<[Vec<i64>]> {
        let tail = |(place, input): (usize, &Input)| match place < self.inputs.len() {
            true => self.tail(&input.shape).to_vec(),
            false => input.shape.clone(),
        };
        inputs.iter().enumerate().map(tail).collect()
    }

    /// The size of checked inputs along the batch axis; 1 for a model without a batch axis.
    pub fn rows(&self, inputs: &[Input]) -> u32 {
        let batched = inputs[..self.inputs.len().min(inputs.len())].first().filter(|_| self.max_batch > 0);
        let first = batched.and_then(|input| input.shape.first());
        first.map_or(1, |&rows| u32::try_from(rows).unwrap_or(u32::MAX))
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Input {
    /// Its whole shape.
    pub shape: Vec<i64>,
    /// Its elements, row-major, little-endian; BYTES elements each after their length.
    pub data: Pieces,
}

impl Input {
    /// Returns what stands for an optional input that a request leaves out, if it gives others.
    pub fn left_out() -> Self {
        Self { shape: LEFT_OUT.to_vec(), data: Pieces::default() }
    }
}

/// The shape of an optional input that a request leaves out. No tensor has it.
pub(crate) const LEFT_OUT: &[i64] = &[-1];

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Its whole shape.
    pub shape: Vec<i64>,
    /// Its elements, as in [`Input::data`].
    pub data: Bytes,
}

#[derive(Debug, Clone)]
pub struct Coming {
    /// The time at which its first part was read: over HTTP its head, over gRPC the call's headers, in
    /// a call with many messages the message's first byte. The SLO and a timeout begin then, however
    /// slowly the rest comes. If the connection was busy, the time in which the kernel held that part
    /// is not measured.
    pub began: Instant,
    /// The part of the time since then that the request waited here, through an outage.
    pub waited: Duration,
    pub journal: Option<Journal>,
}

impl Coming {
    pub fn now(journal: Option<Journal>) -> Self {
        Self { began: Instant::now(), waited: Duration::ZERO, journal }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RequestOptions {
    /// Lower numbers go first; 0 for [`RequestOptions::DEFAULT_PRIORITY`].
    pub priority: u64,
    /// After this, from its arrival, an answer is of no use any more.
    pub timeout: Option<Duration>,
}

impl RequestOptions {
    /// The priority of requests that name no priority. It leaves room before and behind them.
    pub const DEFAULT_PRIORITY: u64 = 100;

    pub(crate) fn level(&self) -> u64 {
        if self.priority == 0 { Self::DEFAULT_PRIORITY } else { self.priority }
    }
}

/// Identifies the content that a model is served from.
#[derive(Debug, Default)]
pub struct ModelContent {
    /// `None` for a model without files.
    pub loaded_at: Option<SystemTime>,
    /// The SHA-256 of the model's own file in hexadecimal digits, once it is computed.
    pub sha256: OnceLock<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum Failure {
    /// Not now; the same request may succeed later. UNAVAILABLE, 503.
    #[error("{0}")]
    Unavailable(String),
    /// There is no memory for it now. RESOURCE_EXHAUSTED, 503.
    #[error("{0}")]
    Exhausted(String),
    /// The request cannot be served by this model. INVALID_ARGUMENT, 400.
    #[error("{0}")]
    Invalid(String),
    /// Its own timeout was over first. DEADLINE_EXCEEDED, 504.
    #[error("{0}")]
    TimedOut(String),
    /// The model failed on it. INTERNAL, 500.
    #[error("{0}")]
    Internal(String),
}

impl Failure {
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
