//! The models that requests name.

use std::sync::Arc;

use hyper::HeaderMap;
use shadowslice_datapath::pipeline::{Metadata, RequestFailure};
use shadowslice_datapath::router::{Route, Router};

use crate::admission::{Clipped, RequestError};

/// Returns the route to a version of a model. An empty version means the released version.
pub(super) fn find(router: &Router, name: &str, version: &str) -> Result<Route, RequestError> {
    match version {
        "" => router.model(name).ok_or_else(|| unknown(name)),
        _ => find_version(router, name, version),
    }
}

/// Returns the route to the version of a model that answers a request. If the request names no version,
/// the new version in a rollout answers a part of these requests.
pub(super) fn select(
    router: &Router,
    name: &str,
    version: &str,
    headers: &HeaderMap,
) -> Result<Route, RequestError> {
    let header = |header: &str| headers.get(header).map(|value| value.as_bytes());
    match version {
        "" => router.select(name, header).ok_or_else(|| unknown(name)),
        _ => find_version(router, name, version),
    }
}

fn find_version(router: &Router, name: &str, version: &str) -> Result<Route, RequestError> {
    let versions = router.versions(name);
    let number = versions.iter().find(|number| number.to_string() == version);
    let route = number.and_then(|number| router.version(name, *number));
    match route {
        Some(route) => Ok(route),
        None if versions.is_empty() => Err(unknown(name)),
        None => {
            let (name, version) = (Clipped(name), Clipped(version));
            let is_one = versions.len() == 1;
            let known: Vec<String> = versions.iter().map(u32::to_string).collect();
            let its = if is_one { "its version is" } else { "its versions are" };
            Err(RequestError::NotFound(format!(
                "Request for unknown model: '{name}' version {version} is not found; {its} {}",
                known.join(", ")
            )))
        }
    }
}

fn unknown(name: &str) -> RequestError {
    RequestError::NotFound(format!("Request for unknown model: '{}' is not found", Clipped(name)))
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
