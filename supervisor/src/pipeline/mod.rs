//! One model's way from its requests to its workers.

mod request;

pub use request::{Failure, Input, Metadata, Output};

/// The pipeline of one model.
#[derive(Debug)]
pub struct Pipeline {}

impl Pipeline {
    /// What the model is, once a worker has loaded it.
    pub fn metadata(&self) -> Option<std::sync::Arc<Metadata>> {
        None
    }

    /// Whether requests are accepted; otherwise why not.
    pub fn ready(&self) -> Result<(), String> {
        Err("placeholder".to_owned())
    }

    /// Queues one request and waits for its answer. `inputs` are checked against the model's
    /// metadata and stand in its order; the outputs come in its order too.
    pub async fn infer(&self, inputs: Vec<Input>) -> Result<Vec<Output>, Failure> {
        drop(inputs);
        Err(Failure::Internal("placeholder".to_owned()))
    }
}
