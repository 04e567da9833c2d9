//! How many SMs a copy needs, by its profile.

use std::time::Duration;

use shadowslice_shared::groups::GROUP_SMS;
use shadowslice_shared::profile::Execution;
use shadowslice_shared::units::Sms;

/// What a copy is to do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CopyLoad {
    /// Within which a request must be answered.
    pub slo: Duration,
    /// Requests of one row each second.
    pub rate: f64,
    /// Rows.
    pub max_batch: u32,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SmRequirement {
    pub sms: Sms,
    /// Rows of the batches that keep up with the rate.
    pub batch: u32,
    /// The part of the time in which the copy executes, 0 to 1.
    pub busy: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum UnmetLoad {
    #[error("the SLO cannot be met: two batches of one row take {} ms on the whole GPU", two.as_secs_f64() * 1e3)]
    Slo { two: Duration },
    #[error("a copy serves {max:.0} requests/s within the SLO at max; ask for more copies")]
    Rate { max: f64 },
}

/// The fewest SMs on which a request is in time though it comes just after a batch was sent, so that
/// it waits for one batch and is in the next: `2 · t(b, s) ≤ SLO` and `b / t(b, s) ≥ rate` for some
/// batch size `b` (gpulet, ATC 2022; ParvaGPU, SC 2024).
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

/// Powers of two, and the most.
fn batches(max: u32) -> impl Iterator<Item = u32> {
    (0..u32::BITS).map(|power| 1 << power).take_while(move |&batch| batch < max).chain([max.max(1)])
}
