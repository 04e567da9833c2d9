//! The model repository in both protocols: the list of models, load and unload.

use std::sync::Arc;

use crate::admission::{Clipped, RequestError, invalid};
use crate::proto::RepositoryIndexResponse;
use crate::proto::repository_index_response::ModelIndex;
use shadowslice_datapath::peer::Peer;
use shadowslice_datapath::pipeline::RequestFailure;
use shadowslice_datapath::repository::{
    Availability, ModelCommand, ModelCommandError, ModelListing, Repository,
};

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

/// Returns the models, or only those that are ready.
pub(super) fn index(repository: &Repository, ready: bool) -> RepositoryIndexResponse {
    let wanted = repository.list().into_iter().filter(|model| !ready || model.state == Availability::Ready);
    let model = |ModelListing { name, version, state, reason }| ModelIndex {
        name,
        version: version.to_string(),
        state: state.name().to_owned(),
        reason,
    };
    RepositoryIndexResponse { models: wanted.map(model).collect() }
}

/// Loads a model. A parameter that is not a string has no text.
pub(super) async fn load(
    repository: &Repository,
    by: &Arc<Peer>,
    model: String,
    parameters: impl Iterator<Item = (String, Option<String>)>,
) -> Result<(), RequestError> {
    let config = config(parameters)?;
    Ok(repository.execute(Arc::clone(by), ModelCommand::Load { model, config }).await?)
}

/// Unloads a model. Ignores the option to unload dependents, because no model depends on another.
pub(super) async fn unload(
    repository: &Repository,
    by: &Arc<Peer>,
    model: String,
) -> Result<(), RequestError> {
    Ok(repository.execute(Arc::clone(by), ModelCommand::Unload { model }).await?)
}

/// Fails if a client names a repository.
pub(super) fn check_repository(name: &str) -> Result<(), RequestFailure> {
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
