//! `/v1/models`: the models that serve one of OpenAI's endpoints.

use std::time::UNIX_EPOCH;

use serde_json::{Value, json};
use shadowslice_datapath::router::{Route, Router};

use super::error::OpenAiError;
use crate::admission::{Clipped, RequestError};
use crate::api::answers::document;
use crate::transport::HttpAnswer;

/// Returns all models that serve an endpoint.
pub(in crate::api) fn list(router: &Router) -> HttpAnswer {
    let models = router.models().into_iter().filter(|(_, route)| route.pipeline().openai().is_some());
    let models: Vec<_> = models.map(|(name, route)| model(&name, &route)).collect();
    document(&json!({"object": "list", "data": models}))
}

pub(super) fn one(router: &Router, name: &str) -> Result<HttpAnswer, OpenAiError> {
    let route = router.model(name).filter(|route| route.pipeline().openai().is_some());
    let route = route.ok_or_else(|| {
        OpenAiError::model(RequestError::NotFound(format!("model '{}' not found", Clipped(name))))
    })?;
    Ok(document(&model(name, &route)))
}

fn model(name: &str, route: &Route) -> Value {
    let loaded = route.pipeline().content().loaded_at.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let created = loaded.map_or(0, |since| since.as_secs());
    json!({"id": name, "object": "model", "created": created, "owned_by": "shadowslice"})
}
