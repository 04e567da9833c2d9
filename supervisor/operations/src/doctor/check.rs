//! The results of checking a host, as text and as JSON.

use std::path::PathBuf;

use serde::Serialize;

use super::facts::Problem;

#[derive(Debug, Serialize)]
pub(super) struct Checks {
    pub(super) checks: Vec<Check>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Check {
    pub(super) name: String,
    pub(super) level: Level,
    pub(super) finding: String,
    pub(super) advice: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Level {
    /// The checked part works or is not needed.
    Ok,
    /// The host can serve models, but with lower performance or less isolation.
    Warning,
    /// The host cannot serve models.
    Fault,
}

impl Check {
    pub(super) fn ok(name: impl Into<String>, finding: impl Into<String>) -> Self {
        Self { name: name.into(), level: Level::Ok, finding: finding.into(), advice: None }
    }

    pub(super) fn warning(
        name: impl Into<String>,
        finding: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self { level: Level::Warning, advice: Some(advice.into()), ..Self::ok(name, finding) }
    }

    pub(super) fn fault(
        name: impl Into<String>,
        finding: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self { level: Level::Fault, advice: Some(advice.into()), ..Self::ok(name, finding) }
    }

    pub(super) fn of_problem(name: impl Into<String>, Problem { finding, advice }: &Problem) -> Self {
        Self::fault(name, finding, advice)
    }

    pub(super) fn found(name: &str, path: &Result<PathBuf, Problem>) -> Self {
        match path {
            Ok(path) => Self::ok(name, path.display().to_string()),
            Err(problem) => Self::of_problem(name, problem),
        }
    }

    pub(super) fn not_needed(self) -> Self {
        match self.level {
            Level::Ok => self,
            Level::Warning | Level::Fault => Self::ok(self.name, format!("{} (not needed)", self.finding)),
        }
    }

    fn line(&self) -> String {
        let Self { name, level, finding, advice } = self;
        let level = match level {
            Level::Ok => "ok",
            Level::Warning => "warning",
            Level::Fault => "fault",
        };
        let advice = advice.as_ref().map(|advice| format!("; {advice}")).unwrap_or_default();
        format!("{level:<7}  {name}: {finding}{advice}")
    }
}

impl Checks {
    pub(super) fn lines(&self) -> String {
        self.checks.iter().map(Check::line).collect::<Vec<_>>().join("\n")
    }

    /// Returns the results of all checks as one line of JSON.
    pub(super) fn json(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|error| format!("{{\"error\": \"{error}\"}}"))
    }
}
