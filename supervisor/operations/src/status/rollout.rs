//! The rollout of a model's new version, in the status.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use shadowslice_control::models::{ModelRollout, RolloutHandle, RolloutOutcome};
use shadowslice_datapath::versions::MirrorCounts;
use shadowslice_policy::rollout::RolloutStage;

use super::ModelStatus;
use crate::figures;
use shadowslice_control::controller::VersionRole;

/// The rollout of a new version, or the end of the last one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RolloutStatus {
    /// The number of the new version.
    pub candidate: u32,
    /// The number of the version that was released before.
    pub former: u32,
    pub phase: RolloutPhase,
    /// The time since the phase began, in seconds.
    pub age_s: f64,
    /// The fraction of requests that are copied to the new version, from 0 to 1.
    pub mirror: f64,
    /// The fraction of requests without a version that the new version answers, from 0 to 1.
    pub canary: f64,
    /// The time for which the former version is still kept, in seconds. `None` if it is not kept.
    pub kept_s: Option<f64>,
    /// The reason why the new version was rolled back.
    pub why: Option<String>,
    pub copies: MirrorStatus,
}

/// The phase of a rollout that a client has seen.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SeenPhase {
    pub phase: RolloutPhase,
    pub canary: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RolloutPhase {
    /// The new version's worker starts.
    Starting,
    /// The new version gets copies at a small share.
    Mirror,
    /// The new version gets copies at its own share.
    Timing,
    /// The new version answers a part of the requests.
    Canary,
    /// The new version answers all requests, and the former one is kept.
    Released,
    /// The new version is released, and the former one is unloaded.
    Completed,
    RolledBack,
}

/// The copies of requests, and the comparison of their answers.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct MirrorStatus {
    pub copied: u64,
    /// The number of requests that were not copied because too many copies were in progress.
    pub skipped: u64,
    pub compared: u64,
    pub differences: u64,
    pub first_difference: Option<DifferenceStatus>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DifferenceStatus {
    /// The SHA-256 of the request's inputs in hexadecimal digits.
    pub inputs_sha256: String,
    pub why: String,
}

impl RolloutStatus {
    /// Returns the rollout in progress, or the last one.
    pub(crate) fn of(rollout: &ModelRollout) -> Option<Self> {
        let active = rollout.active.as_ref().map(Self::of_active);
        active.or_else(|| rollout.last.as_ref().map(Self::of_last))
    }

    fn of_active(rollout: &RolloutHandle) -> Self {
        let rules = &rollout.config.rules;
        let (phase, mirror, canary) = match rollout.stage {
            RolloutStage::Starting => (RolloutPhase::Starting, 0.0, 0.0),
            RolloutStage::Mirror => (RolloutPhase::Mirror, rules.mirror, 0.0),
            RolloutStage::Timing => (RolloutPhase::Timing, rules.mirror, 0.0),
            RolloutStage::Canary { step } => {
                (RolloutPhase::Canary, rules.mirror, rules.canary.get(step).copied().unwrap_or(1.0))
            }
            RolloutStage::Released => (RolloutPhase::Released, 0.0, 1.0),
        };
        let now = SystemTime::now();
        let kept = rollout.kept_until.map(|until| until.duration_since(now).unwrap_or_default());
        Self {
            candidate: rollout.candidate,
            former: rollout.former,
            phase,
            age_s: age_s(rollout.stage_since),
            mirror,
            canary,
            kept_s: kept.map(|kept| kept.as_secs_f64()),
            why: None,
            copies: rollout.mirror().into(),
        }
    }

    fn of_last(last: &RolloutOutcome) -> Self {
        let phase = if last.why.is_some() { RolloutPhase::RolledBack } else { RolloutPhase::Completed };
        Self {
            candidate: last.candidate,
            former: last.former,
            phase,
            age_s: age_s(last.at),
            mirror: 0.0,
            canary: if last.why.is_some() { 0.0 } else { 1.0 },
            kept_s: None,
            why: last.why.clone(),
            copies: last.mirror.clone().into(),
        }
    }

    pub fn seen(&self) -> SeenPhase {
        SeenPhase { phase: self.phase, canary: self.canary }
    }

    /// Returns the phase in a few words, for tables.
    pub(crate) fn phase_text(&self) -> String {
        match self.phase {
            RolloutPhase::Starting => "starting".to_owned(),
            RolloutPhase::Mirror => format!("mirror {}", part(self.mirror)),
            RolloutPhase::Timing => "timing".to_owned(),
            RolloutPhase::Canary => format!("canary {}", part(self.canary)),
            RolloutPhase::Released | RolloutPhase::Completed => "released".to_owned(),
            RolloutPhase::RolledBack => "rolled back".to_owned(),
        }
    }

    /// Returns the state of the rollout in a sentence.
    pub fn text(&self) -> String {
        let Self { candidate, former, age_s, .. } = self;
        let since = figures::span(*age_s);
        let state = match self.phase {
            RolloutPhase::RolledBack => {
                let why = self.why.as_deref().unwrap_or("no reason is known");
                format!("version {candidate} was rolled back to version {former} {since} ago: {why}")
            }
            RolloutPhase::Completed => format!("version {candidate} has replaced version {former}"),
            RolloutPhase::Released => {
                let kept = figures::span(self.kept_s.unwrap_or_default());
                format!("version {candidate} is released; version {former} is kept for {kept}")
            }
            _ => format!("version {candidate} beside version {former}: {} for {since}", self.phase_text()),
        };
        format!("{state}{}", self.copies.text())
    }
}

impl MirrorStatus {
    fn text(&self) -> String {
        if self.copied == 0 {
            return String::new();
        }
        let first = self.first_difference.as_ref().map(|first| {
            let DifferenceStatus { inputs_sha256, why } = first;
            format!("; the first, for inputs with SHA-256 {inputs_sha256}: {why}")
        });
        format!(
            "; {} copies, {} answers compared, {} differ{}",
            self.copied,
            self.compared,
            self.differences,
            first.unwrap_or_default()
        )
    }
}

impl From<MirrorCounts> for MirrorStatus {
    fn from(counts: MirrorCounts) -> Self {
        let first = counts.first_difference;
        Self {
            copied: counts.copied,
            skipped: counts.skipped,
            compared: counts.compared,
            differences: counts.differences,
            first_difference: first
                .map(|first| DifferenceStatus { inputs_sha256: first.inputs_sha256, why: first.why }),
        }
    }
}

/// Returns a fraction as a percentage, as the configuration has it.
fn part(fraction: f64) -> String {
    format!("{}%", (fraction * 1e6).round() / 1e4)
}

fn age_s(since: SystemTime) -> f64 {
    since.elapsed().unwrap_or_default().as_secs_f64()
}

impl ModelStatus {
    /// Returns the model and the version, which identify the counters of a row.
    pub(crate) fn instance(&self) -> (&str, u32) {
        (&self.model, self.version)
    }

    /// Returns what a version that is not released does.
    pub(crate) fn version_state(&self) -> Option<String> {
        match self.role {
            VersionRole::Candidate => self.rollout.as_ref().map(RolloutStatus::phase_text),
            VersionRole::Former => Some("kept".to_owned()),
            VersionRole::Released | VersionRole::Loaded => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rollout(phase: RolloutPhase) -> RolloutStatus {
        RolloutStatus {
            candidate: 2,
            former: 1,
            phase,
            age_s: 12.0,
            mirror: 0.05,
            canary: 0.1,
            kept_s: Some(300.0),
            why: Some("2 of 40 answers differ".to_owned()),
            copies: MirrorStatus::default(),
        }
    }

    #[test]
    fn a_rollback_names_its_reason_and_the_first_difference() {
        let first =
            DifferenceStatus { inputs_sha256: "ab12".to_owned(), why: "output `y` differs".to_owned() };
        let copies = MirrorStatus {
            copied: 41,
            compared: 40,
            differences: 2,
            first_difference: Some(first),
            ..MirrorStatus::default()
        };
        let text = RolloutStatus { copies, ..rollout(RolloutPhase::RolledBack) }.text();
        assert_eq!(
            text,
            "version 2 was rolled back to version 1 12 s ago: 2 of 40 answers differ; 41 copies, 40 answers \
             compared, 2 differ; the first, for inputs with SHA-256 ab12: output `y` differs"
        );
    }

    #[test]
    fn the_state_shows_how_far_the_new_version_is() {
        assert!(rollout(RolloutPhase::Canary).text().contains("version 2 beside version 1: canary 10%"));
        assert!(rollout(RolloutPhase::Released).text().contains("version 1 is kept for 5"));
        let of_role = |role| ModelStatus {
            role,
            rollout: Some(rollout(RolloutPhase::Mirror)),
            ..ModelStatus::default()
        };
        assert!(of_role(VersionRole::Candidate).version_state().unwrap().starts_with("mirror 5%"));
        assert_eq!(of_role(VersionRole::Released).version_state(), None);
    }
}
