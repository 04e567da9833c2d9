//! The floor that implements the Open Inference Protocol: the paths and calls, inferences, the
//! descriptions of models, the repository, health, statistics, and the metrics page.
//!
//! This is the top floor. It uses the other floors, and only the crate's root uses it.

mod answers;
mod client_timeout;
mod describe;
mod endpoints;
mod event_stream;
mod frontend;
mod generate;
mod grpc;
mod grpc_infer;
mod grpc_service;
mod health;
mod http;
mod http_infer;
mod infer_stream;
mod inference;
mod load_metrics;
mod metrics;
mod model;
mod openai;
mod reflection;
mod repository;
mod routes;
mod service;
mod statistics;
mod trace;
mod unsupported;

pub use metrics::{Events, File, MetricsListeners, Shown};

pub(crate) use frontend::Frontend;
pub(crate) use health::MAX_WATCHERS;
pub(crate) use service::ApiService;
