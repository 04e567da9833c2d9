//! The number of SMs that a copy of a model needs, computed from the model's profile.

use std::time::Duration;

use shadowslice_shared::groups::GROUP_SMS;
use shadowslice_shared::profile::Execution;
use shadowslice_shared::units::Sms;

/// The load on one copy of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CopyLoad {
    /// The time within which a request must be answered.
    pub slo: Duration,
    /// The number of requests per second, each of one row.
    pub rate: f64,
    /// The maximum batch size, in rows.
    pub max_batch: u32,
}

/// The SMs that a copy needs for its load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SmRequirement {
    /// The number of SMs.
    pub sms: Sms,
    /// The batch size that sustains the rate, in rows.
    pub batch: u32,
    /// The fraction of the time during which the copy executes, 0 to 1.
    pub busy: f64,
}

/// The reason why one copy cannot serve the load, even on the whole GPU.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum UnmetLoad {
    /// The SLO is too short for the model.
    #[error(
        "the SLO cannot be met: a request may wait for one batch and run in the next, which takes {:.1} ms on the whole GPU; raise the SLO",
        two.as_secs_f64() * 1e3
    )]
    Slo {
        /// The time of two batches of one row on the whole GPU.
        two: Duration,
    },
    /// The rate is too high for one copy.
    #[error("a copy serves at most {max:.0} requests/s within the SLO; use more copies")]
    Rate {
        /// The maximum number of rows per second that a copy can serve within the SLO.
        max: f64,
    },
}

/// Returns the minimum number of SMs for the load. In the worst case, a request arrives just after a
/// batch was sent. The request waits for that batch and is part of the next batch. Some batch size `b`
/// must therefore satisfy `2 · t(b, s) ≤ SLO` and `b / t(b, s) ≥ rate` (gpulet, ATC 2022; ParvaGPU, SC
/// 2024).
pub fn sm_requirement(execution: &Execution, gpu: Sms, load: &CopyLoad) -> Result<SmRequirement, UnmetLoad> {
    let step = GROUP_SMS;
    let sizes = (1..=gpu.0 / step).map(|groups| groups * step).filter(|&sms| sms < gpu.0).chain([gpu.0]);
    let mut max = 0.0_f64;
    for sms in sizes {
        for batch in batches(load.max_batch) {
            let took = execution.time(batch, f64::from(sms));
            let throughput = f64::from(batch) / took.as_secs_f64();
            if took * 2 > load.slo {
                break;
            }
            max = max.max(throughput);
            if throughput >= load.rate {
                return Ok(SmRequirement { sms: Sms(sms), batch, busy: load.rate / throughput });
            }
        }
    }
    match max > 0.0 {
        true => Err(UnmetLoad::Rate { max }),
        false => Err(UnmetLoad::Slo { two: execution.time(1, f64::from(gpu.0)) * 2 }),
    }
}

/// Returns the batch sizes to consider: the powers of two below `max`, and `max` itself.
fn batches(max: u32) -> impl Iterator<Item = u32> {
    (0..u32::BITS).map(|power| 1 << power).take_while(move |&batch| batch < max).chain([max.max(1)])
}
