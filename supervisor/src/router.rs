//! The models by name: where ingress finds the pipeline of a request.

use std::collections::HashMap;
use std::sync::Arc;

use crate::pipeline::Pipeline;

/// All models of this supervisor.
#[derive(Debug)]
pub struct Router {
    models: HashMap<String, Arc<Pipeline>>,
}

impl Router {
    /// A router of these models.
    pub fn new(models: HashMap<String, Arc<Pipeline>>) -> Self {
        Self { models }
    }

    /// The model of that name.
    pub fn model(&self, name: &str) -> Option<&Arc<Pipeline>> {
        self.models.get(name)
    }

    /// All of them with their names, which stand in order.
    pub fn models(&self) -> Vec<(&str, &Arc<Pipeline>)> {
        let mut models: Vec<_> = self.models.iter().map(|(name, model)| (name.as_str(), model)).collect();
        models.sort_unstable_by_key(|model| model.0);
        models
    }

    /// Whether every model is ready.
    pub fn ready(&self) -> bool {
        self.models.values().all(|model| model.ready().is_ok())
    }
}
