//! The models that requests name.

use std::sync::Arc;

use shadowslice_datapath::pipeline::{Metadata, RequestFailure};
use shadowslice_datapath::router::{Route, Router};

use crate::admission::{Clipped, RequestError};
use crate::tensors::MODEL_VERSION;

/// Returns the route to a model. An empty version means the only version.
pub(super) fn find(router: &Router, name: &str, version: &str) -> Result<Route, RequestError> {
    let route = router.model(name).ok_or_else(|| {
        RequestError::NotFound(format!("Request for unknown model: '{}' is not found", Clipped(name)))
    })?;
    if version.is_empty() || version == MODEL_VERSION {
        Ok(route)
    } else {
        Err(RequestError::NotFound(format!(
            "Request for unknown model: '{}' version {} is not found; its version is {MODEL_VERSION}",
            Clipped(name),
            Clipped(version)
        )))
    }
}

/// Returns `Ok` if clients should send requests to the model. Otherwise returns the reason why not.
pub(super) fn ready(router: &Router, name: &str, route: &Route) -> Result<(), String> {
    if router.is_drained(name) {
        return Err("the model is drained".to_owned());
    }
    route.ready()
}

pub(super) fn metadata(route: &Route, name: &str) -> Result<Arc<Metadata>, RequestError> {
    route.pipeline().metadata().ok_or_else(|| {
        let why = route.ready().err().unwrap_or_else(|| "the model is still loading".to_owned());
        RequestFailure::Unavailable(format!("model '{}' is not ready: {why}", Clipped(name))).into()
    })
}
