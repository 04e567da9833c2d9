//! Tests of the metrics of versions.

use super::render;
use super::tests::{NOTHING, has, model};
use crate::status::{MirrorStatus, RolloutPhase, RolloutStatus};
use shadowslice_control::controller::VersionRole;

#[test]
fn a_new_version_has_its_own_series_and_only_it_has_those_of_the_rollout() {
    let copies = MirrorStatus { copied: 9, skipped: 2, compared: 8, differences: 1, first_difference: None };
    let rollout = RolloutStatus {
        candidate: 2,
        former: 1,
        phase: RolloutPhase::Canary,
        age_s: 1.0,
        mirror: 0.05,
        canary: 0.1,
        kept_s: None,
        why: None,
        copies,
    };
    let mut versions = [model("m"), model("m")];
    versions.iter_mut().for_each(|model| model.status.rollout = Some(rollout.clone()));
    (versions[1].status.version, versions[1].status.role) = (2, VersionRole::Candidate);
    let text = render(&versions, None, None, &[], &NOTHING);
    for line in [
        r#"shadowslice_model_released{model="m",gpu="1"} 1"#,
        r#"shadowslice_model_released{model="m",gpu="1",version="2"} 0"#,
        r#"shadowslice_canary_ratio{model="m",gpu="1",version="2"} 0.1"#,
        r#"shadowslice_mirror_copies_total{model="m",gpu="1",version="2"} 9"#,
        r#"shadowslice_mirror_skipped_total{model="m",gpu="1",version="2"} 2"#,
        r#"shadowslice_mirror_compared_total{model="m",gpu="1",version="2"} 8"#,
        r#"shadowslice_mirror_differences_total{model="m",gpu="1",version="2"} 1"#,
        r#"nv_inference_request_success{model="m",version="2"} 4"#,
    ] {
        has(&text, line);
    }
    assert!(!text.contains(r#"shadowslice_canary_ratio{model="m",gpu="1"} "#), "{text}");
}
