//! The versions of a model, and the way in which a new version replaces the released one.

use std::path::PathBuf;
use std::time::Duration;

pub use shadowslice_policy::rollout::{RolloutBounds, RolloutRules};
pub use shadowslice_shared::compare::AnswerComparison;
use shadowslice_shared::units::Percent;

use super::ModelConfig;

/// The version of a model that an instance serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelVersion {
    /// The name that clients use to request the model.
    pub model: String,
    /// The number of the version.
    pub number: u32,
    /// The folder with the model's versions. `None` if the model's path is a single version.
    pub folder: Option<VersionFolder>,
}

/// A folder with a folder for each version, whose name is the version's number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VersionFolder {
    /// The absolute path of the folder.
    pub path: PathBuf,
    /// The versions to serve.
    pub policy: VersionPolicy,
}

/// The versions of a folder that are served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VersionPolicy {
    /// The newest version.
    Latest,
    /// All versions.
    All,
    /// These versions, in ascending order.
    Listed(Vec<u32>),
}

/// The way in which a new version of a model replaces the released one.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutConfig {
    /// The stages, and the bounds on the new version's behaviour.
    pub rules: RolloutRules,
    /// The new version's share while it only gets copies of requests.
    pub share: Percent,
    /// The comparison of the new version's answers with those of the released version.
    pub compare: AnswerComparison,
    /// The request header whose value decides which version answers, in lower case. `None` if each
    /// request is assigned on its own.
    pub sticky: Option<String>,
    /// The time for which the former version stays loaded after a rollout.
    pub keep: Duration,
    /// True if the former version sleeps as soon as the new one is released.
    pub replace: bool,
}

impl ModelVersion {
    /// Returns the name of the instance that serves the version. Version 1 of a model without a folder of
    /// versions has the name of the model, so that a model without versions has only one name.
    pub fn instance_name(&self) -> String {
        match self.number {
            1 if self.folder.is_none() => self.model.clone(),
            number => format!("{}:{number}", self.model),
        }
    }
}

impl ModelConfig {
    /// Returns the name that clients use to request the model. It differs from `name` if the model has
    /// versions.
    pub fn served_name(&self) -> &str {
        &self.version.model
    }
}
