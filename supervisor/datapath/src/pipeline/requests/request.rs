//! The requests that enter a pipeline, and the answers that leave it.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use shadowslice_policy::tenants::TenantId;
use shadowslice_shared::batch::StreamLimits;
use shadowslice_shared::tensor::TensorSpec;

use super::pieces::Pieces;
use crate::trace::Journal;

/// The description of a model, as its workers reported it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Metadata {
    /// The name that clients use.
    pub name: String,
    /// The number of the version. Supervisors before versions do not describe it, and an upgrade compares
    /// descriptions.
    #[serde(skip_serializing_if = "is_first_version")]
    pub version: String,
    /// The software that runs the model, for example `emulated`, or `onnxruntime_onnx` (Triton's
    /// name for ONNX Runtime).
    pub platform: &'static str,
    /// The largest batch in rows, or 0 for a model without a batch axis.
    pub max_batch: u32,
    /// The number of streams that a worker can generate. `None` if the model gives one answer per
    /// request.
    pub streams: Option<StreamLimits>,
    /// The required inputs. Their shapes include the batch axis.
    pub inputs: Vec<TensorSpec>,
    /// The inputs that a request may omit. They have no batch axis.
    pub optional: Vec<TensorSpec>,
    /// The outputs. Their shapes include the batch axis.
    pub outputs: Vec<TensorSpec>,
}

fn is_first_version(version: &str) -> bool {
    version == "1"
}

impl Metadata {
    /// Returns a shape without the batch axis.
    pub fn tail<'s>(&self, shape: &'s [i64]) -> &'s [i64] {
        if self.max_batch == 0 { shape } else { shape.get(1..).unwrap_or_default() }
    }

    /// Returns the shapes of checked inputs without the batch axis.
    pub(crate) fn shapes(&self, inputs: &[RequestInput]) -> Arc<[Vec<i64>]> {
        let tail = |(place, input): (usize, &RequestInput)| match place < self.inputs.len() {
            true => self.tail(&input.shape).to_vec(),
            false => input.shape.clone(),
        };
        inputs.iter().enumerate().map(tail).collect()
    }

    /// Returns the size of checked inputs along the batch axis. Returns 1 for a model without a
    /// batch axis.
    pub fn rows(&self, inputs: &[RequestInput]) -> u32 {
        let batched = inputs[..self.inputs.len().min(inputs.len())].first().filter(|_| self.max_batch > 0);
        let first = batched.and_then(|input| input.shape.first());
        first.map_or(1, |&rows| u32::try_from(rows).unwrap_or(u32::MAX))
    }
}

/// The tensor that a request gives for one input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestInput {
    /// The shape, including the batch axis.
    pub shape: Vec<i64>,
    /// The elements in row-major order and little-endian format. The length of each BYTES element
    /// precedes it.
    pub data: Pieces,
}

impl RequestInput {
    /// Returns a placeholder for an optional input that a request omits although it has other
    /// optional inputs.
    pub fn left_out() -> Self {
        Self { shape: LEFT_OUT.to_vec(), data: Pieces::default() }
    }
}

/// The shape of an optional input that a request omits. No tensor has this shape.
pub(crate) const LEFT_OUT: &[i64] = &[-1];

/// The tensor that an answer gives for one output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestOutput {
    /// The shape, including the batch axis.
    pub shape: Vec<i64>,
    /// The elements in the same format as [`RequestInput::data`].
    pub data: Bytes,
}

/// The arrival of a request.
#[derive(Debug, Clone)]
pub struct RequestArrival {
    /// The time at which the first part of the request was read. Over HTTP, this part is the head.
    /// Over gRPC, it is the headers of the call. In a gRPC call with many messages, it is the first
    /// byte of the message. The SLO and the timeout start at this time, however slowly the rest of
    /// the request arrives. If the connection was busy, the time for which the kernel buffered this
    /// part is not measured.
    pub began: Instant,
    /// The time for which this supervisor held the request during an outage of the supervisor to
    /// which it relays requests. This time does not count as receiving time.
    pub waited: Duration,
    /// The time from `began` after which the client no longer needs an answer, according to the protocol.
    pub timeout: Option<Duration>,
    /// The tenant whose SM time the request uses. During an upgrade, requests that are relayed to another
    /// supervisor belong to the default tenant.
    pub tenant: TenantId,
    pub journal: Option<Journal>,
}

impl RequestArrival {
    /// Returns an arrival at the present time.
    pub fn now(journal: Option<Journal>) -> Self {
        let tenant = TenantId::DEFAULT;
        Self { began: Instant::now(), waited: Duration::ZERO, timeout: None, tenant, journal }
    }
}

/// The options that a request sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RequestOptions {
    /// The priority. Lower numbers are served first, and 0 means
    /// [`RequestOptions::DEFAULT_PRIORITY`].
    pub priority: u64,
    /// The time from the arrival after which the client no longer needs an answer.
    pub timeout: Option<Duration>,
}

impl RequestOptions {
    /// The priority of requests that set no priority. It leaves room for higher and lower
    /// priorities.
    pub const DEFAULT_PRIORITY: u64 = 100;

    /// Returns the same options with the shorter of two timeouts.
    #[must_use]
    pub(crate) fn within(self, timeout: Option<Duration>) -> Self {
        Self { timeout: [self.timeout, timeout].into_iter().flatten().min(), ..self }
    }

    pub(crate) fn level(&self) -> u64 {
        if self.priority == 0 { Self::DEFAULT_PRIORITY } else { self.priority }
    }
}

/// The identity of the files from which a model is served.
#[derive(Debug, Default)]
pub struct ModelContent {
    /// The time at which the files were loaded, or `None` for a model without files.
    pub loaded_at: Option<SystemTime>,
    /// The SHA-256 hash of the model's own file in hexadecimal digits. It is set as soon as it is
    /// computed.
    pub sha256: OnceLock<String>,
}

/// The reason why a request got no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum RequestFailure {
    /// The model cannot serve the request now, but a retry may succeed (gRPC UNAVAILABLE, HTTP
    /// 503).
    #[error("{0}")]
    Unavailable(String),
    /// There is currently not enough memory for the request (gRPC RESOURCE_EXHAUSTED, HTTP 503).
    #[error("{0}")]
    Exhausted(String),
    /// The request is not valid for this model (gRPC INVALID_ARGUMENT, HTTP 400).
    #[error("{0}")]
    Invalid(String),
    /// The request's own timeout expired before the answer was ready, or would expire (gRPC
    /// DEADLINE_EXCEEDED, HTTP 504).
    #[error("{0}")]
    TimedOut(String),
    /// The model failed to execute the request (gRPC INTERNAL, HTTP 500).
    #[error("{0}")]
    Internal(String),
}

impl RequestFailure {
    pub(crate) fn timed_out(timeout: Duration) -> Self {
        let us = timeout.as_micros();
        Self::TimedOut(format!("the request was not answered within its timeout of {us} us"))
    }

    pub(crate) fn will_time_out(timeout: Duration) -> Self {
        let us = timeout.as_micros();
        Self::TimedOut(format!("the request cannot be answered within its timeout of {us} us"))
    }

    pub fn no_memory(bytes: usize) -> Self {
        Self::Exhausted(format!(
            "cannot allocate {bytes} bytes; try again later, lower limits.memory, or give the supervisor more memory"
        ))
    }
}
