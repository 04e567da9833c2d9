//! The model repository in both protocols: the list of models, load and unload.

use std::collections::HashMap;
use std::sync::Arc;

use hyper::StatusCode;
use serde::Deserialize;
use serde_json::Value;

use super::answers::{document, empty};
use super::routes::RepositoryEndpoint;
use crate::admission::{Clipped, RequestError, invalid};
use crate::proto::model_repository_parameter::ParameterChoice;
use crate::proto::repository_index_response::ModelIndex;
use crate::proto::{
    ModelRepositoryParameter, RepositoryIndexRequest, RepositoryIndexResponse, RepositoryModelLoadRequest,
    RepositoryModelUnloadRequest,
};
use crate::tensors::{MODEL_VERSION, parse_object};
use crate::transport::HttpAnswer;
use shadowslice_datapath::peer::Peer;
use shadowslice_datapath::pipeline::RequestFailure;
use shadowslice_datapath::repository::{
    Availability, ModelCommand, ModelCommandError, ModelListing, Repository,
};

#[derive(Debug, Default, Deserialize)]
#[serde(expecting = "an object")]
struct IndexBody {
    #[serde(default)]
    ready: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(expecting = "an object")]
struct Body {
    #[serde(default)]
    parameters: HashMap<String, Value>,
}

impl From<ModelCommandError> for RequestError {
    fn from(refused: ModelCommandError) -> Self {
        let message = refused.to_string();
        match refused {
            ModelCommandError::Unknown(..) => Self::NotFound(message),
            ModelCommandError::Denied => Self::Forbidden(message),
            ModelCommandError::Invalid(_) => RequestFailure::Invalid(message).into(),
            ModelCommandError::Failed(..) => RequestFailure::Internal(message).into(),
            ModelCommandError::NotAllowed | ModelCommandError::Busy | ModelCommandError::Succession => {
                RequestFailure::Unavailable(message).into()
            }
        }
    }
}

pub(super) async fn answer(
    repository: &Repository,
    by: Arc<Peer>,
    endpoint: RepositoryEndpoint,
    body: &[u8],
) -> Result<HttpAnswer, RequestError> {
    let command = match endpoint {
        RepositoryEndpoint::Index => {
            let IndexBody { ready } = read(body)?;
            return Ok(document(&listed(repository, ready)));
        }
        RepositoryEndpoint::Load(model) => {
            let Body { parameters } = read(body)?;
            let text = |(name, value): (String, Value)| (name, value.as_str().map(str::to_owned));
            ModelCommand::Load { model, config: config(parameters.into_iter().map(text))? }
        }
        RepositoryEndpoint::Unload(model) => {
            let Body { .. } = read(body)?;
            ModelCommand::Unload { model }
        }
    };
    repository.execute(by, command).await?;
    Ok(empty(StatusCode::OK))
}

/// Parses a body. An empty body has no content.
fn read<T: Default + for<'a> Deserialize<'a>>(body: &[u8]) -> Result<T, RequestFailure> {
    if body.is_empty() {
        return Ok(T::default());
    }
    parse_object(body, "an object")
        .map_err(|error| RequestFailure::Invalid(format!("failed to parse the request JSON: {error}")))
}

pub(super) fn index(
    repository: &Repository,
    request: &RepositoryIndexRequest,
) -> Result<RepositoryIndexResponse, RequestError> {
    check_repository(&request.repository_name)?;
    Ok(RepositoryIndexResponse { models: listed(repository, request.ready) })
}

pub(super) async fn load(
    repository: &Repository,
    by: Arc<Peer>,
    request: RepositoryModelLoadRequest,
) -> Result<(), RequestError> {
    check_repository(&request.repository_name)?;
    let text = |(name, parameter): (String, ModelRepositoryParameter)| match parameter.parameter_choice {
        Some(ParameterChoice::StringParam(text)) => (name, Some(text)),
        _ => (name, None),
    };
    let config = config(request.parameters.into_iter().map(text))?;
    Ok(repository.execute(by, ModelCommand::Load { model: request.model_name, config }).await?)
}

/// Unloads a model. Ignores the option to unload dependents, because no model depends on another.
pub(super) async fn unload(
    repository: &Repository,
    by: Arc<Peer>,
    request: RepositoryModelUnloadRequest,
) -> Result<(), RequestError> {
    check_repository(&request.repository_name)?;
    Ok(repository.execute(by, ModelCommand::Unload { model: request.model_name }).await?)
}

fn listed(repository: &Repository, ready: bool) -> Vec<ModelIndex> {
    let wanted = repository.list().into_iter().filter(|model| !ready || model.state == Availability::Ready);
    let model = |ModelListing { name, state, reason }| ModelIndex {
        name,
        version: MODEL_VERSION.to_owned(),
        state: state.name().to_owned(),
        reason,
    };
    wanted.map(model).collect()
}

/// Fails if a client names a repository.
fn check_repository(name: &str) -> Result<(), RequestFailure> {
    if name.is_empty() {
        return Ok(());
    }
    invalid(
        "'repository_name' is not supported, because there is only one repository; leave the name empty"
            .to_owned(),
    )
}

fn config(
    parameters: impl Iterator<Item = (String, Option<String>)>,
) -> Result<Option<String>, RequestFailure> {
    let mut config = None;
    for (name, text) in parameters {
        match (name.as_str(), text) {
            ("config", Some(text)) => config = Some(text),
            ("config", None) => {
                return invalid("parameter 'config' must be a string that contains JSON".to_owned());
            }
            _ => {
                let name = Clipped(&name);
                return invalid(format!(
                    "parameter '{name}' is not supported; only 'config' is, because clients cannot change a model's files"
                ));
            }
        }
    }
    Ok(config)
}
