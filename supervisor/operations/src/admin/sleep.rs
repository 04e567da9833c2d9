//! The commands `sleep` and `wake`.

use std::time::Duration;

use shadowslice_control::models::Served;
use shadowslice_datapath::pipeline::{SleepCause, SleepPhase};
use shadowslice_shared::units::ms;

use super::ControlReply;

/// The time within which a model must fall asleep or wake. A batch may have to end first.
const SLEEP_TIMEOUT: Duration = Duration::from_secs(30);

/// The time within which a worker must start for a wake.
const START_TIMEOUT: Duration = Duration::from_mins(10);

/// Makes a model sleep or wakes it, and waits until this is complete.
pub(super) async fn sleep(served: &Served, asleep: bool) -> Result<ControlReply, String> {
    let pipeline = &served.pipeline;
    let Some(before) = pipeline.sleep_report() else {
        return Err("no worker of the model serves".to_owned());
    };
    let wanted = if asleep { SleepPhase::Asleep } else { SleepPhase::Awake };
    if before.phase == wanted {
        return Ok(ControlReply::Slept { asleep, news: false, took_ms: None });
    }
    let mut phase_rx = pipeline.sleep_phase();
    if asleep {
        pipeline.sleep(SleepCause::Command, false)?;
    } else {
        pipeline.order_wake();
    }
    let reached = |phase: &SleepPhase| *phase == wanted;
    let starts = !asleep && before.ends_worker.is_some();
    let limit = if starts { START_TIMEOUT } else { SLEEP_TIMEOUT };
    let changed = tokio::time::timeout(limit, phase_rx.wait_for(reached)).await;
    if !matches!(changed, Ok(Ok(_))) {
        let (seconds, state) = (limit.as_secs(), if asleep { "asleep" } else { "awake" });
        return Err(format!(
            "the model is not {state} after {seconds} s; see its state in `shadowslice status` and the log"
        ));
    }
    let counts = pipeline.sleep_report().map(|report| report.counts).unwrap_or_default();
    let took = if asleep { counts.last_sleep_time } else { counts.last_wake_time };
    Ok(ControlReply::Slept { asleep, news: true, took_ms: took.map(ms) })
}
